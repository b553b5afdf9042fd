"""A run's rows as transformers tells them: a trainer's state, the history of its logs, callbacks and their control.

The loop reads a step's numbers while the next step runs, so a callback hears of step n then, and ends the run with the
step that is under way.
"""

import dataclasses
import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from convert.errors import shown
from fastjax.errors import ConfigError
from fastjax.runs.trainer import Event

#: Events of transformers that nothing here is told as: a step is one program, and a loop has no other part.
_UNTOLD = (
    *("on_pre_optimizer_step", "on_optimizer_step", "on_substep_end", "on_prediction_step", "on_predict"),
    *("on_step_begin", "on_push_begin"),
)
#: Arguments of transformers' events that a compiled step has no objects for.
_NOT_GIVEN = ("model", "optimizer", "lr_scheduler", "train_dataloader", "eval_dataloader")
#: Field of a control that a callback may set → what to use instead.
_CONTROLS = {"should_save": "save_steps", "should_evaluate": "eval_steps", "should_epoch_stop": "should_training_stop"}


@dataclasses.dataclass
class TrainerState:
    """The progress of a run by transformers' names.

    Attributes:
        epoch: passes over the data so far.
        global_step: steps so far.
        max_steps: of the run.
        log_history: what was logged, in order: means over `logging_steps` steps, evaluations, the end.
        best_metric: the lowest `eval_loss`; None: nothing was evaluated.
        best_global_step: its step.
    """

    epoch: float = 0.0
    global_step: int = 0
    max_steps: int = 0
    num_train_epochs: float = 0.0
    train_batch_size: int | None = None
    logging_steps: int = 0
    eval_steps: Any = None
    save_steps: Any = None
    log_history: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    best_metric: float | None = None
    best_global_step: int | None = None
    best_model_checkpoint: str | None = None
    is_local_process_zero: bool = True
    is_world_process_zero: bool = True


@dataclasses.dataclass
class TrainerControl:
    """Requests of a callback by transformers' names; `should_training_stop` alone is served.

    Attributes:
        should_training_stop: the run ends with the step that is under way.
    """

    should_training_stop: bool = False
    should_epoch_stop: bool = False
    should_save: bool = False
    should_evaluate: bool = False
    should_log: bool = False


class TRLProgress:
    """A callback of `Trainer` that keeps a `TrainerState` and tells transformers' callbacks.

    Attributes:
        state: the progress.
        control: what the callbacks ask for.
    """

    def __init__(self, args: Any, callbacks: Sequence[Any], tokenizer: Any):
        """Take the callbacks.

        Args:
            args: the trainer's settings.
            callbacks: objects with methods of transformers' `TrainerCallback`.
            tokenizer: handed to them.

        Raises:
            ConfigError: a callback with a method that would never be called.
        """
        for callback in callbacks:
            for method, name in _required(callback):
                raise ConfigError(
                    f"callbacks: {type(callback).__name__}.{method}: expected no argument {name}, which is none here, "
                    "got one without a default; use Trainer(evaluate=…), a function of the model at each evaluation"
                )
            if untold := [name for name in _UNTOLD if _overrides(callback, name)]:
                raise ConfigError(
                    f"callbacks: {type(callback).__name__}: expected none of {', '.join(_UNTOLD)}, which a step that "
                    f"is one program has no place for, got {', '.join(untold)}; use on_step_end"
                )
        self._args, self._callbacks = args, list(callbacks)
        self._given = {"processing_class": tokenizer, "tokenizer": tokenizer}
        self.state, self.control = TrainerState(), TrainerControl()
        self._losses: list[float] = []
        self._seconds = 0.0
        self._tell("on_init_end")

    def begins(self) -> None:
        """Forget an earlier run, and tell that one begins."""
        names = ("num_train_epochs", "logging_steps", "eval_steps", "save_steps")
        same = {name: getattr(self._args, name) for name in names}
        size = self._args.per_device_train_batch_size
        self.state = TrainerState(**same, max_steps=max(self._args.max_steps, 0), train_batch_size=size)
        self.control = TrainerControl()
        self._losses, self._seconds = [], 0.0
        self._tell("on_train_begin")

    def __call__(self, event: Event) -> None:
        """Tell an event of the run."""
        row = event.values
        if event.name == "step":
            self._step(row)
        elif event.name == "evaluation":
            measured = {name: value for name, value in row.items() if name.startswith("eval_")}
            loss, best = measured["eval_loss"], self.state.best_metric
            self.evaluated(measured)
            if best is None or loss < best:  # behind the callbacks, which compare with those before, as there
                self.state.best_metric, self.state.best_global_step = loss, event.step
        elif event.name == "saved":
            self._tell("on_save")
        if self.control.should_training_stop:
            event.end()

    def evaluated(self, measured: dict[str, Any]) -> dict[str, Any]:
        """Log the numbers of an evaluation, and tell of them.

        Args:
            measured: the numbers by name.

        Returns:
            These.
        """
        self._log(measured)
        self._tell("on_evaluate", metrics=measured)
        return measured

    def ends(self) -> dict[str, float]:
        """Tell that the run has ended, and give its metrics by transformers' names.

        Returns:
            train_runtime in seconds, train_samples_per_second, train_steps_per_second, train_loss (the mean over the
            steps, nats a target token), epoch.
        """
        steps, args = len(self._losses), self._args
        rows = steps * args.per_device_train_batch_size * args.gradient_accumulation_steps
        seconds = max(self._seconds, 1e-9)
        metrics = {
            "train_runtime": self._seconds,
            "train_samples_per_second": rows / seconds,
            "train_steps_per_second": steps / seconds,
            "train_loss": sum(self._losses) / max(steps, 1),
            "epoch": self.state.epoch,
        }
        self._log(metrics)
        self._tell("on_train_end")
        return metrics

    def _step(self, row: Mapping[str, Any]) -> None:
        state, before = self.state, int(self.state.epoch)
        if not self._losses or state.epoch == before:
            self._tell("on_epoch_begin")
        state.global_step, state.epoch = int(row["step"]), float(row["epoch"] or 0.0)
        if state.epoch and self._args.max_steps <= 0:
            state.max_steps = math.ceil(state.num_train_epochs * state.global_step / state.epoch - 1e-6)
        self._losses.append(float(row["loss"]))
        self._seconds = float(row["seconds"] or 0.0)
        self._tell("on_step_end")
        every = self._args.logging_steps
        if state.global_step % every == 0:
            mean = self._losses[-every:]
            logs = {"loss": sum(mean) / len(mean), "grad_norm": row["grad_norm"]}
            self._log(logs | {"learning_rate": row["learning_rate"], "epoch": state.epoch})
        if int(state.epoch) > before:
            self._tell("on_epoch_end")

    def _log(self, logs: dict[str, Any]) -> None:
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self._tell("on_log", logs=logs)

    def _tell(self, name: str, **more: Any) -> None:
        for callback in self._callbacks:
            if (method := getattr(callback, name, None)) is None:
                continue
            returned = method(self._args, self.state, self.control, **self._given, **more)
            self.control = self.control if returned is None else returned
            for field, instead in _CONTROLS.items():
                if getattr(self.control, field, False):
                    raise ConfigError(
                        f"callbacks: {type(callback).__name__}.{name}: control.{field}: expected false, got true; use "
                        f"{instead}"
                    )


def is_trainer_callback(value: Any) -> bool:
    """Whether a callback is one of transformers', or its class, and not a function that is told an `Event`.

    Args:
        value: the callback.

    Raises:
        ConfigError: it is neither.
    """
    if any(hasattr(value, name) for name in ("on_step_end", "on_log", "on_train_begin", "on_evaluate", "on_train_end")):
        return True
    if not callable(value):
        raise ConfigError(
            "callbacks: expected transformers' TrainerCallback or functions that are told an Event, got "
            f"{shown(value, 80)}"
        )
    return False


def _required(callback: Any) -> Iterator[tuple[str, str]]:
    """The methods of a callback that want an argument of `_NOT_GIVEN`, and the argument."""
    for method in ("on_train_begin", "on_step_end", "on_log", "on_evaluate", "on_save", "on_epoch_end", "on_train_end"):
        function = getattr(callback, method, None)
        wanted = inspect.signature(function).parameters.values() if callable(function) else ()
        yield from ((method, one.name) for one in wanted if one.name in _NOT_GIVEN and one.default is one.empty)


def _overrides(callback: Any, name: str) -> bool:
    """Whether a callback has a method of its own, and not that of transformers' base class, which does nothing."""
    method = getattr(type(callback), name, None)
    bases = [kind for kind in type(callback).__mro__ if kind.__name__ == "TrainerCallback"]
    return method is not None and not any(vars(base).get(name) is method for base in bases)
