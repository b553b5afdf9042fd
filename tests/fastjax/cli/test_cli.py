"""Exit statuses, messages, and what is imported for them."""

import errno
import importlib
import subprocess
import sys
import types
from pathlib import Path

import pytest
from jax.errors import JaxRuntimeError

from convert.errors import ConvertError
from fastjax.cli import COMMANDS, main
from fastjax.commands import train
from fastjax.commands.arguments import load_options
from fastjax.errors import ConfigError, DataError, Interrupted, TrainingError
from fastjax.execution.options import LoadOptions
from fastjax.parallel import processes
from fastjax.training.checkpoint_store import Unreadable


@pytest.fixture
def fails(monkeypatch):
    """Lets `fastjax train` end with an exception."""

    def fails(error):
        def fail(argv):
            raise error

        monkeypatch.setattr(train, "main", fail)

    return fails


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
def test_expected_errors_are_one_line(fails, capsys, error, status, message):
    fails(error)
    assert main(["train", "--config", "x.yaml"]) == status
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"fastjax train: error: {message}\n"


@pytest.mark.parametrize(
    ("argv", "given"),
    [
        (["--config", "a.yaml"], None),
        (["--config", "a.yaml", "--distributed"], ""),
        (["--distributed", "--resume"], ""),
        (["--distributed", "node1:4000,2,1", "--resume"], "node1:4000,2,1"),
        (["--distributed=node1:4000,2,1"], "node1:4000,2,1"),
    ],
)
def test_a_process_is_among_several_in_any_way_of_saying_so(argv, given):
    """One that does not know would run by itself."""
    assert train._distributed(argv) == given


class Left(BaseException):
    """The end of a process."""


@pytest.fixture
def one_of_four(monkeypatch):
    """Makes this process the last of four; its end is `Left`, with the status."""

    def end(status):
        raise Left(status)

    state = types.SimpleNamespace(num_processes=4, process_id=3, client=None)
    monkeypatch.setattr(processes, "distributed", types.SimpleNamespace(global_state=state))
    monkeypatch.setattr(processes.socket, "gethostname", lambda: "node2")
    monkeypatch.setattr(processes.os, "_exit", end)
    monkeypatch.setattr(processes, "wait_for_words", lambda: None)


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (ConfigError("lora.r: expected 1"), 2, "train: error: {}lora.r: expected 1"),
        (Unreadable(Path("out/4"), "it is empty"), 1, "train: error: {}out/4 cannot be read: it is empty"),
        (OSError(errno.ENOSPC, "No space left on device", "out"), 1, "train: error: {}out: No space left on device"),
        (JaxRuntimeError("INTERNAL: NCCL"), 1, "train: error: {}unexpected JaxRuntimeError"),
        (KeyError("a bug"), 1, "train: error: {}unexpected KeyError"),
        (BaseException("a panic of Rust"), 1, "train: error: {}unexpected BaseException"),
        (KeyboardInterrupt(), 130, ": {}interrupted"),
    ],
)
def test_one_process_of_several_says_which_and_ends_at_once(one_of_four, fails, capsys, error, status, message):
    fails(error)
    with pytest.raises(Left) as left:
        main(["train"])
    assert left.value.args == (status,)
    first, *rest = capsys.readouterr().err.splitlines()
    assert first == f"fastjax{'' if message[0] == ':' else ' '}{message.format('rank 3 of 4 on node2: ')}"
    assert (rest[0] == "Traceback (most recent call last):" and rest[-1] != "") if "unexpected" in message else not rest


def test_processes_that_a_signal_stops_wait_for_each_other(one_of_four, fails, capsys):
    fails(Interrupted("interrupted by SIGTERM after step 3", 15))
    assert main(["train"]) == 143
    assert capsys.readouterr().err == "fastjax train: rank 3 of 4 on node2: interrupted by SIGTERM after step 3\n"


def test_traceback_on_request(fails, capsys):
    fails(ConfigError("wrong"))
    assert main(["--traceback", "train"]) == 2
    trace = capsys.readouterr().err
    assert trace.startswith("Traceback") and trace.endswith("ConfigError: wrong\nfastjax train: error: wrong\n")


def test_interrupt(fails, capsys):
    fails(KeyboardInterrupt())
    assert main(["train"]) == 130
    assert capsys.readouterr().err == "fastjax: interrupted\n"


def test_unexpected_errors_are_not_hidden(fails):
    fails(KeyError("a bug"))
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


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("trian", "trian: unknown; did you mean train? `fastjax --help` lists the commands"),
        ("import_config", "import_config: unknown; did you mean import-config? `fastjax --help` lists the commands"),
        (
            "zzz",
            "zzz: unknown; expected one of train, launch, preview, plan, compare, generate",
        ),
    ],
)
def test_an_unknown_command(given, expected, capsys):
    with pytest.raises(SystemExit) as exit_status:
        main([given, "--config", "run.yaml"])
    assert exit_status.value.code == 2
    assert f"fastjax: error: {expected}" in capsys.readouterr().err


def test_help_imports_no_jax():
    """A look at the help, or a mistake in the settings, costs no JAX import."""
    script = f"""
import contextlib, io, sys
from fastjax.cli import main
for arguments in {[["--help"], *([command, "--help"] for command in COMMANDS)]!r}:
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
        main(arguments)
    assert not {{"jax", "transformers"}} & set(sys.modules), arguments
    assert arguments != ["--help"] or "pydantic" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


@pytest.mark.older_jax
def test_the_installed_command(tmp_path):
    """Beside the environment's Python, as pip puts it there."""
    file = tmp_path / "run.yaml"
    file.write_text("model: {model_name: m, dtpe: bfloat16}\n")
    command = [Path(sys.executable).parent / "fastjax", "train", "--config", file]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith(f"fastjax train: error: {file}:1: model.dtpe: unknown; did you mean model.dtype?")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", "a\udcff"], "--prompt: expected Unicode text, found \\udcff, half of a surrogate pair"),
        (["--prompt", "a", "--temperature", "nan"], "temperature: expected a value that is finite, got nan"),
        (
            ["--prompt", "a", "--seed", str(2**70)],
            "seed: expected a value of at most 4294967295, got 118059",
        ),
    ],
)
def test_what_is_wrong_with_generate_is_said_before_a_model_is_looked_for(arguments, message, capsys):
    assert main(["generate", "--model", "nowhere", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "line"), [("serve", "--model m"), ("generate", "--model m --prompt x"), ("chat", "m")]
)
def test_a_commands_own_options_are_not_those_of_loading(command, line):
    """Such as the reading of special tokens, whose name is that of an option of loading too."""
    parser = importlib.import_module(f"fastjax.commands.{command}")._parser()
    asked = parser.parse_args([*line.split(), "--dtype", "float32"])
    assert load_options(asked, {"layer_loop": "unroll"}) == LoadOptions(
        dtype="float32", load_in_4bit=False, layer_loop="unroll"
    )
