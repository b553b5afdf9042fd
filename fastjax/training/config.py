"""The settings of a training run: the sections of the YAML file that `fastjax train --config` reads.

The sections `model` and `lora` are the arguments of `FastLanguageModel.from_pretrained` and `.get_peft_model`; the
others carry the names of Hugging Face's TrainingArguments where they mean the same. Nothing here repeats a value that
the model's config.json gives. A value out of range is refused when the section is made, with its full name.
"""

import dataclasses
from typing import Any, Literal

from fastjax.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class ModelSection:
    """The base model and how it is held.

    Attributes:
        model_name: folder of the base model in Hugging Face format.
        max_seq_length: length of a row, in tokens.
        dtype: dtype of the computation; null: bfloat16 on a GPU, float32 on a CPU.
        load_in_4bit: hold the frozen weights of the layers in NF4 (QLoRA).
        full_finetuning: train every weight instead of an adapter.
        use_gradient_checkpointing: what the backward pass recomputes: true or "full": all but the layers' inputs;
            false or "projections": what lies between the projections and the attention; "none": nothing.
        layer_loop: scan over the layers (compile time independent of depth) or unroll them (a few percent faster).
    """

    model_name: str
    max_seq_length: int = 2048
    dtype: Literal["bfloat16", "float16", "float32"] | None = None
    load_in_4bit: bool = True
    full_finetuning: bool = False
    use_gradient_checkpointing: bool | str = True
    layer_loop: Literal["scan", "unroll"] = "scan"

    def __post_init__(self) -> None:
        _expect("model.max_seq_length", self.max_seq_length, self.max_seq_length >= 2, "at least 2")
        if self.full_finetuning and self.load_in_4bit:
            raise ConfigError(
                "model.load_in_4bit: expected false with model.full_finetuning: true, given true; "
                "a 4-bit weight is frozen and only an adapter can be trained over it"
            )


@dataclasses.dataclass(frozen=True)
class LoraSection:
    """The adapter, with PEFT's names and meanings.

    Attributes:
        r: rank.
        lora_alpha: scale: the adapter's product is multiplied by lora_alpha / r.
        lora_dropout: probability with which an input of an adapter is zeroed in training.
        target_modules: names of the projections that get an adapter; null: all seven.
        use_rslora: scale by lora_alpha / √r instead.
        use_dora: train the magnitude of each weight row apart from its direction (DoRA).
        rank_pattern: ranks for modules that match a name or pattern, in place of r.
        alpha_pattern: the same for lora_alpha.
        layers_to_transform: indices of the layers that get adapters; null: all.
        modules_to_save: modules trained whole and saved with the adapter: embed_tokens, lm_head.
        ensure_weight_tying: with tied embeddings, modules_to_save trains one array for both uses, not two.
        init_lora_weights: how A and B start: true (B is zero), false, "gaussian" or "orthogonal".
        bias: which biases are trained; only "none".
        random_state: seed of the adapter's start.
    """

    r: int = 16
    lora_alpha: float = 16
    lora_dropout: float = 0.0
    target_modules: list[str] | str | None = None
    use_rslora: bool = False
    use_dora: bool = False
    rank_pattern: dict[str, int] | None = None
    alpha_pattern: dict[str, float] | None = None
    layers_to_transform: list[int] | int | None = None
    modules_to_save: list[str] | None = None
    ensure_weight_tying: bool = False
    init_lora_weights: bool | str = True
    bias: Literal["none"] = "none"
    random_state: int = 3407

    def __post_init__(self) -> None:
        _expect("lora.r", self.r, self.r >= 1, "at least 1")
        _expect("lora.lora_dropout", self.lora_dropout, 0 <= self.lora_dropout < 1, "in [0, 1)")


@dataclasses.dataclass(frozen=True)
class DataSection:
    """What is learnt.

    Attributes:
        train_file: JSON lines file, or files, with `messages` or `text` in each row.
        eval_file: held-out files of the same form; null: no evaluation.
        loss_on: the tokens to learn: the assistant's in rows of `messages`, or all. Rows of `text` are learnt whole.
        packing: put several documents into one row; false: one document a row, padded.
    """

    train_file: list[str] | str
    eval_file: list[str] | str | None = None
    loss_on: Literal["responses", "all"] = "responses"
    packing: bool = True


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW and its schedule.

    Attributes:
        learning_rate: the highest learning rate, reached at the end of the warm-up.
        lr_scheduler_type: how it falls after the warm-up: cosine or linear to zero, or constant.
        warmup_steps: steps over which it rises linearly from zero.
        warmup_ratio: the same as a part of all steps; set one of the two.
        weight_decay: decoupled weight decay of the matrices; biases, norms and DoRA magnitudes have none.
        adam_beta1: decay of the first moment.
        adam_beta2: decay of the second moment.
        adam_epsilon: added to the root of the second moment.
        max_grad_norm: the gradient is scaled down to this global norm; 0: it is not.
    """

    learning_rate: float = 2e-4
    lr_scheduler_type: Literal["cosine", "linear", "constant"] = "cosine"
    warmup_steps: int = 0
    warmup_ratio: float = 0.0
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    max_grad_norm: float = 1.0

    def __post_init__(self) -> None:
        _expect("optimizer.learning_rate", self.learning_rate, self.learning_rate > 0, "greater than 0")
        _expect("optimizer.warmup_steps", self.warmup_steps, self.warmup_steps >= 0, "at least 0")
        _expect("optimizer.warmup_ratio", self.warmup_ratio, 0 <= self.warmup_ratio < 1, "in [0, 1)")
        _expect("optimizer.weight_decay", self.weight_decay, self.weight_decay >= 0, "at least 0")
        _expect("optimizer.adam_beta1", self.adam_beta1, 0 <= self.adam_beta1 < 1, "in [0, 1)")
        _expect("optimizer.adam_beta2", self.adam_beta2, 0 <= self.adam_beta2 < 1, "in [0, 1)")
        _expect("optimizer.adam_epsilon", self.adam_epsilon, self.adam_epsilon > 0, "greater than 0")
        _expect("optimizer.max_grad_norm", self.max_grad_norm, self.max_grad_norm >= 0, "at least 0")
        if self.warmup_steps and self.warmup_ratio:
            raise ConfigError(
                f"optimizer.warmup_steps ({self.warmup_steps}) and optimizer.warmup_ratio ({self.warmup_ratio}) are "
                "both set: expected one of them"
            )


@dataclasses.dataclass(frozen=True)
class TrainingSection:
    """How long, in which portions, and what is looked at meanwhile.

    Attributes:
        per_device_train_batch_size: rows a device takes at once.
        gradient_accumulation_steps: such portions a step.
        num_train_epochs: passes over the data.
        max_steps: number of steps, in place of num_train_epochs.
        per_device_eval_batch_size: rows a device takes at once in an evaluation; null: as in training.
        eval_steps: evaluate every so many steps; null: at the end only.
        logging_steps: print a line every so many steps where the output is not a terminal.
        seed: of the order of the rows and of dropout.
    """

    per_device_train_batch_size: int = 2
    gradient_accumulation_steps: int = 1
    num_train_epochs: float = 1.0
    max_steps: int | None = None
    per_device_eval_batch_size: int | None = None
    eval_steps: int | None = None
    logging_steps: int = 10
    seed: int = 3407

    def __post_init__(self) -> None:
        for name in (
            "per_device_train_batch_size",
            "gradient_accumulation_steps",
            "max_steps",
            "per_device_eval_batch_size",
            "eval_steps",
            "logging_steps",
        ):
            value = getattr(self, name)
            _expect(f"training.{name}", value, value is None or value >= 1, "at least 1")
        _expect("training.num_train_epochs", self.num_train_epochs, self.num_train_epochs > 0, "greater than 0")
        _expect("training.seed", self.seed, 0 <= self.seed < 2**32, "in [0, 2^32)")


@dataclasses.dataclass(frozen=True)
class OutputSection:
    """Where the results go.

    Attributes:
        output_dir: folder of the run: `config.yaml`, `metrics.jsonl`, and at the end `adapter/` (or `model/` after
            full fine-tuning).
        overwrite_output_dir: replace the result of an earlier run in that folder.
    """

    output_dir: str
    overwrite_output_dir: bool = False


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """A training run.

    Attributes:
        model: the base model and how it is held.
        data: what is learnt.
        output: where the results go.
        lora: the adapter.
        optimizer: AdamW and its schedule.
        training: how long and in which portions.
    """

    model: ModelSection
    data: DataSection
    output: OutputSection
    lora: LoraSection = dataclasses.field(default_factory=LoraSection)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    training: TrainingSection = dataclasses.field(default_factory=TrainingSection)

    def __post_init__(self) -> None:
        if self.model.full_finetuning and self.lora != LoraSection():
            raise ConfigError("lora: expected no such section with model.full_finetuning: true, which has no adapter")
        if self.training.eval_steps is not None and self.data.eval_file is None:
            raise ConfigError(
                f"training.eval_steps: expected data.eval_file with it, given {self.training.eval_steps} without; "
                "name a held-out file or leave eval_steps out"
            )


def _expect(name: str, value: Any, holds: bool, expected: str) -> None:
    if not holds:
        raise ConfigError(f"{name}: expected a value {expected}, given {value!r}")
