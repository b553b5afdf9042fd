"""The base of TRL's trainers and of their arguments, most of them transformers', over a `Trainer`."""

import dataclasses
import enum
import functools
import os
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar, dataclass_transform

import jax

from convert.errors import shown
from fastjax.errors import ConfigError
from fastjax.execution.language_model import check_model
from fastjax.language_model import LanguageModel, ModelHandle
from fastjax.language_model.handle import value_of
from fastjax.options import did_you_mean
from fastjax.runs.trainer import Trainer, TrainerSettings
from fastjax.runs.trl_callbacks import TrainerControl, TrainerState, TRLProgress, is_trainer_callback
from fastjax.runs.trl_names import ARGUMENTS, METHODS, RENAMED
from fastjax.training.config import OptimizerConfig, OutputSection, PreferencesSection, TrainConfig, TrainingSection
from fastjax.training.metrics import Evaluation

A = TypeVar("A", bound="SharedArguments")
S = TypeVar("S")

_OPTIMIZERS = {
    "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw",
    "adamw_hf": "adamw",
    "adamw_8bit": "adamw_8bit",
    "adamw_bnb_8bit": "adamw_8bit",
    "paged_adamw": "adamw",
    "paged_adamw_32bit": "adamw",
    "paged_adamw_8bit": "adamw_8bit",
    "adafactor": "adafactor",
    "lion_32bit": "lion",
    "paged_lion_32bit": "lion",
}
_SCHEDULES = {name: name for name in ("linear", "cosine", "constant")} | {
    "constant_with_warmup": "constant",
    "warmup_stable_decay": "wsd",
}
#: train_sampling_strategy -> group_by_length.
_SAMPLING = {"random": False, "group_by_length": True}
_STRATEGIES = ("no", "steps", "epoch")
#: Data collators that pad rows and choose nothing of them; a batch here is padded without one.
_COLLATORS = (
    *("DataCollatorForSeq2Seq", "DataCollatorWithPadding", "DefaultDataCollator", "default_data_collator"),
    *("DataCollatorForLanguageModeling", "DataCollatorWithFlattening", "DataCollatorForPreference"),
    *("DPODataCollatorWithPadding", "RewardDataCollatorWithPadding"),
)


@dataclass_transform(kw_only_default=True)
def arguments(cls: type[A]) -> type[A]:
    """A dataclass of settings by name that puts the names without a field into `others`."""
    settings = dataclasses.dataclass(kw_only=True)(cls)
    fields, init = {field.name for field in dataclasses.fields(settings)}, settings.__init__

    @functools.wraps(init)
    def collected(self: A, output_dir: Any = None, **named: Any) -> None:
        named = _renamed(named, cls.__name__)
        if output_dir is not None:
            named["output_dir"] = os.fspath(output_dir) if isinstance(output_dir, os.PathLike) else output_dir
        rest = {name: named.pop(name) for name in list(named) if name not in fields}
        init(self, **{**named, "others": {**named.get("others", {}), **rest}})

    settings.__init__ = collected
    return settings


def _renamed(named: Mapping[str, Any], config: str) -> dict[str, Any]:
    """Arguments by their present names."""
    if both := [name for name, present in RENAMED.items() if name in named and present in named]:
        raise ConfigError(f"{config}: expected {RENAMED[both[0]]} or its earlier name {both[0]}, got both")
    return {RENAMED.get(name, name): value for name, value in named.items()}


@arguments
class SharedArguments:
    """Names of transformers' TrainingArguments; each means what it means there. What becomes of those that are no
    fields is in `trl_names`.

    Attributes:
        output_dir: folder of the run.
        overwrite_output_dir: replace an earlier run there, as theirs do.
        max_length: tokens of a sequence; None: no limit of its own.
        warmup_steps: a number of steps, or a share of the run's below 1; none with lr_scheduler_type "constant".
        warmup_ratio: the older name of the share.
        train_sampling_strategy: "random", or "group_by_length": rows of similar length in a step.
        group_by_length: the older name of the second.
        full_determinism: two equal runs are equal bit for bit.
        bf16: the computation is in bfloat16, which the model was loaded for; on a CPU float32 stands for it. None:
            whatever it is.
        fp16: the computation is in float16, which the model was loaded for; None: whatever it is.
        embedding_learning_rate: that of embedding and head where these are trained, as of Unsloth; None: learning_rate.
        optim: the optimizer, one of adamw_torch, adamw_8bit, adafactor, lion_32bit and their other names.
        eval_strategy: "no", "steps" or "epoch".
        eval_steps: a number of steps, or a share of the run's below 1.
        save_strategy: "no", "steps" or "epoch".
        save_steps: as eval_steps.
        others: names of theirs that are refused with what to use instead, or need nothing here.
        choices: the values that are served of a field, by its name.
        losses: the loss of preferences by `loss_type`, None without one; empty: there are no preferences.
    """

    output_dir: str = "trainer_output"
    overwrite_output_dir: bool = True
    max_length: int | None = 1024
    per_device_train_batch_size: int = 8
    per_device_eval_batch_size: int = 8
    gradient_accumulation_steps: int = 1
    num_train_epochs: float = 3.0
    max_steps: int = -1
    learning_rate: float = 2e-5
    embedding_learning_rate: float | None = None
    lr_scheduler_type: str = "linear"
    warmup_steps: float = 0
    warmup_ratio: float = 0.0
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    max_grad_norm: float | None = 1.0
    optim: str = "adamw_torch"
    label_smoothing_factor: float = 0.0
    neftune_noise_alpha: float | None = None
    train_sampling_strategy: str = "random"
    group_by_length: bool = False
    seed: int = 42
    full_determinism: bool = False
    bf16: bool | None = None
    fp16: bool | None = None
    logging_steps: int = 10
    eval_strategy: str = "no"
    eval_steps: int | float | None = None
    save_strategy: str = "steps"
    save_steps: int | float = 500
    save_total_limit: int | None = None
    load_best_model_at_end: bool = False
    report_to: str | Sequence[str] = "none"
    run_name: str | None = None
    others: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    choices: ClassVar[Mapping[str, Collection[Any]]] = {
        "optim": _OPTIMIZERS,
        "lr_scheduler_type": _SCHEDULES,
        "train_sampling_strategy": _SAMPLING,
        "eval_strategy": _STRATEGIES,
        "save_strategy": _STRATEGIES,
    }
    losses: ClassVar[Mapping[str | None, str]] = {}

    def __post_init__(self) -> None:
        config = type(self).__name__
        for name, value in vars(self).items():
            if isinstance(value, enum.Enum):  # transformers' names of strategies, optimizers, …
                setattr(self, name, value.value)
        self.report_to = "none" if self.report_to is None else self.report_to
        if unknown := [name for name in self.others if name not in ARGUMENTS.known]:
            names = [field.name for field in dataclasses.fields(self)]
            meant = did_you_mean(unknown[0], [*names, *ARGUMENTS.known, *RENAMED])
            raise ConfigError(f"{config}: {unknown[0]}: expected a name of {config}, got an unknown one{meant}")
        plain = {name: value.value if isinstance(value, enum.Enum) else value for name, value in self.others.items()}
        ARGUMENTS.translated(config, plain)
        kinds = ("max_steps", int | float, "a number"), ("warmup_steps", int | float, "a number")
        names = "a name or a list of names"
        for name, kind, expected in (*kinds, ("output_dir", str, "a folder"), ("report_to", str | Sequence, names)):
            if not isinstance(value := getattr(self, name), kind):
                raise ConfigError(f"{config}: {name}: expected {expected}, got {shown(value, 80)}")
        losses = {"loss_type": self.losses} if "loss_type" in vars(self) else {}
        for name, known in {**losses, **self.choices}.items():
            if (value := getattr(self, name)) not in tuple(known):
                expected = f"{'one of ' if len(known) > 1 else ''}{', '.join(map(str, known))}"
                raise ConfigError(f"{config}: {name}: expected {expected}, got {value!r}")

    def __getattr__(self, name: str) -> Any:
        others = vars(self).get("others", {})
        if name in others or name in ARGUMENTS.known:
            return others.get(name)
        raise AttributeError(f"{type(self).__name__} has no {name}")

    def settings(self, model: LanguageModel, **more: Any) -> TrainerSettings:
        """The trainer's settings.

        Args:
            model: that is trained.
            more: fields of the settings beside those that the arguments have by the same name.

        Raises:
            ConfigError: a dtype that the model does not have.
        """
        for name, dtype in (("bf16", "bfloat16"), ("fp16", "float16")):
            instead = name == "bf16" and jax.default_backend() == "cpu" and str(model.dtype) == "float32"
            if getattr(self, name) and str(model.dtype) != dtype and not instead:
                raise ConfigError(
                    f"{type(self).__name__}: {name}: expected none over a model that computes in {model.dtype}, got "
                    f"true; load it with dtype={dtype!r}"
                )
        trackers = [self.report_to] if isinstance(self.report_to, str) else list(self.report_to)
        output = {
            "save_steps": {"no": None, "steps": self.save_steps, "epoch": "epoch"}[self.save_strategy],
            "save_total_limit": self.save_total_limit or 2,
            "report_to": [name for name in trackers if name != "none"],
        }
        eval_steps = self.eval_steps or self.logging_steps
        training = {
            "max_steps": self.max_steps if self.max_steps > 0 else None,
            "eval_steps": {"no": None, "steps": eval_steps, "epoch": "epoch"}[self.eval_strategy],
            "group_by_length": self.group_by_length or _SAMPLING[self.train_sampling_strategy],
            "deterministic": self.full_determinism,
        }
        # As there: steps stand before the ratio, below 1 they are one, and "constant" has no warm-up.
        steps, ratio = (0, 0.0) if self.lr_scheduler_type == "constant" else (self.warmup_steps, self.warmup_ratio)
        steps, ratio = (0, steps) if 0 < steps < 1 else (int(steps), 0.0 if steps else ratio)
        optimizer = {
            "name": _OPTIMIZERS[self.optim],
            "lr_scheduler_type": _SCHEDULES[self.lr_scheduler_type],
            "warmup_steps": steps,
            "warmup_ratio": ratio,
            "max_grad_norm": self.max_grad_norm or 0.0,
        }
        preferences = PreferencesSection()
        if self.losses:
            loss = self.losses[getattr(self, "loss_type", None)]
            preferences = self._section(PreferencesSection, loss=loss)
        return self._section(
            TrainerSettings,
            output=self._section(OutputSection, **output),
            training=self._section(TrainingSection, **training),
            optimizer=self._section(OptimizerConfig, **optimizer),
            preferences=preferences,
            **more,
        )

    def _section(self, kind: type[S], **more: Any) -> S:
        """A section of the settings, with the arguments that have a name of its fields and are not None."""
        names = [field.name for field in dataclasses.fields(kind)]  # pyright: ignore[reportArgumentType]
        alike = {name: value for name in names if (value := getattr(self, name, None)) is not None}
        return kind(**alike | more)


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
        self.args: Any = _arguments_of(self.Config, args, type(self).__name__, others)
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


def _arguments_of(kind: type[SharedArguments], args: Any, trainer: str, others: Mapping[str, Any]) -> Any:
    """The settings of a trainer from any way of giving them."""
    if args is None:
        return kind(**others)
    if isinstance(args, kind):
        return dataclasses.replace(args, **_renamed(others, kind.__name__))
    if isinstance(args, Mapping):
        return kind(**{**_renamed(args, kind.__name__), **_renamed(others, kind.__name__)})
    made: Any = type(args)
    theirs = any(base.__name__ == "TrainingArguments" for base in made.__mro__)
    if not theirs or not dataclasses.is_dataclass(args):
        raise ConfigError(
            f"{trainer}: args: expected a {kind.__name__}, TrainingArguments or a mapping of names, got a "
            f"{type(args).__name__}"
        )
    # Theirs has defaults of its own for the names that are served; of the others those that were changed count.
    known = {field.name for field in dataclasses.fields(kind)}
    given = {field.name: getattr(args, field.name) for field in dataclasses.fields(args) if field.init}
    same = {name: given[name] for name in ("output_dir", "bf16", "fp16", "use_cpu") if name in given}
    plain: Any = made(**same)  # made on this machine, which theirs looks at
    plain.use_cpu = False
    given = {name: value for name, value in given.items() if name in known or value != getattr(plain, name)}
    return kind(**{**_renamed(given, kind.__name__), **_renamed(others, kind.__name__)})


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
