"""`fastjax generate`: what is asked of the engine, and how its answers are printed."""

import contextlib
import io
import json

import pytest

from fastjax.cli import main
from fastjax.language_model import as_trained
from tests.support import saying
from tests.support import tokenizers as made

TOKENIZER = made.byte_level()
SAID = {"one": "the answer is: the user", "two": "user", "what": "is the user"}


@pytest.fixture
def engines(monkeypatch):
    """Engines of a model that gives a prompt's answer, a token at a time."""
    pairs = [[TOKENIZER.encode(part, add_special_tokens=False) for part in pair] for pair in SAID.items()]
    model = saying.model(saying.chain(*([*prompt[-1:], *said] for prompt, said in pairs)))
    monkeypatch.setattr(as_trained, "load_as_trained", lambda *arguments: model)
    return saying.watch(monkeypatch, 1)


def generate(*arguments):
    return main(["generate", "--model", "m", "--raw", "--no_compilation_cache", *arguments])


def test_prompts_of_a_file_are_answered_by_one_engine_in_their_order(engines, tmp_path, capsys):
    (tmp_path / "prompts").write_text("one\ntwo\nwhat\n")
    file = ("--file", str(tmp_path / "prompts"))
    settings = ("--min_p", "0.5", "--repetition_penalty", "1.5", "--max_new_tokens", "20", "--stop", "z")
    assert generate(*file, "--json", "--n", "2", "--stop", ": the", *settings) == 0
    printed = capsys.readouterr()
    rows = [json.loads(line) for line in printed.out.splitlines()]
    answers = [("one", "the answer is"), ("two", "user"), ("what", "is the user")]
    expected = [
        {"prompt": prompt, "answer": said, "finish_reason": "stop", "choice": choice}
        for prompt, said in answers
        for choice in (0, 1)
    ]
    assert rows == expected and printed.err == ""
    [engine] = engines
    for _, options in engine.asked:
        assert (options.min_p, options.repetition_penalty, options.n) == (0.5, 1.5, 2)
        assert options.stop_strings == (": the", "z")
    assert generate(*file, "--max_new_tokens", "1") == 0
    assert capsys.readouterr().out == "> one\nthe\n\n> two\nuser\n\n> what\nis\n\n"


def test_an_answer_is_printed_as_it_comes(engines, monkeypatch, capsys):
    writes = io.StringIO()
    writes.parts, writes.isatty = [], lambda: True
    write = writes.write
    writes.write = lambda text: writes.parts.append(text) or write(text)
    with contextlib.redirect_stdout(writes):
        assert generate("--prompt", "one") == 0
    assert writes.getvalue() == "the answer is: the user\n" and len(writes.parts) > 3
    assert generate("--prompt", "two", "--stream") == 0 and capsys.readouterr().out == "user\n"
    assert generate("--prompt", "two") == 0 and capsys.readouterr().out == "user\n"
    for more, given in (
        (["--prompt", "two"], "got 2 prompts with 1 answers each"),
        (["--n", "3"], "got 1 prompts with 3 answers each"),
        (["--json"], "got --json"),
    ):
        assert generate("--prompt", "one", "--stream", *more) == 2
        assert given in capsys.readouterr().err


def test_ctrl_c_leaves_what_is_printed_and_ends_the_rows(engines, monkeypatch, capsys):
    run = saying.Watched.run

    def interrupted(engine):
        for count, piece in enumerate(run(engine)):
            if count == 6:
                raise KeyboardInterrupt
            yield piece

    monkeypatch.setattr(saying.Watched, "run", interrupted)
    assert generate("--prompt", "two", "--prompt", "one", "--prompt", "what") == 130
    assert capsys.readouterr() == ("> two\nuser\n\n", "fastjax: interrupted\n")
    assert engines[0].cancelled == [(2, 0), (3, 0)]
