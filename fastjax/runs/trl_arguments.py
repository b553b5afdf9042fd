"""The arguments of TRL's trainers, most of them transformers', as settings of a `Trainer`."""

import dataclasses
import enum
import functools
import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, TypeVar, dataclass_transform

import jax

from convert.errors import shown
from fastjax.errors import ConfigError
from fastjax.language_model import LanguageModel
from fastjax.options import did_you_mean
from fastjax.runs.trainer import TrainerSettings
from fastjax.runs.trl_names import ARGUMENTS, RENAMED
from fastjax.training.config import OptimizerConfig, OutputSection, PreferencesSection, TrainingSection

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


def arguments_of(kind: type[SharedArguments], args: Any, trainer: str, others: Mapping[str, Any]) -> Any:
    """The settings of a trainer from any way of giving them.

    Args:
        kind: of the settings.
        args: a `kind`, TrainingArguments or TRL's own config, a mapping of names, or None.
        trainer: name of the trainer, for messages.
        others: names beside them, which count more.

    Raises:
        ConfigError: something else, a name that is not served, or a value that is not.
    """
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
