"""The section `optimizer`: the rule of the updates and its schedule."""

import dataclasses
from typing import Annotated, Literal

from annotated_types import Interval

from fastjax.errors import ConfigError
from fastjax.options import checked
from fastjax.options.kinds import NotNegative, Part, Positive


@checked("optimizer")
class OptimizerConfig:
    """The optimizer and its schedule."""

    name: Literal["adamw", "adamw_16bit", "adamw_8bit", "adafactor", "lion", "muon"] = "adamw"
    """adamw; adamw_16bit, with moments in bfloat16, rounded stochastically, in half the memory; adamw_8bit, with
    moments in eight bits, block by block, in a quarter of the memory; adafactor, with one number for each row and
    column instead; lion, with one moment; or muon, with one moment of matrices in layers, whose updates are orthogonal,
    and AdamW for embeddings, head and vectors."""
    learning_rate: Positive = 2e-4
    """the highest learning rate, reached at the end of the warm-up. Lion wants a third to a tenth of AdamW's."""
    loraplus_lr_ratio: Positive | None = None
    """LoRA+: the learning rate of every lora_B is this many times learning_rate; null: once."""
    embedding_learning_rate: Positive | None = None
    """the highest learning rate of embedding and head where these are trained, whole or in rows, and of an adapter on
    the embedding; null: learning_rate."""
    lr_scheduler_type: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """how it goes on after the warm-up: cosine or linear decay, constant, or wsd (warm-up, stable, decay)."""
    warmup_steps: Annotated[int, Interval(ge=0)] = 0
    """steps over which it rises linearly from zero (with wsd from min_lr_ratio, as in transformers)."""
    warmup_ratio: Part = 0.0
    """the same as a part of all steps; set one of the two."""
    decay_ratio: Annotated[float, Interval(gt=0, le=1)] = 0.1
    """with wsd, the part of all steps at the end over which it decays linearly."""
    min_lr_ratio: Part = 0.0
    """where cosine, linear and wsd end, as a part of the highest learning rate."""
    weight_decay: NotNegative = 0.0
    """decoupled weight decay: a step takes this many times the weight's own learning rate off it."""
    no_decay: list[str] = dataclasses.field(default_factory=lambda: ["bias", "norm", "scale", "decay", "magnitude"])
    """parts of names of weights that do not decay; by default no vector does."""
    adam_beta1: Part = 0.9
    """decay of the first moment (lion: of the interpolation; adafactor has none)."""
    adam_beta2: Part = 0.999
    """decay of the second moment (lion: of the momentum; adafactor: 1 - step^-0.8 instead)."""
    adam_epsilon: Positive = 1e-8
    """added to the root of the second moment (AdamW only, muon's too)."""
    muon_momentum: Part = 0.95
    """decay of muon's moment of matrices; adam_beta1 and adam_beta2 are those of its AdamW."""
    max_grad_norm: NotNegative = 1.0
    """the gradient is scaled down to this global norm; 0: it is not."""

    def __post_init__(self) -> None:
        if self.warmup_steps and self.warmup_ratio:
            raise ConfigError(
                f"optimizer.warmup_steps ({self.warmup_steps}) and optimizer.warmup_ratio ({self.warmup_ratio}) are "
                "both set: expected one of them"
            )
        if self.lr_scheduler_type == "wsd" and self.warmup_ratio + self.decay_ratio > 1:
            raise ConfigError(
                f"optimizer.warmup_ratio ({self.warmup_ratio}) and optimizer.decay_ratio ({self.decay_ratio}): "
                "expected at most 1 together with optimizer.lr_scheduler_type: wsd"
            )
