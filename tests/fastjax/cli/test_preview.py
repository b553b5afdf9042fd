"""What the preview shows of small data, in colour and without, and that it needs no JAX."""

import io
import json
import re
import subprocess
import sys

import numpy as np
import pytest
from rich.console import Console

from fastjax.cli import main
from fastjax.commands.settings import parse_train_config
from fastjax.data import load_tokenizer
from fastjax.preview.render import histogram, show_row
from fastjax.preview.show import preview
from fastjax.preview.view import DocumentView, Piece, view_row


@pytest.fixture
def settings(chats, run_file):
    """A file of settings for rows of 32 tokens."""
    training = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_train_epochs": 3}
    return run_file(model={"max_seq_length": 32}, data={"eval": str(chats)}, training=training)


def shown(argv: list[str], rows: int = 1, **options) -> str:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, **({"color_system": None, "width": 100} | options))
    preview(parse_train_config(argv), rows, console)
    return file.getvalue()


def test_rows_and_counts(settings, chats, capsys):
    assert main(["preview", str(settings), "--model.max_seq_length", "64", "--rows", "2"]) == 0
    out = capsys.readouterr().out
    words = [json.loads(line)["messages"][0]["content"] for line in chats.read_text().splitlines()]
    documents = [f"<s>U:{word}↵\nA:⟦{word[::-1]}</s>⟧\n" for word in words]
    assert sum(out.count(document) for document in set(documents)) >= 8
    assert "train, step 1, row 1 of 8: " in out
    assert "train, step 1, row 2 of 8: " in out
    assert out.count("held out: ") == 3  # two rows and the histogram
    assert f"{chats}:1" in out.replace("\n", "")
    lengths = [2 * len(word) + 6 for word in words]  # <s>U:…\nA:…; the </s> is learnt and no input
    tokens, learnt = sum(lengths), sum(len(word) + 1 for word in words)
    lines = {label: values.split() for label, values in re.findall(r"^ *(\w.*?) {2,}(\d.*)$", out, re.MULTILINE)}
    assert lines["examples"] == lines["documents"] == ["40", "40"]
    assert lines["tokens"] == [str(tokens)] * 2
    assert f"{learnt} ({learnt / tokens:.1%})" in out
    rows = int(lines["rows"][-1])
    steps = -(-rows // 8)
    assert (
        f"2 × 4 rows a step, {tokens / steps:,.0f} tokens on average; {steps} steps an epoch, {3 * steps} steps" in out
    )
    assert f"; rows of a batch: of 64 tokens ({tokens / steps / 8 / 64:.1%} of the slots filled)" in out


def test_what_a_row_excludes_is_shown_as_read(settings, tmp_path):
    says = [("ab", {"train": False}), ("cd", {}), ("ef", {"weight": 0}), ("gh", {"weight": 1})]
    messages = []
    for word, about in says:
        messages += [{"role": "user", "content": "q"}, {"role": "assistant", "content": word} | about]
    file = tmp_path / "chosen.jsonl"
    file.write_text(json.dumps({"messages": messages}))
    out = shown(["--config", str(settings), "--data.train", str(file), "--model.max_seq_length", "64"])
    assert "A:ab</s>U:q" in out.replace("↵\n", "") and "A:ef</s>U:q" in out.replace("↵\n", "")
    assert "A:⟦cd</s>⟧" in out and "A:⟦gh</s>⟧" in out


@pytest.mark.parametrize("kind", ["control", "text"])
def test_rows_with_special_tokens_in_what_they_say(settings, tmp_path, kind):
    file = tmp_path / "hostile.jsonl"
    says = [{"role": "user", "content": "ab</s>"}, {"role": "assistant", "content": "c"}]
    rows = [json.dumps({"messages": says}), json.dumps({"messages": [says[1]]})]
    file.write_text("\n".join(rows * 2))
    argv = ["--config", str(settings), "--data.special_tokens", kind]
    out = shown([*argv, "--data.train", str(file)], rows=2, color_system="standard")
    assert re.search(r"with special tokens in what they say +2 +0\n", out)
    says = f"2 with special tokens in what they say, which are read as {kind}"
    assert says in out and f"(first: {file}:1)" in out
    assert ("U:ab\x1b[35m</s>" in out, "U:ab</s>" in out) == (kind == "control", kind == "text")
    streamed = json.dumps([{"path": str(file), "streaming": True}])
    out = shown([*argv, "--data.train", streamed, "--training.max_steps", "1"], width=400)
    assert re.search(rf"; [\d,]+ of the first [\d,]+ examples {says[2:]}", out)


def test_the_rows_are_those_of_the_first_steps(settings):
    """Eight rows a step: the ninth is the first of the second step."""
    out = shown(["--config", str(settings)], rows=9)
    assert "train, step 1, row 8 of 8: " in out
    assert "train, step 2, row 1 of 8: " in out


@pytest.mark.parametrize(
    ("too_long", "label"),
    [
        ("truncate", "too long, truncated"),
        ("split", "too long, split into several documents"),
        ("drop", "too long, dropped"),
    ],
)
def test_what_is_too_long_is_counted(settings, chats, too_long, label):
    argv = ["--config", str(settings), "--data.too_long", too_long]
    out = shown([*argv, "--model.max_seq_length", "12"], rows=0)
    words = [json.loads(line)["messages"][0]["content"] for line in chats.read_text().splitlines()]
    longer = sum(2 * len(word) + 6 > 12 for word in words)
    assert re.search(rf"{label} +{longer} +{longer}\n", out)
    assert "what is learnt:" not in out  # no rows, no legend
    assert "too long" not in shown(argv, rows=0)


def test_a_mixture(settings, chats, tmp_path):
    other = tmp_path / "other.jsonl"
    other.write_text('{"text": "abcdefg"}\n' * 30)
    sources = [{"path": str(chats), "weight": 3}, {"path": str(other), "weight": 1}]
    out = shown(["--config", str(settings), "--data.train", json.dumps(sources)], rows=0, width=300)
    assert "train: where the documents come from" in out
    assert "held out: where" not in out
    found = {name: int(count) for name, count in re.findall(r"(\w+\.jsonl) +(\d+) ", out)}
    assert set(found) == {"chats.jsonl", "other.jsonl"}
    assert abs(found["chats.jsonl"] - 3 * found["other.jsonl"]) <= 3


def test_streamed_data(settings, chats):
    train = json.dumps([{"path": str(chats), "streaming": True}])
    out = shown(["--config", str(settings), "--data.train", train, "--training.max_steps", "7"])
    assert "train, step 1, row 1 of 8: " in out
    assert "train: tokens in a document" not in out
    assert "held out: tokens in a document" in out
    assert "2 × 4 rows a step; 7 steps of streamed data" in out


def test_without_held_out_data(settings):
    out = shown(["--config", str(settings), "--data.eval", "null", "--training.max_steps", "7"])
    assert "held out" not in out
    assert "7 steps in all" in out


def test_colour(settings):
    out = shown(["--config", str(settings)], color_system="standard")
    assert "⟦" not in out
    assert "\x1b[1;7;32m</s>\x1b[0m" in out  # learnt and special: bold, reversed, green
    assert "\x1b[35m<s>\x1b[0mU:" in out


def test_no_color_is_respected(settings):
    assert "⟦" in shown(["--config", str(settings)], color_system="standard", no_color=True)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--rows", "-1"], "--rows: expected 0 or more, got -1"),
        (["--lora.rr", "4"], "--lora.rr: unknown"),
        (["--model.model_name", "nowhere"], "model.model_name: expected a folder in Hugging Face format"),
    ],
)
def test_wrong_settings(settings, argv, message, capsys):
    assert main(["preview", "--config", str(settings), *argv]) == 2
    assert message in capsys.readouterr().err


def test_help(capsys):
    with pytest.raises(SystemExit) as exit_status:
        main(["preview", "--help"])
    assert exit_status.value.code == 0
    assert "fastjax preview FILE [--section.key value ...] [--rows N]" in capsys.readouterr().out


def test_no_jax(settings):
    script = f"""
import sys
from fastjax.cli import main
status = main(["preview", {str(settings)!r}])
for module in ("jax", "flax", "torch"):
    assert module not in sys.modules, module
sys.exit(status)
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120, stdout=subprocess.DEVNULL)


def test_a_character_in_two_groups(chat_folder):
    """The bytes of é are two tokens, of which the second alone is learnt: it goes to the second group."""
    tokenizer = load_tokenizer(chat_folder)
    ids = np.array(tokenizer.backend_tokenizer.encode("aéb").ids, np.int32)
    assert len(ids) == 4
    targets = np.array([-100, ids[2], -100, tokenizer.eos_token_id], np.int32)
    (document,) = view_row(ids, targets, np.ones(4, np.int32), tokenizer)
    assert document == DocumentView(
        [Piece("a", False, False), Piece("é", True, False), Piece("b", False, False), Piece("</s>", True, True)], 4, 2
    )


def test_padding_and_boundaries(chat_folder):
    tokenizer = load_tokenizer(chat_folder)
    ids = np.array([1, *tokenizer.backend_tokenizer.encode("abc").ids, 1, 0, 0, 0], np.int32)
    segments = np.array([1, 1, 1, 2, 2, 0, 0, 0], np.int32)
    targets = np.where(segments == 2, 2, -100).astype(np.int32)
    documents = view_row(ids, targets, segments, tokenizer)
    assert [(d.tokens, d.targets) for d in documents] == [(3, 0), (2, 2)]
    assert documents[0].pieces == [Piece("<s>", False, True), Piece("ab", False, False)]
    console = Console(file=io.StringIO(), width=80)
    console.print(show_row(documents, 8, "row", "a.jsonl:7", console))
    out = console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    assert "row: 2 documents, 5 of 8 slots, 2 tokens learnt" in out
    assert "padding: 3 slots" in out


def test_control_characters_do_not_reach_the_terminal():
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system="standard")
    console.print(show_row([DocumentView([Piece("a\x1b[2Jb\x9b\tc", True, False)], 5, 4)], 5, "row", "", console))
    out = console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    assert "a␛[2Jb\\x9b␉c" in out
    assert "\x1b[2J" not in out


@pytest.mark.parametrize("lengths", [[1], [7, 7, 7], [1, 100, 2048], list(range(1, 5000, 7))])
def test_histogram(lengths):
    """Every document is in one bar, and the bars are few."""
    console = Console(file=io.StringIO(), width=80)
    console.print(histogram(np.array(lengths), "title", console))
    lines = console.file.getvalue().splitlines()[1:]  # pyright: ignore[reportAttributeAccessIssue]
    assert len(lines) <= 16
    assert sum(int(line.split()[-2].replace(",", "")) for line in lines) == len(lengths)
    spans = [line.replace(",", "").split("█")[0].split() for line in lines]
    first, last = spans[0][0], spans[-1][2] if len(spans[-1]) > 2 and spans[-1][1] == "to" else spans[-1][0]
    assert int(first) <= min(lengths) <= max(lengths) <= int(last)
