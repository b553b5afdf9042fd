"""The arguments that TRL's trainers share, most of them transformers', as sections of a run's settings."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, dataclass_transform

from fastjax.errors import ConfigError
from fastjax.language_model import LanguageModel
from fastjax.runs.trl_names import NOT_NEEDED, ONLY
from fastjax.training.config import OptimizerConfig, OutputSection, TrainingSection

A = TypeVar("A", bound="SharedArguments")

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


@dataclass_transform(kw_only_default=True)
def arguments(cls: type[A]) -> type[A]:
    """A dataclass of settings by name, which also takes the names of theirs that it has no field for, as `others`."""
    made = dataclasses.dataclass(kw_only=True)(cls)
    own, init = {field.name for field in dataclasses.fields(made)}, made.__init__

    @functools.wraps(init)
    def collected(self: A, **named: Any) -> None:
        rest = {name: named.pop(name) for name in list(named) if name not in own}
        init(self, **{**named, "others": {**named.get("others", {}), **rest}})

    made.__init__ = collected
    return made


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
        train_sampling_strategy: "random", or "group_by_length": rows of similar length in a step, which computes the
            longest.
        group_by_length: the older name of the second.
        full_determinism: two equal runs are equal bit for bit.
        bf16: the computation is in bfloat16, which the model was loaded for; None: whatever it is.
        fp16: likewise float16.
        embedding_learning_rate: that of embedding and head where these are trained, as of Unsloth; None: learning_rate.
        optim: the optimizer, one of adamw_torch, adamw_8bit, adafactor, lion_32bit and their other names.
        eval_strategy: "no", "steps" or "epoch".
        eval_steps: a number of steps, or a share of the run's below 1.
        save_strategy: "no", "steps" or "epoch".
        save_steps: as eval_steps.
        others: names of theirs that are refused with what to use instead, or need nothing here.
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

    def __post_init__(self) -> None:
        own = type(self).__name__
        only = {**ONLY, **{name: ((), instead) for name, instead in self.elsewhere().items()}}
        for name, value in self.others.items():
            values, instead = only.get(name, ((value,), ""))
            if value and value not in values:
                served = f" or {' or '.join(map(repr, values))}" if values else ""
                raise ConfigError(f"{own}: {name}: expected none{served}, got {value!r}; use {instead}")
            if name not in only and name not in NOT_NEEDED:
                raise ConfigError(f"{own}: {name}: expected a name of {own}, got an unknown one")
        for name, known in (
            ("optim", _OPTIMIZERS),
            ("lr_scheduler_type", _SCHEDULES),
            ("train_sampling_strategy", _SAMPLING),
            ("eval_strategy", ("no", "steps", "epoch")),
            ("save_strategy", ("no", "steps", "epoch")),
        ):
            if getattr(self, name) not in known:
                raise ConfigError(f"{own}: {name}: expected one of {', '.join(known)}, got {getattr(self, name)!r}")

    def elsewhere(self) -> Mapping[str, str]:
        """Further names with another place -> which."""
        return {}

    def sections(self, model: LanguageModel) -> tuple[OutputSection, TrainingSection, OptimizerConfig]:
        """The sections of a run's settings.

        Args:
            model: that is trained.

        Raises:
            ConfigError: a dtype that the model does not have.
        """
        for name, dtype in (("bf16", "bfloat16"), ("fp16", "float16")):
            if getattr(self, name) and str(model.dtype) != dtype:
                raise ConfigError(
                    f"{type(self).__name__}: {name}: expected none over a model that computes in {model.dtype}, got "
                    f"true; load it with dtype={dtype!r}"
                )
        told = [self.report_to] if isinstance(self.report_to, str) else list(self.report_to)
        output = {
            "save_steps": _every(self.save_strategy, self.save_steps),
            "save_total_limit": self.save_total_limit or 2,
            "report_to": [name for name in told if name != "none"],
        }
        training = {
            "max_steps": self.max_steps if self.max_steps > 0 else None,
            "eval_steps": _every(self.eval_strategy, self.eval_steps or self.logging_steps),
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
        return (
            OutputSection(**self.named_alike(OutputSection) | output),
            TrainingSection(**self.named_alike(TrainingSection) | training),
            OptimizerConfig(**self.named_alike(OptimizerConfig) | optimizer),
        )

    def named_alike(self, section: Any) -> dict[str, Any]:
        """The arguments that have the same name in a section of the settings, but for those that are None.

        Args:
            section: its class.
        """
        names = {field.name for field in dataclasses.fields(section)}
        return {name: value for name, value in vars(self).items() if name in names and value is not None}


def _every(strategy: str, steps: int | float) -> Any:
    """A strategy of transformers and its steps as `eval_steps` or `save_steps`."""
    return {"no": None, "steps": steps, "epoch": "epoch"}[strategy]


def with_names(args: A | type[A], others: Mapping[str, Any]) -> A:
    """The arguments with those that were given to the trainer itself, as older versions of TRL have it.

    Args:
        args: the trainer's; or their class, where it was given none.
        others: by name; those of `args` replace its own, the rest is looked at as its `others` are.
    """
    return args(**others) if isinstance(args, type) else dataclasses.replace(args, **others)
