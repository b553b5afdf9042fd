"""The section `optimizer`: the rule of the updates and its schedule."""

import dataclasses
from typing import Literal

from fastjax.errors import ConfigError
from fastjax.training.config.checks import check_section, expect


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer and its schedule.

    Attributes:
        name: adamw; adamw_16bit, with moments in bfloat16, rounded stochastically, in half the memory; adamw_8bit, with
            moments in eight bits, block by block, in a quarter of the memory; adafactor, with one number for each row
            and column instead; lion, with one moment; or muon, with one moment of matrices in layers, whose updates are
            orthogonal, and AdamW for embeddings, head and vectors.
        learning_rate: the highest learning rate, reached at the end of the warm-up. Lion wants a third to a tenth of
            AdamW's.
        loraplus_lr_ratio: LoRA+: the learning rate of every lora_B is this many times learning_rate; null: once.
        embedding_learning_rate: the highest learning rate of embedding and head where these are trained, whole or in
            rows, and of an adapter on the embedding; null: learning_rate.
        lr_scheduler_type: how it goes on after the warm-up: cosine or linear decay, constant, or wsd
            (warm-up, stable, decay).
        warmup_steps: steps over which it rises linearly from zero (with wsd from min_lr_ratio, as in transformers).
        warmup_ratio: the same as a part of all steps; set one of the two.
        decay_ratio: with wsd, the part of all steps at the end over which it decays linearly.
        min_lr_ratio: where cosine, linear and wsd end, as a part of the highest learning rate.
        weight_decay: decoupled weight decay: a step takes this many times the weight's own learning rate off it.
        no_decay: parts of names of weights that do not decay; by default no vector does.
        adam_beta1: decay of the first moment (lion: of the interpolation; adafactor has none).
        adam_beta2: decay of the second moment (lion: of the momentum; adafactor: 1 - step^-0.8 instead).
        adam_epsilon: added to the root of the second moment (AdamW only, muon's too).
        muon_momentum: decay of muon's moment of matrices; adam_beta1 and adam_beta2 are those of its AdamW.
        max_grad_norm: the gradient is scaled down to this global norm; 0: it is not.
    """

    name: Literal["adamw", "adamw_16bit", "adamw_8bit", "adafactor", "lion", "muon"] = "adamw"
    learning_rate: float = 2e-4
    loraplus_lr_ratio: float | None = None
    embedding_learning_rate: float | None = None
    lr_scheduler_type: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    warmup_steps: int = 0
    warmup_ratio: float = 0.0
    decay_ratio: float = 0.1
    min_lr_ratio: float = 0.0
    weight_decay: float = 0.0
    no_decay: list[str] = dataclasses.field(default_factory=lambda: ["bias", "norm", "magnitude"])
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    muon_momentum: float = 0.95
    max_grad_norm: float = 1.0

    def __post_init__(self) -> None:
        check_section("optimizer", self)
        positive = ("learning_rate", "loraplus_lr_ratio", "embedding_learning_rate", "adam_epsilon")
        for name in positive:
            value = getattr(self, name)
            expect(f"optimizer.{name}", value, value is None or value > 0, "greater than 0")
        for name in ("warmup_steps", "weight_decay", "max_grad_norm"):
            expect(f"optimizer.{name}", getattr(self, name), getattr(self, name) >= 0, "at least 0")
        for name in ("warmup_ratio", "adam_beta1", "adam_beta2", "muon_momentum", "min_lr_ratio"):
            expect(f"optimizer.{name}", getattr(self, name), 0 <= getattr(self, name) < 1, "in [0, 1)")
        expect("optimizer.decay_ratio", self.decay_ratio, 0 < self.decay_ratio <= 1, "in (0, 1]")
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
