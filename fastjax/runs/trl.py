"""The base of TRL's trainers, over a `Trainer`."""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fastjax.errors import ConfigError
from fastjax.execution.language_model import check_model
from fastjax.language_model import LanguageModel, ModelHandle
from fastjax.language_model.handle import value_of
from fastjax.runs.trainer import Trainer, TrainerSettings
from fastjax.runs.trl_arguments import SharedArguments, arguments_of
from fastjax.runs.trl_callbacks import TrainerControl, TrainerState, TRLProgress, is_trainer_callback
from fastjax.runs.trl_names import METHODS
from fastjax.training.config import TrainConfig
from fastjax.training.metrics import Evaluation

#: Data collators that pad rows and choose nothing of them; a batch here is padded without one.
_COLLATORS = (
    *("DataCollatorForSeq2Seq", "DataCollatorWithPadding", "DefaultDataCollator", "default_data_collator"),
    *("DataCollatorForLanguageModeling", "DataCollatorWithFlattening", "DataCollatorForPreference"),
    *("DPODataCollatorWithPadding", "RewardDataCollatorWithPadding"),
)


class TrainOutput(NamedTuple):
    """A finished run by transformers' names, and what `Trainer.train` returns.

    Attributes:
        global_step: steps of the run.
        training_loss: the mean over the steps, nats a target token.
        metrics: train_runtime in seconds, train_samples_per_second, train_steps_per_second, train_loss, epoch.
        model: the trained model.
        folder: the adapter's folder, or the whole model's.
        evaluation: the last held-out evaluation; None without held-out data.
        config: the settings.
    """

    global_step: int
    training_loss: float
    metrics: dict[str, float]
    model: ModelHandle
    folder: Path
    evaluation: Evaluation | None
    config: TrainConfig


class TRLTrainer:
    """A trainer by TRL's arguments.

    Attributes:
        Config: the class of its settings.
        args: the settings.
        processing_class: the tokenizer.
    """

    Config: type[SharedArguments]

    def __init__(
        self,
        model: LanguageModel,
        *,
        args: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        tokenizer: Any = None,
        data_collator: Any = None,
        callbacks: Sequence[Any] | None = None,
        **others: Any,
    ):
        """Look at the settings.

        Args:
            model: with an adapter; or with every weight trained, but not for DPO and KTO. A reward model is one that
                `with_score_head` has made.
            args: the settings: a `Config`, transformers' TrainingArguments or TRL's own config, or a mapping of names.
            train_dataset: as of `Trainer`.
            eval_dataset: held-out data, as of `Trainer`.
            processing_class: the tokenizer; None: the model's own.
            tokenizer: its older name.
            data_collator: one that pads and chooses nothing, which changes nothing here.
            callbacks: transformers' `TrainerCallback`, or functions as of `Trainer`.
            others: names of TRL's; those of the settings (older versions had them here) are taken, those that cannot be
                served are refused with what to use instead.

        Raises:
            ConfigError: settings that contradict each other or the model, or a name that is not served.
        """
        self.args: Any = arguments_of(self.Config, args, type(self).__name__, others)
        _check_collator(data_collator)
        check_model(value_of(model))
        self.processing_class: Any = next(
            (one for one in (processing_class, tokenizer) if one is not None), model.tokenizer
        )
        _check_one(eval_dataset)
        # An iterator is read here, since its first row may say what the rows are.
        self._data = [self._rows(data) for data in (train_dataset, eval_dataset)]
        if self.args.eval_strategy != "no" and eval_dataset is None:
            raise ConfigError(
                f"{type(self.args).__name__}: eval_strategy: expected an eval_dataset with it, got none; give one, or "
                'leave it at "no"'
            )
        self._callbacks = list(callbacks or ())
        self._make(model)

    def _make(self, model: LanguageModel) -> None:
        """The trainer beneath, by the settings as they are now."""
        listed = [callback() if isinstance(callback, type) else callback for callback in self._callbacks]
        theirs = {id(one): is_trainer_callback(one) for one in listed}
        told = [one for one in listed if theirs[id(one)]]
        self._progress = TRLProgress(self.args, told, self.processing_class)
        functions = [one for one in listed if not theirs[id(one)]]
        (train, held_out), settings = self._data, self._settings(model)
        held_out = None if self.args.eval_strategy == "no" else held_out
        callbacks = [*functions, self._progress]
        self._trainer = Trainer(model, self.processing_class, train, held_out, settings, callbacks=callbacks)

    def _settings(self, model: LanguageModel) -> TrainerSettings:
        return self.args.settings(model)

    @property
    def model(self) -> ModelHandle:
        """The model that the trainer was given, trained after `train`."""
        return self._trainer.handle

    @property
    def tokenizer(self) -> Any:
        """The older name of `processing_class`."""
        return self.processing_class

    @property
    def state(self) -> TrainerState:
        """The progress of the run, with its `log_history`."""
        return self._progress.state

    @property
    def control(self) -> TrainerControl:
        """The control that callbacks set."""
        return self._progress.control

    @property
    def train_dataset(self) -> Any:
        """The training data as they were given; of `SFTTrainer` as token ids."""
        return self._data[0]

    @property
    def eval_dataset(self) -> Any:
        """The held-out data, as `train_dataset`; None: there are none."""
        return self._data[1]

    def add_callback(self, callback: Any) -> None:
        """Add a callback, as `callbacks` has them.

        Args:
            callback: the callback.
        """
        self._callbacks.append(callback)
        self._make(self.model)

    def remove_callback(self, callback: Any) -> None:
        """Take a callback out.

        Args:
            callback: the callback, or its class.
        """
        self._callbacks = [one for one in self._callbacks if one is not callback and type(one) is not callback]
        self._make(self.model)

    def train(self, resume_from_checkpoint: bool | str | os.PathLike[str] | None = None) -> TrainOutput:
        """Train; see `Trainer.train`. An earlier run in the output folder is replaced; the model goes on as it is.

        Args:
            resume_from_checkpoint: True, the run's folder or its newest checkpoint: go on from that one; from the start
                where there is none.

        Raises:
            ConfigError: another checkpoint; and what `Trainer.train` raises.
        """
        resume = self._resumes(resume_from_checkpoint)
        for line in self._unused():
            self._trainer.tell(line)
        self._progress.begins()
        result = self._trainer.train(resume=resume)
        metrics = self._progress.ends()
        return TrainOutput(self.state.global_step, metrics["train_loss"], metrics, *result)

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Evaluate the model as it is; see `Trainer.evaluate`. The numbers are logged, and callbacks hear of them.

        Args:
            eval_dataset: held-out data as of the trainer; None: the trainer's.
            ignore_keys: changes nothing here.
            metric_key_prefix: begins the names.

        Returns:
            PREFIX_loss in nats a target token, …, PREFIX_runtime in seconds, PREFIX_samples_per_second,
            PREFIX_steps_per_second, and epoch.

        Raises:
            ConfigError: what `Trainer.evaluate` raises.
        """
        del ignore_keys
        _check_one(eval_dataset)
        data = self._data[1] if eval_dataset is None else self._rows(eval_dataset)
        began = time.perf_counter()
        evaluation, rows, steps = self._trainer.evaluate(data)
        seconds = time.perf_counter() - began
        measured = {name: value for name, value in evaluation.row(0).items() if name.startswith("eval_")}
        measured |= {"eval_runtime": seconds, "eval_samples_per_second": rows / seconds}
        measured |= {"eval_steps_per_second": steps / seconds}
        metrics = {f"{metric_key_prefix}{name.removeprefix('eval')}": value for name, value in measured.items()}
        return self._progress.evaluated({**metrics, "epoch": self.state.epoch})

    def _rows(self, data: Any) -> Any:
        """A data set as `Trainer` takes it."""
        return list(data) if isinstance(data, Iterator) else data

    def _unused(self) -> Iterator[str]:
        """Lines about what was given and has no effect on the run."""
        if self._data[1] is not None and self.args.eval_strategy == "no":
            yield 'eval_dataset: not used while training, since eval_strategy is "no"; evaluate() uses it'

    def _resumes(self, asked: bool | str | os.PathLike[str] | None) -> bool:
        if asked is None or isinstance(asked, bool):
            return bool(asked)
        folder = Path(self.args.output_dir).resolve()
        kept = sorted((one for one in (folder / "checkpoints").glob("*") if one.name.isdigit()), key=_number)
        if Path(asked).resolve() not in (folder, folder / "checkpoints", *kept[-1:]):
            raise ConfigError(
                f"resume_from_checkpoint: expected true, or the newest checkpoint of output_dir "
                f"({kept[-1] if kept else f'none is in {folder}'}), got {asked}"
            )
        return True

    def save_model(self, output_dir: str | os.PathLike[str] | None = None) -> None:
        """Write the trained weights; see `language_model.saving.save_pretrained`.

        Args:
            output_dir: the folder; None: that of the settings.
        """
        self.model.save_pretrained(Path(self.args.output_dir if output_dir is None else output_dir))

    def __getattr__(self, name: str) -> Any:
        instead = f"; use {METHODS[name]}" if name in METHODS else ""
        raise AttributeError(f"{type(self).__name__} has no {name}{instead}")


def _check_one(eval_dataset: Any) -> None:
    if isinstance(eval_dataset, Mapping) and not hasattr(eval_dataset, "column_names"):
        raise ConfigError(
            f"eval_dataset: expected one data set, got a mapping of {', '.join(map(str, eval_dataset))}; give one, or "
            "call evaluate(eval_dataset, metric_key_prefix=…) for each after training"
        )


def _check_collator(collator: Any) -> None:
    name = getattr(collator, "__name__", type(collator).__name__)
    if collator is not None and (name not in _COLLATORS or getattr(collator, "mlm", False)):
        raise ConfigError(
            f"data_collator: expected none, or one that pads and chooses nothing ({', '.join(_COLLATORS)}), got {name};"
            " train_on_responses_only, completion_only_loss and assistant_only_loss say what is learnt"
        )


def _number(place: Path) -> int:
    return int(place.name)
