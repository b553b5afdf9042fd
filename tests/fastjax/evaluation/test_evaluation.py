"""Evaluations: scores are those of the whole forward pass, tasks count what is right, and what they refuse."""

import json
import re
from pathlib import Path

import jax
import numpy as np
import pytest

from fastjax.cli import main
from fastjax.errors import ConfigError, DataError
from fastjax.evaluation import Task, completion_scores, evaluate, read_tasks, run
from fastjax.evaluation.scoring import Score
from fastjax.generation.text import answer
from fastjax.language_model import FastLanguageModel
from tests.support import saying, tiny
from tests.support.chat import write_model

QUESTIONS = ["Who bought pens?", "How many?", "And what did Ann say then, after all?"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("evaluated") / "model")


@pytest.fixture(scope="module")
def model(folder):
    return FastLanguageModel.from_pretrained(str(folder), max_seq_length=192, dtype="float32", load_in_4bit=False)[0]


def write(file, rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(file)


def test_scores_are_those_of_the_whole_forward_pass():
    changes = {"tie_word_embeddings": False, "initializer_range": 0.3, "hidden_size": 64}
    config = tiny.config(**changes)
    base = tiny.model(tiny.shared_folder(**changes), config, load_in_4bit=True)
    made = tiny.adapted(base, target_modules=["q_proj", "down_proj"])
    documents = [one.tolist() for one in tiny.documents(config, (9, 30, 33, 2, 20, 41), seed=4)]
    examples = [(one[: len(one) // 2], one[len(one) // 2 :]) for one in documents]

    def logits_of(tokens):
        row = np.zeros((1, 48), np.int32)  # of one length, for one program: what is behind is not seen
        row[0, : len(tokens)] = tokens
        return tiny.logits(made, row)[0, : len(tokens)]

    for prompt in [prompt for prompt, _ in examples[:2]]:
        said = []
        for _ in range(5):
            said.append(int(logits_of([*prompt, *said])[-1].argmax()))
        examples.append((prompt, said))
    found = completion_scores(made, examples, rows=2)
    for (prompt, completion), score in zip(examples, found, strict=True):
        logits = logits_of([*prompt, *completion])[len(prompt) - 1 : -1]
        expected = np.asarray(jax.nn.log_softmax(logits, axis=-1))[np.arange(len(completion)), completion].sum()
        np.testing.assert_allclose(score.log_prob, expected, rtol=2e-5)
        assert score.tokens == len(completion)
        assert score.greedy == (logits.argmax(-1).tolist() == completion)
    assert [score.greedy for score in found[-2:]] == [True, True]
    with pytest.raises(ConfigError, match="example 1: expected at least one token .* got 2 and 0"):
        completion_scores(made, [([1], [2]), ([1, 2], [])])


def test_answers_that_match(model, tmp_path):
    said = answer(model, QUESTIONS, max_new_tokens=6)
    rows = [{"q": q, "a": f" x{a.strip()} "} for q, a in zip(QUESTIONS, said, strict=True)]
    rows[1]["a"] = "xsomething else"
    task = Task("own", "exact_match", write(tmp_path / "own.jsonl", rows), "{q}", answer="{a}", max_new_tokens=6)
    [plain] = evaluate(model, [task], batch_size=2)
    assert plain.metrics["exact_match"] == 0.0
    matching = Task(**{**vars(task), "extract": "(?s)^ ?x?(.+)$"})
    [found] = evaluate(model, [matching], batch_size=2)
    right = [bool(said[0]), False, bool(said[2])]  # in an answer of nothing, nothing is found
    assert [one["right"] for one in found.samples] == right and sum(right) == 1
    assert found.metrics == {"exact_match": pytest.approx(1 / 3), "exact_match_stderr": pytest.approx(1 / 3)}
    assert [one["answer"] for one in found.samples] == said


def test_the_likeliest_choice(folder, model, tmp_path, capsys):
    """Labels as number, letter and text; as plain texts behind two others; and by the command."""
    choices = ["He has 9 pens.", "Ann.", "nobody knows that yet"]
    rows = [{"q": q, "c": choices, "right": right} for q, right in zip(QUESTIONS, (1, "C", "Ann."), strict=True)]
    data = write(tmp_path / "choices.jsonl", rows)
    shots = {"few_shot": 2, "few_shot_data": data}
    tasks = [
        Task("chat", "choice", data, "{q}", choices="c", label="right"),
        Task("raw", "choice", data, "{q}\n", choices="c", label="right", chat=False, **shots),
    ]
    chat, raw = evaluate(model, tasks, batch_size=2)
    assert [one["expected"] for one in chat.samples] == [1, 2, 1]
    before = "".join(f"{q}\n {choices[right]}\n\n" for q, right in zip(QUESTIONS, (1, 2), strict=False))
    for number, sample in enumerate(raw.samples):
        texts = [f"{before}{QUESTIONS[number]}\n {choice}" for choice in choices]
        expected = [text_log_prob(model, text, len(choice) + 1) for text, choice in zip(texts, choices, strict=True)]
        np.testing.assert_allclose(sample["log_probs"], expected, rtol=1e-4)
        assert sample["answer"] == int(np.argmax(expected))
    lengths = np.asarray([len(choice) for choice in choices])
    by_byte = [int(np.argmax(np.asarray(one["log_probs"]) / lengths)) == one["expected"] for one in raw.samples]
    assert raw.metrics["acc_norm"] == raw.metrics["acc_bytes"] == np.mean(by_byte)

    (tmp_path / "tasks.yaml").write_text(json.dumps({"tasks": [vars(tasks[0])]}))
    command = ["evaluate", "--model", str(folder), "--tasks", str(tmp_path / "tasks.yaml"), "--batch_size", "2"]
    command += ["--max_seq_length", "192", "--dtype", "float32", "--output", str(tmp_path / "out.json")]
    assert main([*command, "--no_compilation_cache"]) == 0
    assert "acc_norm" in capsys.readouterr().out
    [written] = json.loads((tmp_path / "out.json").read_text())["tasks"]
    assert written["metrics"] == chat.metrics
    np.testing.assert_allclose([s["log_probs"] for s in written["samples"]], [s["log_probs"] for s in chat.samples])


def test_the_right_choice_is_where_its_label_stands():
    """ARC's labels are letters or numbers from 1, and a text may look like one of them."""
    task = Task(**TASK | {"choices": "choices", "label": "answerKey"})

    def label(labels, right, texts=("2", "1", "c", "d")):
        row = {"choices": {"text": list(texts), "label": labels}, "answerKey": right}
        return task.label_of(row, task.choices_of(row, "w"), "w")

    assert [label(["1", "2", "3", "4"], right) for right in ("1", "4", 2)] == [0, 3, 1]
    assert [label(["A", "B", "C", "D"], right) for right in "AD"] == [0, 3]
    assert [label(["E", "F", "G", "H"], right) for right in "EH"] == [0, 3]
    for labels, right, error in (
        (["A", "B", "C", "D"], "E", "answerKey: expected one of the labels"),
        (["A", "B"], "A", "choices: label: expected 4 different labels, got"),
        (["A", "B", "B", "C"], "A", "choices: label: expected 4 different labels, got"),
    ):
        with pytest.raises(DataError, match=f"w: {error}"):
            label(labels, right)


def test_choices_are_compared_a_character_and_a_byte(model, tmp_path, monkeypatch):
    """As lm-evaluation-harness: its acc_norm divides by characters, its acc_bytes by bytes."""
    choices = ["éééé", "aaaaaaa"]  # 4 and 7 characters, 8 and 7 bytes
    data = write(tmp_path / "rows.jsonl", [{"q": "?", "c": choices, "l": 1}])
    scores = [Score(-4.0, 1, False), Score(-5.0, 1, False)]  # a character -1 and -0.71, a byte -0.5 and -0.71
    monkeypatch.setattr(run, "completion_scores", lambda *arguments, **options: scores)
    [found] = evaluate(model, [Task(**TASK | {"data": data})])
    assert found.metrics == {"acc": 0.0, "acc_norm": 1.0, "acc_bytes": 0.0}


def test_an_answer_ends_where_the_next_example_would_begin(tmp_path, monkeypatch):
    """A base model goes on with questions of its own, whose answers are not those that were asked for."""
    engines = saying.watch(monkeypatch)
    encode = saying.model({}).tokenizer.encode
    model = saying.model(saying.chain([*encode("A"), *encode("4"), *encode("\n\n"), *encode("Q:9")]))
    rows = [{"q": "Q: 2+2?\nA", "a": "4"}]
    data = write(tmp_path / "rows.jsonl", rows)
    fields = {"answer": "{a}", "extract": r"\d+", "chat": False}
    few = {"few_shot": 1, "few_shot_data": data}

    def right(**changes):
        [found] = evaluate(model, [Task("t", "exact_match", data, "{q}", **fields | changes)])
        return found.metrics["exact_match"]

    assert right(**few) == 1.0
    assert right() == 0.0 and right(until=["Q:"]) == 1.0 and right(**few, until=["never"]) == 0.0
    assert len(engines[0].cancelled) == 1, "nothing is generated behind the end"
    longer = write(tmp_path / "longer.jsonl", [{"q": "Q: 1+1?\nA:", "a": "It is\n\n2"}])
    with pytest.raises(ConfigError, match="until: expected what ends an answer, since the examples' have empty lines"):
        right(few_shot=1, few_shot_data=longer)


def text_log_prob(model, text, scored):
    """Of the last characters, a token each."""
    tokens = model.tokenizer.encode(text, add_special_tokens=False)
    padded = np.zeros((1, 192), np.int32)  # of one length, for one program: what is behind is not seen
    padded[0, : len(tokens)] = tokens
    logits = np.asarray(model.logits(padded))[0, : len(tokens) - 1]
    every = np.asarray(jax.nn.log_softmax(logits, axis=-1))[np.arange(len(tokens) - 1), tokens[1:]]
    offsets = model.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    return sum(p for p, (start, _) in zip(every, offsets[1:], strict=True) if start >= len(text) - scored)


EXACT = {"kind": "exact_match", "choices": None, "label": None, "answer": "{a}"}
TASK = {"name": "t", "kind": "choice", "data": "rows.jsonl", "prompt": "{q}", "choices": "c", "label": "l"}


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"kind": "other"}, "task 't': kind: expected one of exact_match, choice, got 'other'"),
        ({"kind": ["choice"]}, r"task 't': kind: expected one of exact_match, choice, got \['choice'\]"),
        ({"until": ["a"]}, r"task 't': until: expected none with kind choice, got \['a'\]"),
        (
            EXACT | {"until": [""]},
            r"task 't': until: expected a list of at most 16 texts that are not empty or null, got \[''\]",
        ),
        (EXACT | {"extract": r"\d*"}, "extract: expected a regular expression that cannot match nothing or null"),
        ({"label": None}, "task 't': label: expected one with kind choice, got none"),
        ({"answer": "{a}"}, "task 't': answer: expected none with kind choice, got '{a}'"),
        ({"limit": 0}, "task 't': limit: expected an integer of at least 1 or null, got 0"),
        ({"limit": "many"}, "task 't': limit: expected an integer of at least 1 or null, got 'many'"),
        ({"few_shot": 2}, "task 't': few_shot_data: expected one exactly with few_shot, got None"),
        ({"choices": ["a"]}, r"task 't': choices: expected a string or a list of 2 to 26 texts or null, got \['a'\]"),
        ({"shots": 2}, "tasks.yaml:10: task 't': shots: unknown; expected one of name, kind, data, prompt"),
        (EXACT | {"extract": "("}, "extract: expected a"),
    ],
)
def test_tasks_that_are_refused(changes, error, tmp_path):
    file = tmp_path / "tasks.yaml"
    file.write_text(json.dumps({"tasks": [TASK | changes]}, indent=0))
    with pytest.raises(ConfigError, match=error):
        read_tasks(file)


@pytest.mark.parametrize(
    ("row", "error"),
    [
        (
            {"q": "?", "c": ["a", "b"], "l": 2},
            "l: expected a number from 0 to 1, a letter or one of the choices, got 2",
        ),
        ({"q": "?", "c": ["a"], "l": 0}, r"c: expected a list of two texts or more, got \['a'\]"),
        ({"c": ["a", "b"], "l": 0}, "expected a column 'q' for '{q}', got c, l"),
        ({"q": None, "c": ["a", "b"], "l": 0}, "q"),
    ],
)
def test_rows_that_are_refused(row, error, model, tmp_path):
    task = Task(**TASK | {"data": write(tmp_path / "rows.jsonl", [row])})
    with pytest.raises(DataError, match=f"rows.jsonl:1: .*{error}"):
        evaluate(model, [task])


def test_the_blocks_of_the_manual(folder, tmp_path, monkeypatch):
    text = (Path(__file__).parents[3] / "docs/evaluation.md").read_text(encoding="utf-8")
    settings, code = (re.search(rf"^```{kind}\n(.*?)^```", text, re.M | re.S)[1] for kind in ("yaml", "python"))
    monkeypatch.chdir(tmp_path)
    Path("tasks.yaml").write_text(settings)
    assert [(task.name, task.few_shot) for task in read_tasks(Path("tasks.yaml"))] == [("gsm8k", 0), ("arc", 5)]
    write(tmp_path / "pens.jsonl", [{"question": "Pens?", "other": "perhaps", "answer": "perhaps"}])
    names = {}
    exec(code.replace("path/to/model", str(folder)).replace("2048", "192"), names)
    assert names["result"].rows == 1 and len(names["result"].samples[0]["log_probs"]) == 3
