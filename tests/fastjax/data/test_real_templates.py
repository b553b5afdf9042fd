"""Templates that packages ship, with rows of every kind: what is learnt is what the generation prompt leaves to say.

TRL's come with the older environment; llama.cpp's, of the source distribution of llama-cpp-python (models/templates),
are read from the folder `.venv-test-templates` where there is one. tests/support/real_templates.py judges.
"""

import collections
import importlib.util
from pathlib import Path

import pytest

from fastjax.data import Encoder, parse_row
from fastjax.errors import DataError
from tests.support import real_templates, tokenizers


def folder(name):
    if name == "trl":
        pytest.importorskip("trl", reason="TRL is in the environment with torch")
        return Path(str(importlib.util.find_spec("trl").origin)).parent / "chat_templates"
    return Path(__file__).parents[3] / ".venv-test-templates"


def outcome(tokenizer, encoder, row):
    """How a row is served, or why not."""
    try:
        (examples,) = encoder.encode([parse_row(row, "row")])
    except DataError as error:
        return "refused", str(error)
    given = [
        (example.tokens.tolist(), example.learn.tolist()) for example in map(examples.__getitem__, range(len(examples)))
    ]
    wrong = real_templates.judge(tokenizer, row, given, examples.elsewhere)
    kind = "elsewhere" if examples.elsewhere else "one an answer" if len(examples) > 1 else "served"
    return ("wrong", wrong) if wrong else (kind, "")


@pytest.mark.torch
@pytest.mark.parametrize("name", ["trl", "llama.cpp"])
def test_answers_of_real_templates(name):
    files = sorted(folder(name).glob("*.jinja"))
    if not files:
        pytest.skip("needs llama.cpp's templates in .venv-test-templates")
    counts, told = collections.Counter(), []
    for file in files:
        source = file.read_text(encoding="utf-8")
        tokenizer = tokenizers.byte_level()
        tokenizer.add_special_tokens({"additional_special_tokens": real_templates.special_tokens(source)})
        tokenizer.chat_template = source
        encoder = Encoder(tokenizer)
        for kind, row in real_templates.ROWS.items():
            if real_templates.rendered(tokenizer, row) is None:
                continue
            found, why = outcome(tokenizer, encoder, row)
            counts[found] += 1
            if found in ("refused", "wrong"):
                told.append(f"{file.name}, {kind}: {found}: {why}")
    print(dict(counts), *told, sep="\n")
    assert counts["wrong"] == 0, [line for line in told if ": wrong: " in line]
    rewritten = [line for line in told if "writes the text before messages" in line]
    unwritten = [line for line in told if "does not write the" in line]
    assert len(rewritten) + len(unwritten) == counts["refused"] and len(rewritten) <= 0.01 * counts.total(), told
    assert counts["served"] > counts["elsewhere"] > 0 < counts["one an answer"]
