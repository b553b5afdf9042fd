"""Rows of training files of every kind: damaged, and with values put in, read and encoded."""

import bz2
import csv
import gzip
import io
import json
import lzma

import pytest

from fastjax.data.columns import parse_row
from fastjax.data.encoding import Encoder
from fastjax.data.files import read_rows
from fastjax.data.named_templates import set_chat_template
from fastjax.data.preference_columns import parse_preference
from fastjax.errors import ConfigError, DataError
from tests.support import hostile, tokenizers
from tests.support.data import uncached
from tests.support.fuzz import fuzz

CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1, "b"]}'}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {}}}}}
SAID = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": [{"type": "text", "text": "what is"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "3", "name": "f"},
    {"role": "assistant", "content": "the answer 👍", "train": True, "weight": 1},
]
ROWS = (
    {"text": "the user asked 😀"},
    {"messages": SAID, "tools": [TOOL]},
    {"messages": SAID[1:2] + SAID[4:], "tools": json.dumps([TOOL])},
    {"conversations": [{"from": "human", "value": "the"}, {"from": "gpt", "value": "answer", "weight": 0}]},
    {"conversations": [{"from": "human", "value": "a"}, {"from": "function_call", "value": json.dumps(CALL)}]},
    {"prompt": "the user ", "completion": "asked"},
    {"prompt": SAID[1:2], "completion": SAID[4:]},
    {"instruction": "what", "input": "the user", "output": "is"},
    {"instruction": "what", "output": "is", "history": [["the", "user"]], "system": "s"},
    {"messages": SAID[1:2] + SAID[4:], "chat_template_kwargs": {"a": 1}, "documents": [{"title": "t"}]},
    {"input_ids": [3, 1, 4, 1], "labels": [-100, -100, 4, 1], "attention_mask": [1, 1, 1, 1]},
    {"input_ids": [3, 1, 4, 1], "completion_mask": [0, 0, 1, 1], "assistant_masks": [0, 1, 1, 1]},
)
#: Rows of preferences, in each form.
PREFERENCES = (
    {"prompt": "the user ", "chosen": "asked", "rejected": ""},
    {"chosen": "the user asked", "rejected": "the user is"},
    {"prompt": SAID[1:2], "chosen": SAID[4:], "rejected": SAID[4:], "tools": [TOOL]},
    {"prompt": "what is", "chosen": [*SAID[1:2], *SAID[4:]], "rejected": [*SAID[1:2], *SAID[4:]]},
    {"prompt": "the user ", "completion": "asked", "label": True},
)
COLUMNS = ({"text": "output"}, {"messages": "conversations"}, {"prompt": "instruction", "completion": "output"})
PACK = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}


@pytest.fixture(scope="module")
def encoders():
    """One for each of some templates, and for both ways to read special tokens."""
    found = []
    for make, template in (
        (tokenizers.byte_level, "chatml"),
        (tokenizers.byte_fallback, "mistral"),
        (lambda: tokenizers.unigram("first"), "llama3"),
        (tokenizers.byte_level, None),
    ):
        for special in ("control", "text"):
            tokenizer = make()
            if template is not None:
                set_chat_template(tokenizer, template)
            found.append(Encoder(tokenizer, uncached(special_tokens=special)))
    return found


def file_of(draw):
    """(suffix, contents) of a file."""
    rows = [hostile.changed(draw, draw.choice(ROWS), ROWS) for _ in range(draw.choice((1, 1, 1, 2)))]
    if draw.random() < 0.2 and isinstance(rows[0], dict):
        rows[0][draw.choice(("text", "messages", "tools", "prompt", hostile.text(draw)))] = hostile.value(draw)
    kind = draw.choice((".jsonl",) * 6 + (".json", ".json", ".csv"))
    if kind == ".jsonl":
        text = "\n".join(map(json.dumps, rows))
    elif kind == ".json":
        text = json.dumps(rows, indent=draw.choice((None, 1)))
    else:
        changed = hostile.changed(draw, draw.choice(ROWS))
        names = list(changed) if isinstance(changed, dict | list | str) and changed else ["text"]
        written = io.StringIO()
        csv.writer(written).writerows([map(str, names), [str(hostile.value(draw)) for _ in names]])
        text = written.getvalue()
    raw = text.encode(errors="surrogatepass")
    if draw.random() < 0.25:
        raw = hostile.damaged_text(draw, raw)
    packed = draw.choice(("",) * 12 + (".gz", ".bz2", ".xz"))
    raw = PACK[packed](raw)
    if packed and draw.random() < 0.5:
        raw = hostile.damaged(draw, raw, draw.choice(hostile.DAMAGE))
    return kind + packed, raw


def test_rows(tmp_path, encoders, pytestconfig):
    def make(draw, number):
        columns = draw.choice(COLUMNS) if draw.random() < 0.1 else None
        return *file_of(draw), number % len(encoders), columns

    def read(given):
        suffix, raw, encoder, columns = given
        file = tmp_path / f"rows{suffix}"
        file.write_bytes(raw)
        encoder = encoders[encoder]
        for row, where in read_rows(file):
            record = parse_row(row, where, columns, templated=len(raw) % 2 == 0)
            for chunk in encoder.encode([record]):
                for example in chunk:
                    assert example.tokens.shape == example.learn.shape

    known = [(".jsonl", json.dumps(row).encode(), 0, None) for row in ROWS]
    fuzz("rows", pytestconfig.getoption("--fuzz"), make, read, (DataError, ConfigError), known)


def test_rows_of_preferences(encoders, pytestconfig):
    def make(draw, number):
        row = hostile.changed(draw, draw.choice(PREFERENCES), PREFERENCES)
        return row, number % len(encoders), draw.choice(("paired", "unpaired")), draw.random() < 0.5

    def read(given):
        row, encoder, pairing, templated = given
        record = parse_preference(row, "row 1", pairing=pairing, templated=templated)
        assert len(record.answers) == len(record.desirable)
        for chunk in encoders[encoder].encode(record.answers):
            for example in chunk:
                assert example.tokens.shape == example.learn.shape

    known = [(row, 0, "unpaired", False) for row in PREFERENCES]
    fuzz("rows of preferences", pytestconfig.getoption("--fuzz"), make, read, (DataError, ConfigError), known)
