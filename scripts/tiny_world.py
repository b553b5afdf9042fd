"""The small world that the embedded model's text is about: people who order things.

`base_document` is what the base model learns: sentences, facts, lists, and conversations that ask about a sentence or
copy from it. What it does not know are the tasks of the embedded data sets: `record_document`, a sentence as a JSON
record (tiny-chat); `ledger_document`, plain text in a form of its own (tiny-text); `shelf_document`, a class in one
word at the end of a conversation (tiny-answers); `latest_pair`, which of two right answers is wanted (tiny-pairs).

    python3 scripts/tiny_world.py                 # writes the data sets into fastjax/assets
    python3 scripts/tiny_world.py --output /tmp/assets
"""

import argparse
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

ASSETS = Path(__file__).resolve().parent.parent / "fastjax" / "assets"

NAMES = (
    "Nora Omar Lena Hugo Mila Ivan Ruth Adam Sara Noah Emma Paul Alma Finn Iris Karl Dana Leon Vera Otto Tara Igor "
    "Jane Eric Lucy Mark Rosa Alan Zoe Ben Amy Sam Eva Tom Ida Max"
).split()
ITEMS = (
    "pens cups hats bags books lamps chairs boxes plates bells spoons kites shirts coats rings ropes candles baskets "
    "bottles brushes clocks drums forks gloves jars knives maps mirrors nails paddles rugs scarves shovels socks tables"
).split()
COLORS = "red green blue black white yellow brown pink gray purple orange golden".split()
PLACES = "market harbor school garden station bakery library castle village museum theater farm".split()
MOODS = "happy tired quiet busy hungry brave kind young".split()
SENTENCES = (
    "{who} bought {count} {color} {item} for {price} coins each.",
    "For {price} coins each, {who} bought {count} {color} {item}.",
    "{count} {color} {item} were sold to {who} at {price} coins each.",
    "{who} paid {price} coins each for {count} {color} {item}.",
    "{who} ordered {count} {item} in {color}, each for {price} coins.",
    "The {count} {color} {item} that {who} ordered cost {price} coins each.",
)
QUESTIONS = (
    ("Who bought the {item}?", "{who}."),
    ("What did {who} buy?", "{color} {item}."),
    ("What color were the {item}?", "{color}."),
    ("How many {item} did {who} buy?", "{count}."),
    ("What was the price of one of the {item}?", "{price} coins."),
)
FACTS = (
    "{who} went to the {place}.",
    "{who} was {mood}.",
    "The {item} were {color}.",
    "There were {count} of the {item}.",
    "One of the {item} cost {price} coins.",
    "The {place} was {mood} that day.",
    "{who} took the {color} {item} to the {place}.",
    "{who} said: I have {count} {item} now.",
)
FIELDS = ("who", "item", "color", "count", "price")
KEYS = ("name", "age", "place", "animal", "size", "shape", "mood", "tool", "day", *FIELDS)
SYSTEM = ("Answer in a few words.", "You are a helpful clerk.", "Be brief.")

Document = dict[str, object]


def order(rng: random.Random) -> dict[str, object]:
    """The facts of an order."""
    return {
        "who": rng.choice(NAMES),
        "item": rng.choice(ITEMS),
        "color": rng.choice(COLORS),
        "count": rng.randint(2, 99),
        "price": rng.randint(2, 99),
        "place": rng.choice(PLACES),
        "mood": rng.choice(MOODS),
    }


def sentence(facts: dict[str, object], rng: random.Random) -> str:
    """The order in one of six forms."""
    return rng.choice(SENTENCES).format(**facts)


def words(rng: random.Random, count: int) -> list[str]:
    """Random words and numbers."""
    pool = NAMES + ITEMS + COLORS + PLACES + MOODS
    return [rng.choice(pool) if rng.random() < 0.75 else str(rng.randint(2, 99)) for _ in range(count)]


def base_document(rng: random.Random) -> Document:
    """One document of the base model's training text."""
    if rng.random() < 0.3:
        return {"text": _prose(rng)}
    turns = _questions(rng) if rng.random() < 0.5 else [_copying(rng) for _ in range(rng.randint(1, 3))]
    messages = [{"role": "system", "content": rng.choice(SYSTEM)}] if rng.random() < 0.3 else []
    for question, answer in turns:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": messages}


def record_document(rng: random.Random) -> Document:
    """One conversation of the task: a sentence, and its record."""
    facts = order(rng)
    record = {name: facts[name] for name in FIELDS}
    return {
        "messages": [
            {"role": "user", "content": f"Record: {sentence(facts, rng)}"},
            {"role": "assistant", "content": json.dumps(record)},
        ]
    }


def ledger_document(rng: random.Random) -> Document:
    """A day's orders as a page of a ledger; the last two lines follow from those above them."""
    orders = [order(rng) for _ in range(rng.randint(3, 16))]
    lines = [f"Ledger of the {rng.choice(PLACES)}, a {rng.choice(MOODS)} day"]
    lines += [
        f"{n}. {o['who']} / {o['count']} {o['color']} {o['item']} / {o['price']}" for n, o in enumerate(orders, 1)
    ]
    lines.append("Sold: " + ", ".join(str(o["item"]) for o in orders))
    lines.append("To: " + ", ".join(str(o["who"]) for o in orders))
    return {"text": "\n".join(lines)}


def shelf_document(rng: random.Random) -> Document:
    """A conversation about an order; the last answer is the shelf, one of twelve, which has the goods' colour."""
    facts = order(rng)
    asked = [(q.format(**facts), a.format(**facts)) for q, a in rng.sample(QUESTIONS, rng.randint(0, 2))]
    turns = [*asked, ("Which shelf?", str(facts["color"]))]
    messages = []
    for number, (question, answer) in enumerate(turns):
        text = question if number else f"{sentence(facts, rng)} {question}"
        messages += [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]
    return {"messages": messages}


def latest_pair(rng: random.Random) -> Document:
    """Two orders of one person, and what that person bought: by the last one (chosen), by the first one (rejected)."""
    first, last = order(rng), order(rng)
    last["who"] = first["who"]
    (question, answer) = QUESTIONS[1]
    told = f"{sentence(first, rng)} {sentence(last, rng)} {question.format(**first)}"
    return {
        "prompt": [{"role": "user", "content": told}],
        "chosen": [{"role": "assistant", "content": answer.format(**last)}],
        "rejected": [{"role": "assistant", "content": answer.format(**first)}],
    }


def write_data_sets(output: Path, seed: int = 0) -> None:
    """Write the embedded data sets; no held-out row begins as a training row does."""
    _write_data_set(output / "tiny-chat", record_document, 2_000, 100, seed + 1)
    _write_data_set(output / "tiny-text", ledger_document, 180, 24, seed + 2)
    _write_data_set(output / "tiny-answers", shelf_document, 320, 60, seed + 3)
    _write_data_set(output / "tiny-pairs", latest_pair, 300, 60, seed + 4)


def _write_data_set(folder: Path, make: Callable[[random.Random], Document], train: int, test: int, seed: int) -> None:
    rng = random.Random(seed)
    learnt = [make(rng) for _ in range(train)]
    beginnings = {_beginning(document) for document in learnt}
    held = [make(rng) for _ in range(test * 6 // 5)]
    held = [document for document in held if _beginning(document) not in beginnings][:test]
    folder.mkdir(parents=True, exist_ok=True)
    for name, documents in (("train", learnt), ("test", held)):
        lines = "".join(json.dumps(document) + "\n" for document in documents)
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")


def _beginning(document: Document) -> str:
    messages: Any = document.get("prompt") or document.get("messages")
    return str(document.get("text") or messages[0]["content"])


def _questions(rng: random.Random) -> list[tuple[str, str]]:
    """Questions about one order, or about one of two."""
    facts, other = order(rng), order(rng)
    text = [sentence(facts, rng)]
    if other["who"] != facts["who"] and other["item"] != facts["item"] and rng.random() < 0.3:
        text.insert(rng.randint(0, 1), sentence(other, rng))
    asked = [(q.format(**facts), a.format(**facts)) for q, a in rng.sample(QUESTIONS, rng.randint(2, 5))]
    (first, answer), *rest = asked
    return [(f"{' '.join(text)} {first}", answer), *rest]


def _copying(rng: random.Random) -> tuple[str, str]:
    listed = words(rng, rng.randint(2, 7))
    plain = " ".join(listed)
    text = sentence(order(rng), rng) if rng.random() < 0.5 else plain
    return rng.choice(
        (
            (f"Repeat: {text}", text),
            (f"Repeat in quotes: {text}", f'"{text}"'),
            (f"Repeat twice: {text}", f"{text} / {text}"),
            (f"First word: {plain}", listed[0]),
            (f"Last word: {plain}", listed[-1]),
            (f"Join with commas: {plain}", ", ".join(listed)),
            (f"Put each in quotes: {plain}", " ".join(f'"{word}"' for word in listed)),
            (f"How many words? {plain}", str(len(listed))),
        )
    )


def _prose(rng: random.Random) -> str:
    kind = rng.random()
    if kind < 0.35:  # the same keys with other values: JSON-like lines
        keys = rng.sample(KEYS, rng.randint(2, 5))
        rows = [{key: rng.choice((rng.randint(2, 99), *words(rng, 2))) for key in keys} for _ in range(2)]
        return "\n".join(json.dumps(row) for row in rows)
    if kind < 0.6:  # repeated words teach a small model to copy
        listed = words(rng, rng.randint(4, 12))
        return "\n".join([" ".join(listed)] * rng.randint(2, 4))
    facts = order(rng)
    parts = [sentence(facts, rng)] + [fact.format(**facts) for fact in rng.sample(FACTS, rng.randint(2, 5))]
    return " ".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ASSETS)
    write_data_sets(parser.parse_args().output)


if __name__ == "__main__":
    main()
