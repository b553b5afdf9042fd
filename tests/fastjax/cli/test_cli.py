"""Exit statuses, messages, and what is imported for them."""

import errno
import subprocess
import sys

import pytest

from convert.errors import ConvertError
from fastjax.cli import COMMANDS, main
from fastjax.commands import train
from fastjax.errors import ConfigError, DataError, TrainingError


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (ConfigError("lora.r: expected 1"), 2, "lora.r: expected 1"),
        (ConvertError("model.safetensors: truncated"), 1, "model.safetensors: truncated"),
        (DataError("train.jsonl:3: not valid JSON"), 1, "train.jsonl:3: not valid JSON"),
        (TrainingError("step 3: the loss is nan"), 1, "step 3: the loss is nan"),
        (OSError(errno.ENOSPC, "No space left on device", "out/adapter"), 1, "out/adapter: No space left on device"),
        (OSError(errno.EIO, "Input/output error"), 1, "Input/output error"),
    ],
)
def test_expected_errors_are_one_line(monkeypatch, capsys, error, status, message):
    def fail(argv):
        raise error

    monkeypatch.setattr(train, "main", fail)
    assert main(["train", "--config", "x.yaml"]) == status
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"fastjax train: error: {message}\n"


def test_traceback_on_request(monkeypatch, capsys):
    def fail(argv):
        raise ConfigError("wrong")

    monkeypatch.setattr(train, "main", fail)
    assert main(["--traceback", "train"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_interrupt(monkeypatch, capsys):
    def interrupt(argv):
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "main", interrupt)
    assert main(["train"]) == 130
    assert capsys.readouterr().err == "fastjax: interrupted\n"


def test_unexpected_errors_are_not_hidden(monkeypatch):
    def fail(argv):
        raise KeyError("a bug")

    monkeypatch.setattr(train, "main", fail)
    with pytest.raises(KeyError):
        main(["train"])


def test_arguments_reach_the_command(monkeypatch):
    seen = []
    monkeypatch.setattr(train, "main", seen.append)
    assert main(["train", "--config", "a.yaml", "--lora.r", "4"]) == 0
    assert seen == [["--config", "a.yaml", "--lora.r", "4"]]


@pytest.mark.parametrize("argv", [[], ["nonsense"], ["--nonsense", "train"]])
def test_wrong_command_line(capsys, argv):
    with pytest.raises(SystemExit) as exit_status:
        main(argv)
    assert exit_status.value.code == 2
    assert "usage: fastjax" in capsys.readouterr().err


def test_help_and_version(capsys):
    for argv, expected in [(["--help"], "commands:"), (["--version"], "fastjax 0.")]:
        with pytest.raises(SystemExit) as exit_status:
            main(argv)
        assert exit_status.value.code == 0
        assert expected in capsys.readouterr().out


@pytest.mark.parametrize("command", [None, *COMMANDS])
def test_help_imports_no_jax(command):
    """A look at the help, or a mistake in the settings, costs no JAX import."""
    arguments = [command, "--help"] if command else ["--help"]
    script = f"""
import contextlib, io, sys
from fastjax.cli import main
with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
    main({arguments!r})
assert "jax" not in sys.modules, "jax"
assert "transformers" not in sys.modules, "transformers"
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_bad_configuration_as_a_process(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("model: {model_name: m, dtpe: bfloat16}\n")
    command = [sys.executable, "-m", "fastjax", "train", "--config", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith(f"fastjax train: error: {file}: model.dtpe: unknown; did you mean dtype?")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", "a\udcff"], "--prompt: expected Unicode text, found \\udcff, half of a surrogate pair"),
        (["--prompt", "a", "--temperature", "nan"], "temperature: expected a finite number >= 0, got nan"),
        (["--prompt", "a", "--seed", str(2**70)], "seed: expected an integer of 32 bits, got 1180591620717411303424"),
    ],
)
def test_what_is_wrong_with_generate_is_said_before_a_model_is_looked_for(arguments, message, capsys):
    assert main(["generate", "--model", "nowhere", *arguments]) == 2
    assert message in capsys.readouterr().err
