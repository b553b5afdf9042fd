"""TensorBoard by its real event files; Weights & Biases by the calls that a stand-in records."""

import errno
import io
import sys
import types

import pytest
from rich.console import Console

from fastjax.errors import ConfigError
from fastjax.training.metrics import Tolerant
from fastjax.training.plain_lines import PlainLines
from fastjax.training.trackers import check_trackers, make_trackers

Event = pytest.importorskip("tensorboardX.proto.event_pb2").Event


def config(name, **output):
    return {"model": {"model_name": "m", "load_in_4bit": True}, "output": {"report_to": [name], **output}}


ROWS = [
    {"step": 1, "loss": 2.0, "tokens_per_second": None, "skipped": True},
    {"step": 2, "eval_loss": 1.5},
    {"step": 2, "event": "saved", "message": "saved to *x*"},
    {"step": 3, "loss": float("nan"), "grad_norm": 0.5},
]


def events(folder) -> list:
    """TFRecords: eight bytes of length, four of its checksum, the record, four of the record's."""
    found = []
    for file in sorted((folder / "tensorboard").iterdir()):
        data, start = file.read_bytes(), 0
        while start < len(data):
            length = int.from_bytes(data[start : start + 8], "little")
            found.append(Event.FromString(data[start + 12 : start + 12 + length]))
            start += length + 16
    return found


def write(sinks, rows=ROWS) -> None:
    for sink in sinks:
        for row in rows:
            sink.write(row)
        sink.close()


def test_tensorboard(tmp_path):
    write(make_trackers(tmp_path, "a run", config("tensorboard")))
    values = [(event.step, value) for event in events(tmp_path) for value in event.summary.value]
    scalars = [
        (step, value.tag, value.simple_value) for step, value in values if not value.tag.endswith("text_summary")
    ]
    assert scalars == [
        (1, "train/loss", 2.0),
        (1, "train/skipped", 1.0),
        (2, "eval/loss", 1.5),
        (3, "train/grad_norm", 0.5),
    ]
    texts = {
        value.tag: value.tensor.string_val[0].decode() for _, value in values if value.tag.endswith("text_summary")
    }
    assert "    run: a run\n    model:\n      model_name: m\n" in texts["config/text_summary"]
    assert texts["events/text_summary"] == "    saved: saved to *x*\n"


def test_tensorboard_goes_on(tmp_path):
    write(make_trackers(tmp_path, "a run", config("tensorboard")))
    write(make_trackers(tmp_path, "a run", config("tensorboard"), resume_step=1), ROWS[1:])
    starts = [event.step for event in events(tmp_path) if event.session_log.status == 1]  # SessionLog.START
    assert starts == [2]


@pytest.fixture
def wandb(monkeypatch):
    """A module that records what is called."""
    calls: list[tuple] = []
    run = types.SimpleNamespace(
        define_metric=lambda *args, **kwargs: calls.append(("define_metric", args, kwargs)),
        log=lambda values: calls.append(("log", values)),
        finish=lambda: calls.append(("finish",)),
    )
    module = types.ModuleType("wandb")
    module.login = lambda: calls.append(("login",))  # pyright: ignore[reportAttributeAccessIssue]
    module.Settings = lambda **kwargs: kwargs  # pyright: ignore[reportAttributeAccessIssue]
    module.init = lambda **kwargs: calls.append(("init", kwargs)) or run  # pyright: ignore[reportAttributeAccessIssue]
    module.calls = calls  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    return module


def test_wandb(wandb, tmp_path, monkeypatch):
    write(make_trackers(tmp_path, "a run", config("wandb")))
    (_, started), *logged, finish = wandb.calls
    assert (started["project"], started["name"], started["config"]) == ("fastjax", "a run", config("wandb"))
    assert started["dir"] == str(tmp_path)
    assert finish == ("finish",)
    assert logged == [
        ("define_metric", ("*",), {"step_metric": "step"}),
        ("log", {"step": 1, "train/loss": 2.0, "train/skipped": 1.0}),
        ("log", {"step": 2, "eval/loss": 1.5}),
        ("log", {"step": 2, "event": "saved: saved to *x*"}),
        ("log", {"step": 3, "train/grad_norm": 0.5}),
    ]
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    for resume_step in (2, None):
        write(make_trackers(tmp_path, "a run", config("wandb"), resume_step))
    ids = [call[1]["id"] for call in wandb.calls if call[0] == "init"]
    assert ids[0] == ids[1] != ids[2]  # resumed; then a new run in the same folder
    write(make_trackers(tmp_path, "a run", config("wandb", project="talks", entity="team", tags=["first"])))
    places = [(call[1]["project"], call[1]["entity"], call[1]["tags"]) for call in wandb.calls if call[0] == "init"]
    assert places == [*((name, None, None) for name in ("fastjax", "mine", "mine")), ("talks", "team", ["first"])]


def test_wandb_that_cannot_start(wandb, tmp_path):
    def fail(**_kwargs):
        raise RuntimeError("api_key not configured")

    check_trackers(["wandb"])
    assert wandb.calls == [("login",)]
    wandb.init = wandb.login = fail
    with pytest.raises(ConfigError, match=r"output.report_to: wandb .* api_key not configured.*wandb login"):
        check_trackers(["wandb"])  # before the data are read
    with pytest.raises(ConfigError, match=r"output.report_to: wandb .* api_key not configured.*wandb login"):
        make_trackers(tmp_path, "a run", config("wandb"))


@pytest.mark.parametrize(("name", "module"), [("tensorboard", "tensorboardX"), ("wandb", "wandb")])
def test_a_missing_package(name, module, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(
        ConfigError, match=rf"output.report_to: {name} needs the package {module}.*pip install {module}"
    ):
        make_trackers(tmp_path, "a run", config(name))


def test_a_failing_tracker_is_told_once():
    class Failing:
        written = 0

        def write(self, row):
            self.written += 1
            raise ConnectionError("no route [to] host")

        def close(self):
            raise OSError("still none")

    file = io.StringIO()
    failing = Failing()
    write([Tolerant(failing, "wandb", Console(file=file, width=80))])
    assert failing.written == len(ROWS)
    assert file.getvalue() == (
        "warning: wandb fails, the run goes on without it: ConnectionError: no route [to] host\n"
    )


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), SystemExit(1)])
def test_a_console_that_is_gone_does_not_end_the_run(error):
    """A terminal that was closed gives the one, rich for a pipe that was closed the other; nor can it be told."""

    class Gone(io.StringIO):
        def write(self, text):
            raise error

    console = Console(file=Gone(), width=80)
    write([Tolerant(PlainLines(3, 1, console), "the progress", console)])


def test_an_interruption_is_not_held_back():
    class Interrupted:
        def write(self, row):
            raise KeyboardInterrupt

        def close(self):
            pass

    with pytest.raises(KeyboardInterrupt):
        Tolerant(Interrupted(), "wandb", Console()).write(ROWS[0])
