"""The arguments that TRL's trainers share, most of them transformers', as sections of a run's settings."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from fastjax.errors import ConfigError
from fastjax.language_model import LanguageModel
from fastjax.training.config import OptimizerConfig, OutputSection, TrainingSection

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
#: Names that change nothing here -> why.
_NOT_NEEDED = (
    *("dataset_num_proc", "dataloader_num_workers", "dataloader_pin_memory", "remove_unused_columns", "tf32"),
    *("disable_tqdm", "gradient_checkpointing_kwargs", "ddp_find_unused_parameters"),
)
#: Names with another place -> which.
_ELSEWHERE = {
    "gradient_checkpointing": "use_gradient_checkpointing of FastLanguageModel",
    "model_init_kwargs": "FastLanguageModel.from_pretrained",
    "peft_config": "FastLanguageModel.get_peft_model",
    "deepspeed": "fastjax train with parallel.fsdp",
    "fsdp": "fastjax train with parallel.fsdp",
    "push_to_hub": "LanguageModel.push_to_hub",
    "resume_from_checkpoint": "train(resume=True)",
    "formatting_func": "rows that are formatted already, or a chat template",
    "data_collator": "Trainer's loss_on: responses, last_response or all",
    "compute_metrics": "Trainer's evaluate",
}


@dataclasses.dataclass(kw_only=True)
class SharedArguments:
    """Names of transformers' TrainingArguments; each means what it means there.

    Attributes:
        output_dir: folder of the run.
        overwrite_output_dir: replace an earlier run there.
        max_length: tokens of a sequence; None: no limit of its own.
        group_by_length: take rows of similar length into a step, which computes the longest.
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
    warmup_steps: int = 0
    warmup_ratio: float = 0.0
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    max_grad_norm: float = 1.0
    optim: str = "adamw_torch"
    label_smoothing_factor: float = 0.0
    neftune_noise_alpha: float | None = None
    group_by_length: bool = False
    seed: int = 42
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
        elsewhere = {**_ELSEWHERE, **self.elsewhere()}
        for name, value in self.others.items():
            if name in elsewhere and value:
                raise ConfigError(f"{own}: {name}: expected none, got {value!r}; use {elsewhere[name]}")
            if name not in elsewhere and name not in _NOT_NEEDED:
                raise ConfigError(f"{own}: {name}: expected a name of {own}, got an unknown one")
        for name, known in (
            ("optim", _OPTIMIZERS),
            ("lr_scheduler_type", _SCHEDULES),
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
        output = OutputSection(
            self.output_dir,
            overwrite_output_dir=self.overwrite_output_dir,
            save_steps=_every(self.save_strategy, self.save_steps),
            save_total_limit=self.save_total_limit or 2,
            load_best_model_at_end=self.load_best_model_at_end,
            report_to=[name for name in told if name != "none"],  # pyright: ignore[reportArgumentType]
            run_name=self.run_name,
        )
        training = TrainingSection(
            per_device_train_batch_size=self.per_device_train_batch_size,
            gradient_accumulation_steps=self.gradient_accumulation_steps,
            num_train_epochs=self.num_train_epochs,
            max_steps=self.max_steps if self.max_steps > 0 else None,
            per_device_eval_batch_size=self.per_device_eval_batch_size,
            eval_steps=_every(self.eval_strategy, self.eval_steps or self.logging_steps),
            group_by_length=self.group_by_length,
            logging_steps=self.logging_steps,
            label_smoothing_factor=self.label_smoothing_factor,
            neftune_noise_alpha=self.neftune_noise_alpha,
            seed=self.seed,
        )
        optimizer = OptimizerConfig(
            name=_OPTIMIZERS[self.optim],  # pyright: ignore[reportArgumentType]
            learning_rate=self.learning_rate,
            embedding_learning_rate=self.embedding_learning_rate,
            lr_scheduler_type=_SCHEDULES[self.lr_scheduler_type],  # pyright: ignore[reportArgumentType]
            warmup_steps=self.warmup_steps,
            warmup_ratio=self.warmup_ratio,
            weight_decay=self.weight_decay,
            adam_beta1=self.adam_beta1,
            adam_beta2=self.adam_beta2,
            adam_epsilon=self.adam_epsilon,
            max_grad_norm=self.max_grad_norm,
        )
        return output, training, optimizer


def _every(strategy: str, steps: int | float) -> Any:
    """A strategy of transformers and its steps as `eval_steps` or `save_steps`."""
    return {"no": None, "steps": steps, "epoch": "epoch"}[strategy]


A = TypeVar("A", bound=SharedArguments)


def with_names(args: A | type[A], others: Mapping[str, Any]) -> A:
    """The arguments with those that were given to the trainer itself, as older versions of TRL have it.

    Args:
        args: the trainer's; or their class, where it was given none.
        others: by name; those of `args` replace its own, the rest is looked at as its `others` are.
    """
    fields = {field.name for field in dataclasses.fields(args)} - {"others"}
    changes = {name: value for name, value in others.items() if name in fields}
    rest = {name: value for name, value in others.items() if name not in fields}
    if isinstance(args, type):
        return args(**changes, others=rest)
    return dataclasses.replace(args, **changes, others={**args.others, **rest})
