"""`SFTTrainer` and `SFTConfig`: TRL's names for a run of `Trainer`, as far as they mean the same.

The defaults are TRL's and transformers' where a name is theirs. A name that is not served says what to use instead.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fastjax.data.named_templates import set_chat_template
from fastjax.data.records import ChatRecord
from fastjax.errors import ConfigError
from fastjax.language_model import LanguageModel
from fastjax.runs.trainer import Callback, Trainer, TrainerSettings, first_record
from fastjax.runs.training_run import FineTuned
from fastjax.training.config import OptimizerConfig, OutputSection, TrainingSection

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

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
class SFTConfig:
    """TRL's settings of supervised fine-tuning; each means what it means there.

    Attributes:
        output_dir: folder of the run.
        overwrite_output_dir: replace an earlier run there.
        max_length: tokens of a row, at most the model's max_seq_length; None: that.
        packing: put several examples into one row, which do not see each other.
        group_by_length: take rows of similar length into a step, which computes the longest.
        dataset_text_field: the column of plain texts.
        completion_only_loss: learn completions alone; None: where rows have them.
        assistant_only_loss: learn the assistant's messages alone; without it, of conversations, every token.
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
    packing: bool = False
    dataset_text_field: str = "text"
    completion_only_loss: bool | None = None
    assistant_only_loss: bool = False
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
        for name, value in self.others.items():
            if name in _ELSEWHERE and value:
                raise ConfigError(f"SFTConfig: {name}: expected none, got {value!r}; use {_ELSEWHERE[name]}")
            if name not in _ELSEWHERE and name not in _NOT_NEEDED:
                raise ConfigError(f"SFTConfig: {name}: expected a name of SFTConfig, got an unknown one")
        for name, known in (
            ("optim", _OPTIMIZERS),
            ("lr_scheduler_type", _SCHEDULES),
            ("eval_strategy", ("no", "steps", "epoch")),
            ("save_strategy", ("no", "steps", "epoch")),
        ):
            if getattr(self, name) not in known:
                raise ConfigError(f"SFTConfig: {name}: expected one of {', '.join(known)}, got {getattr(self, name)!r}")

    @property
    def columns(self) -> dict[str, str] | None:
        """The names of columns, as of `DataSection`."""
        return None if self.dataset_text_field == "text" else {"text": self.dataset_text_field}

    def settings(self, model: LanguageModel, conversations: bool) -> TrainerSettings:
        """The trainer's settings.

        Args:
            model: that is trained.
            conversations: whether rows are such, without a prompt of their own.

        Raises:
            ConfigError: a dtype or length that the model does not have.
        """
        for name, dtype in (("bf16", "bfloat16"), ("fp16", "float16")):
            if getattr(self, name) and str(model.dtype) != dtype:
                raise ConfigError(
                    f"SFTConfig: {name}: expected none over a model that computes in {model.dtype}, got true; load it "
                    f"with dtype={dtype!r}"
                )
        told = [self.report_to] if isinstance(self.report_to, str) else list(self.report_to)
        whole = not self.assistant_only_loss if conversations else self.completion_only_loss is False
        return TrainerSettings(
            OutputSection(
                self.output_dir,
                overwrite_output_dir=self.overwrite_output_dir,
                save_steps=_every(self.save_strategy, self.save_steps),
                save_total_limit=self.save_total_limit or 2,
                load_best_model_at_end=self.load_best_model_at_end,
                report_to=[name for name in told if name != "none"],  # pyright: ignore[reportArgumentType]
                run_name=self.run_name,
            ),
            TrainingSection(
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
            ),
            OptimizerConfig(
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
            ),
            columns=self.columns,
            packing=self.packing,
            loss_on="all" if whole else "responses",
        )


def _every(strategy: str, steps: int | float) -> Any:
    """A strategy of transformers and its steps as `eval_steps` or `save_steps`."""
    return {"no": None, "steps": steps, "epoch": "epoch"}[strategy]


class SFTTrainer:
    """TRL's trainer over `Trainer`; `train()` returns what that returns."""

    def __init__(
        self,
        model: LanguageModel,
        args: SFTConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        tokenizer: Any = None,
        callbacks: Sequence[Callback] = (),
        **others: Any,
    ):
        """Look at the settings.

        Args:
            model: with an adapter, or with every weight trained.
            args: the settings.
            train_dataset: as of `Trainer`.
            eval_dataset: likewise.
            processing_class: the tokenizer; None: the model's own.
            tokenizer: its older name.
            callbacks: as of `Trainer`.
            others: names of TRL's; those of the settings (older versions had them here) are taken, those that cannot be
                served are refused with what to use instead.

        Raises:
            ConfigError: settings that contradict each other or the model, or a name that is not served.
        """
        args = args or SFTConfig()
        if "max_seq_length" in others:
            others["max_length"] = others.pop("max_seq_length")
        fields = {field.name for field in dataclasses.fields(SFTConfig)} - {"others"}
        changes = {name: others.pop(name) for name in fields & set(others)}
        args = dataclasses.replace(args, **changes, others={**args.others, **others})
        if args.max_length is not None and args.max_length < model.max_seq_length:
            model = model.replace(max_seq_length=args.max_length)
        if args.eval_strategy == "no":
            eval_dataset = None
        self.args, self._callbacks = args, callbacks
        self._tokenizer = processing_class if processing_class is not None else tokenizer
        # An iterator is read here, since its first row says what the rows are.
        self._data = [list(data) if isinstance(data, Iterator) else data for data in (train_dataset, eval_dataset)]
        self._trainer = self._made(model)

    def _made(self, model: LanguageModel) -> Trainer:
        first = None if self._data[0] is None else first_record(self._data[0], "train_dataset", self.args.columns)
        settings = self.args.settings(model, isinstance(first, ChatRecord) and not first.prompt)
        train, held_out = self._data
        return Trainer(model, self._tokenizer, train, held_out, settings, callbacks=self._callbacks)

    def on_responses_only(self) -> "SFTTrainer":
        """The same trainer, with the assistant's messages alone to learn."""
        self.args = dataclasses.replace(self.args, assistant_only_loss=True)
        self._trainer = self._made(self.model)
        return self

    @property
    def model(self) -> LanguageModel:
        """The model, trained after `train`."""
        return self._trainer.model

    def train(self, resume_from_checkpoint: bool = False) -> FineTuned:
        """Train; see `Trainer.train`.

        Args:
            resume_from_checkpoint: go on from the newest checkpoint in the output folder.
        """
        return self._trainer.train(resume=resume_from_checkpoint)

    def save_model(self, output_dir: str) -> None:
        """Write the trained weights; see `LanguageModel.save_pretrained`.

        Args:
            output_dir: the folder.
        """
        self.model.save_pretrained(output_dir)


def get_chat_template(tokenizer: "PreTrainedTokenizerFast", chat_template: str) -> "PreTrainedTokenizerFast":
    """Unsloth's name for `fastjax.data.set_chat_template`.

    Args:
        tokenizer: changed in place.
        chat_template: one of `fastjax.data.NAMED_TEMPLATES`, or a file with a Jinja template.

    Returns:
        The tokenizer.

    Raises:
        ConfigError: as of `set_chat_template`.
    """
    set_chat_template(tokenizer, chat_template)
    return tokenizer


def train_on_responses_only(trainer: SFTTrainer, **parts: str) -> SFTTrainer:
    """Unsloth's name for `SFTTrainer.on_responses_only`: the chat template says where answers are.

    Args:
        trainer: of conversations.
        parts: the texts that begin instructions and responses; not needed.
    """
    del parts
    return trainer.on_responses_only()
