"""Replies told apart: thoughts, content and calls, for every cut of their text into events."""

import importlib.util
import itertools
import json
import random
import re
import time
from pathlib import Path

import pytest

from fastjax.data.template import ChatTemplate
from fastjax.errors import DataError
from fastjax.generation.replies import ReplyFormat, ReplyParser
from tests.support import real_templates, reply_templates

PROPERTIES = {"city": {"type": "string"}, "days": {"type": "integer"}, "more": {"type": "object"}}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "d", "parameters": {"properties": PROPERTIES}}}
    for name in ("get_weather", "look")
]
QUESTION = {"role": "user", "content": "q"}
FORMS = sorted(reply_templates.SOURCES)
SEVERAL = [form for form in FORMS if form != "harmony"]
HARD = 'say "hé\\n" \\ \n\t{"a": [1]} 世界 😀 </tool' + "x" * 50


def form_of(name):
    return ReplyFormat.of(reply_templates.template(name))


def message(content="", calls=(), **more):
    made = [
        {"type": "function", "id": f"a0000000{n}", "function": {"name": name, "arguments": arguments}}
        for n, (name, arguments) in enumerate(calls)
    ]
    return {"role": "assistant", "content": content, **({"tool_calls": made} if made else {}), **more}


def said(template, answer, tools=TOOLS):
    """The text that a template writes for an answer behind the generation prompt, and that prompt."""
    prompt = template.render([QUESTION], "p", {"tools": tools}, add_generation_prompt=True).text
    text = template.render([QUESTION, answer], "p", {"tools": tools}).text
    assert text.startswith(prompt)
    return re.sub(r"(<\|im_end\|>\n|<\|call\|>|<\|return\|>)$", "", text[len(prompt) :]), prompt


def read(form, events, *, thought=False, tools=TOOLS, finish="stop"):
    """A reply's deltas joined, and the reply by the parser itself, which must be the same where it is complete."""
    parser = ReplyParser(form, thought, tools)
    deltas = [delta for event in events for delta in parser.feed(event)] + parser.end(finish)
    texts = {kind: "".join(delta.text for delta in deltas if delta.kind == kind) for kind in ("reasoning", "content")}
    calls = {}
    for delta in deltas:
        if delta.kind == "tool_call":
            assert (delta.name is not None) == (delta.id is not None) == (delta.index not in calls)
            calls.setdefault(delta.index, [delta.id, delta.name, ""])[2] += delta.text
    reply = parser.reply()
    assert (reply.reasoning, reply.content) == (texts["reasoning"], texts["content"])
    told = [tuple(call) for call in calls.values()]
    assert list(calls) == list(range(len(calls))) and set(map(tuple, reply.tool_calls)) <= set(told)
    return reply, told


def pieces(text, size):
    return [text[start : start + size] for start in range(0, len(text), size)]


def plain(reply):
    return reply.reasoning, reply.content, [(call.name, json.loads(call.arguments)) for call in reply.tool_calls]


@pytest.mark.parametrize("name", FORMS)
def test_every_cut_gives_the_same(name):
    """Rows 44–46: text and calls, two to one function, hard arguments."""
    template, form = reply_templates.template(name), form_of(name)
    calls = [("look", {"city": HARD, "days": -5}), ("get_weather", {}), ("look", {"city": "b", "more": {"c": [None]}})]
    calls = calls[:1] if name == "harmony" else calls
    text, _ = said(template, message("" if name == "harmony" else "Let me see.", calls, reasoning_content="hm\nhm"))
    if name == "llama":
        text = text.replace("see.{", "see.\n{")
    whole, _ = read(form, [text])
    assert plain(whole) == ("hm\nhm", "" if name == "harmony" else "Let me see.", calls)
    assert len({call.id for call in whole.tool_calls}) == len(calls)
    assert all(re.fullmatch("[A-Za-z0-9]{9}", call.id) for call in whole.tool_calls)
    for size in (1, 2, 3, 5, 11):
        assert plain(read(form, pieces(text, size))[0]) == plain(whole), size
    for place in range(0, len(text), 3):
        assert plain(read(form, [text[:place], text[place:]])[0]) == plain(whole), place


@pytest.mark.exhaustive(by="test_every_cut_gives_the_same")
@pytest.mark.parametrize("name", FORMS)
def test_every_cut_of_a_broken_reply_gives_the_same(name):
    """Pieces of replies put into each other, with the ends and the brackets of all forms."""
    draw, form = random.Random(name), form_of(name)
    calls = [("look", {"city": 'a{b}\n"c\\', "days": 3}), ("get_weather", {})][: 1 if name == "harmony" else 2]
    answer = message("" if name == "harmony" else "Hi", calls, reasoning_content="hm")
    text, _ = said(reply_templates.template(name), answer)
    starts = [draw.randrange(len(text)) for _ in range(40)]
    inserted = [text[start : start + draw.randint(1, 25)] for start in starts] + [*'{}"<,] \n\\', "</", ""]
    for _ in range(150):
        broken = text
        for _ in range(draw.randint(1, 4)):
            place = draw.randrange(len(broken) + 1)
            broken = broken[:place] + draw.choice(inserted) + broken[place + draw.randint(0, 12) :]
        how = {"finish": draw.choice(["stop", "length"]), "thought": draw.random() < 0.2}
        whole = plain(read(form, [broken], **how)[0])
        for _ in range(3):
            cuts = sorted({0, len(broken), *draw.choices(range(len(broken) + 1), k=len(broken) // 4)})
            events = [broken[start:end] for start, end in itertools.pairwise(cuts)]
            assert plain(read(form, events, **how)[0]) == whole, (broken, how)


@pytest.mark.parametrize("name", FORMS)
def test_arguments_come_as_they_are_written(name):
    """Row 45: 10 kB are not held back."""
    argument = HARD + "".join(map(chr, range(32, 127))) * 100
    text, _ = said(reply_templates.template(name), message("", [("look", {"city": argument})]))
    parser = ReplyParser(form_of(name), False, TOOLS)
    told, behind = "", 0
    for place, event in enumerate(pieces(text, 4)):
        told += "".join(delta.text for delta in parser.feed(event) if delta.kind == "tool_call")
        behind = max(behind, 4 * (place + 1) - len(told) if told else 0)
    parser.end()
    [call] = parser.reply().tool_calls
    assert json.loads(call.arguments) == {"city": argument} and call.arguments == told
    assert behind < 200 and parser.held == 0


@pytest.mark.parametrize("name", FORMS)
def test_a_draft_in_the_thought_is_no_call(name):
    """Row 47, also with a prompt that has begun the thought."""
    template, form = reply_templates.template(name), form_of(name)
    draft = said(template, message("", [("look", {"city": "draft"})]))[0].replace("<|channel|>", "").strip()
    draft = draft.replace("<|message|>", "")
    text, prompt = said(template, message("", [("look", {"city": "x"})], reasoning_content=f"I write\n{draft}\nthen"))
    expected = (f"I write\n{draft}\nthen", "", [("look", {"city": "x"})])
    assert plain(read(form, [text])[0]) == expected
    assert not form.begins_in_thought(prompt)
    begun, rest = text.split("I write\n")
    assert form.begins_in_thought(prompt + begun)
    for size in (1, 7, len(text)):
        assert plain(read(form, pieces("I write\n" + rest, size), thought=True)[0]) == expected


@pytest.mark.parametrize("name", FORMS)
def test_calls_cut_by_the_limit(name):
    """Row 48: no half call is told as whole, no markup is content; what was complete stays."""
    calls = [("get_weather", {"city": "a"}), ("look", {"city": "some words", "days": 5})]
    calls = calls[1:] if name == "harmony" else calls
    text, _ = said(reply_templates.template(name), message("", calls))
    form, counts = form_of(name), set()
    for place in range(len(text)):
        reply, _ = read(form, [text[:place]], finish="length")
        assert reply.reasoning == "" and reply.content.strip() in ("", "<", "[", "<t", "[T", "<｜", "<|"), text[:place]
        found = [(call.name, json.loads(call.arguments)) for call in reply.tool_calls]
        assert found == calls[: len(found)]
        counts.add(len(found))
    assert counts >= set(range(len(calls)))


@pytest.mark.parametrize("name", FORMS)
def test_no_calls_come_back_as_text(name):
    """Row 49: an unknown function, no JSON, an end amid a call, no functions at all."""
    form = form_of(name)
    text, _ = said(reply_templates.template(name), message("", [("look", {"city": "x"})]))
    wrongs = [text.replace("look", "unknown"), text.replace("look", "look at"), text.replace('"x"}', "x]")]
    for wrong in wrongs:
        if wrong == text or (name == "harmony" and wrong == wrongs[1]):  # there the name ends at a space
            continue
        for size in (1, 3, len(wrong)):
            reply, _ = read(form, pieces(wrong, size))
            assert not reply.tool_calls and reply.content, wrong
            assert reply.content.strip() == wrong.strip()
    half, _ = read(form, [text[: text.index("city") + 5]])
    assert not half.tool_calls and half.content
    if name != "harmony":
        assert read(form, [text], tools=())[0].content == text


@pytest.mark.parametrize("name", FORMS)
def test_text_without_marks_is_left_as_it_is(name):
    text = ' \n a < b [1] {"k": 2}\n{"name": 5}\n<tool> </think> [TOOL] `x` \n\n'
    for size in (1, 4, len(text)):
        for finish in ("stop", "length"):
            assert read(form_of(name), pieces(text, size), finish=finish)[0].content == text


@pytest.mark.parametrize("name", ["coder", "harmony", "hermes", "llama"])
@pytest.mark.parametrize("tag", ["thought", "call", "marker"])
def test_a_tag_that_is_never_closed_costs_no_more_per_event(name, tag):
    """Row 50: 100 kB in small events, each as fast at the end as at the beginning."""
    text, _ = said(
        reply_templates.template(name), message("", [("look", {"city": "CITY"})], reasoning_content="THOUGHT")
    )
    begun = text.split({"thought": "THOUGHT", "call": "CITY", "marker": "look"}[tag])[0]
    parser = ReplyParser(form_of(name), False, TOOLS)
    parser.feed(begun)
    events = list(itertools.islice(itertools.cycle(["some words \n", "<", "\n\n", "<tool", '{"', "[TOO"]), 24_000))
    half = len(events) // 6
    times = []
    for part in (events[half : 2 * half], events[-half:]):
        start = time.process_time()
        for event in part:
            parser.feed(event)
        times.append(time.process_time() - start)
    parser.end("length")
    assert times[1] < 3 * times[0] + 0.05, times


@pytest.mark.torch
def test_what_trls_templates_write_is_read():
    """Templates that TRL ships: thoughts and calls, written by the template and read again."""
    trl = pytest.importorskip("trl", reason="TRL is in the environment with torch")
    files = sorted((Path(str(importlib.util.find_spec(trl.__name__).origin)).parent / "chat_templates").glob("*.jinja"))
    calls, counts = (
        [("get_weather", {"city": HARD.replace("\\", "/"), "days": 3}), ("look", {"city": "b"})],
        dict.fromkeys("tc", 0),
    )
    for file in files:
        source = file.read_text("utf-8")
        special = real_templates.special_tokens(source)
        template = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}, ends=special)
        form = ReplyFormat.of(template)
        names = re.compile("|".join(map(re.escape, special)) or "(?!)")
        for kind, answer in (("t", message("answer", reasoning_content="thought")), ("c", message("", calls))):
            try:
                text, prompt = said(template, answer, TOOLS if kind == "c" else None)
            except (DataError, AssertionError):
                continue
            text = names.sub(lambda found, form=form: found[0] if form.parts_reply(found[0]) else "", text).rstrip()
            if (kind == "c" and not (form.takes_tools and "look" in text)) or (
                kind == "t" and not ((form.reasoning or form.channels) and "thought" in text)
            ):
                continue
            reply, _ = read(form, pieces(text, 3), thought=form.begins_in_thought(prompt))
            expected = ("thought", "answer", []) if kind == "t" else (reply.reasoning, "", calls)
            assert plain(reply) == expected, (file.name, text)
            counts[kind] += 1
    assert counts["t"] >= 15 and counts["c"] >= 20, counts
