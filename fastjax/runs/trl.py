"""The base of TRL's trainers and of their arguments, most of them transformers', over a `Trainer`."""

import dataclasses
import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, ClassVar, TypeVar, dataclass_transform

from fastjax.errors import ConfigError
from fastjax.execution.language_model import check_model
from fastjax.language_model import LanguageModel, ModelHandle
from fastjax.language_model.handle import value_of
from fastjax.runs.context import FineTuned
from fastjax.runs.trainer import Callback, Trainer, TrainerSettings
from fastjax.runs.trl_names import NOT_NEEDED, ONLY
from fastjax.training.config import OptimizerConfig, OutputSection, PreferencesSection, TrainingSection

A = TypeVar("A", bound="SharedArguments")
S = TypeVar("S")

_OPTIMIZERS = {
    "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw",
    "adamw_hf": "adamw",
    "adamw_8bit": "adamw_8bit",
    "adamw_bnb_8bit": "adamw_8bit",
    "paged_adamw_8bit": "adamw_8bit",
    "adafactor": "adafactor",
    "lion_32bit": "lion",
}
_SCHEDULES = {name: name for name in ("linear", "cosine", "constant")} | {
    "constant_with_warmup": "constant",
    "warmup_stable_decay": "wsd",
}
#: train_sampling_strategy -> group_by_length.
_SAMPLING = {"random": False, "group_by_length": True}
_STRATEGIES = ("no", "steps", "epoch")


@dataclass_transform(kw_only_default=True)
def arguments(cls: type[A]) -> type[A]:
    """A dataclass of settings by name that puts the names without a field into `others`."""
    settings = dataclasses.dataclass(kw_only=True)(cls)
    fields, init = {field.name for field in dataclasses.fields(settings)}, settings.__init__

    @functools.wraps(init)
    def collected(self: A, **named: Any) -> None:
        rest = {name: named.pop(name) for name in list(named) if name not in fields}
        init(self, **{**named, "others": {**named.get("others", {}), **rest}})

    settings.__init__ = collected
    return settings


@arguments
class SharedArguments:
    """Names of transformers' TrainingArguments; each means what it means there. What becomes of those that are no
    fields is in `trl_names`.

    Attributes:
        output_dir: folder of the run.
        overwrite_output_dir: replace an earlier run there.
        max_length: tokens of a sequence; None: no limit of its own.
        warmup_steps: a number of steps, or a share of the run's below 1; none with lr_scheduler_type "constant".
        warmup_ratio: the older name of the share.
        train_sampling_strategy: "random", or "group_by_length": rows of similar length in a step.
        group_by_length: the older name of the second.
        full_determinism: two equal runs are equal bit for bit.
        bf16: the computation is in bfloat16, which the model was loaded for; None: whatever it is.
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
    overwrite_output_dir: bool = False
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
    max_grad_norm: float = 1.0
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
        for name, value in self.others.items():
            values, instead = ONLY.get(name, ((value,), ""))
            if value and value not in values:
                served = f" or {' or '.join(map(repr, values))}" if values else ""
                raise ConfigError(f"{config}: {name}: expected none{served}, got {value!r}; use {instead}")
            if name not in ONLY and name not in NOT_NEEDED:
                raise ConfigError(f"{config}: {name}: expected a name of {config}, got an unknown one")
        for name in ("max_steps", "warmup_steps"):
            if not isinstance(value := getattr(self, name), int | float):
                raise ConfigError(f"{config}: {name}: expected a number, got {value!r}")
        losses = {"loss_type": self.losses} if hasattr(self, "loss_type") else {}
        for name, known in {**losses, **self.choices}.items():
            if (value := getattr(self, name)) not in tuple(known):
                expected = f"{'one of ' if len(known) > 1 else ''}{', '.join(map(str, known))}"
                raise ConfigError(f"{config}: {name}: expected {expected}, got {value!r}")

    def settings(self, model: LanguageModel, **more: Any) -> TrainerSettings:
        """The trainer's settings.

        Args:
            model: that is trained.
            more: fields of the settings beside those that the arguments have by the same name.

        Raises:
            ConfigError: a dtype that the model does not have.
        """
        for name, dtype in (("bf16", "bfloat16"), ("fp16", "float16")):
            if getattr(self, name) and str(model.dtype) != dtype:
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


class TRLTrainer:
    """A trainer by TRL's arguments; `train()` returns what `Trainer.train` returns.

    Attributes:
        Config: the class of its settings.
        args: the settings.
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
        callbacks: Sequence[Callback] = (),
        **others: Any,
    ):
        """Look at the settings.

        Args:
            model: with an adapter; or with every weight trained, but not for DPO and KTO. A reward model is one that
                `with_score_head` has made.
            args: the settings, a `Config`.
            train_dataset: as of `Trainer`.
            eval_dataset: held-out data, as of `Trainer`.
            processing_class: the tokenizer; None: the model's own.
            tokenizer: its older name.
            callbacks: as of `Trainer`.
            others: names of TRL's; those of the settings (older versions had them here) are taken, those that cannot be
                served are refused with what to use instead.

        Raises:
            ConfigError: settings that contradict each other or the model, or a name that is not served.
        """
        if args is not None and not isinstance(args, self.Config):
            config, name = self.Config.__name__, type(self).__name__
            raise ConfigError(f"{name}: args: expected a {config}, got a {type(args).__name__}")
        self.args: Any = self.Config(**others) if args is None else dataclasses.replace(args, **others)
        check_model(value_of(model))
        self._tokenizer = processing_class if processing_class is not None else tokenizer
        self._callbacks = callbacks
        held_out = None if self.args.eval_strategy == "no" else eval_dataset
        # An iterator is read here, since its first row may say what the rows are.
        self._data = [list(data) if isinstance(data, Iterator) else data for data in (train_dataset, held_out)]
        self._trainer = self._made(model)

    def _made(self, model: LanguageModel) -> Trainer:
        (train, held_out), settings = self._data, self._settings(model)
        return Trainer(model, self._tokenizer, train, held_out, settings, callbacks=self._callbacks)

    def _settings(self, model: LanguageModel) -> TrainerSettings:
        return self.args.settings(model)

    @property
    def model(self) -> ModelHandle:
        """The model that the trainer was given, trained after `train`."""
        return self._trainer.handle

    def train(self, resume_from_checkpoint: bool = False) -> FineTuned:
        """Train; see `Trainer.train`.

        Args:
            resume_from_checkpoint: go on from the newest checkpoint in the output folder.
        """
        return self._trainer.train(resume=resume_from_checkpoint)

    def save_model(self, output_dir: str) -> None:
        """Write the trained weights; see `language_model.saving.save_pretrained`.

        Args:
            output_dir: the folder.
        """
        self.model.save_pretrained(output_dir)
