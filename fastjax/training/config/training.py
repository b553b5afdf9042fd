"""The section `training`: length, batches, evaluation and numerics."""

import dataclasses
from typing import Literal

from fastjax.limits import MAX_ROWS, MAX_STEPS
from fastjax.training.config.checks import check_section, expect, expect_interval
from fastjax.training.config.qat import NAMED, QATScheme, QATSettings


@dataclasses.dataclass(frozen=True)
class TrainingSection:
    """Length, batches, evaluation and numerics of the training.

    Attributes:
        per_device_train_batch_size: rows a device takes at once.
        gradient_accumulation_steps: such portions a step.
        num_train_epochs: passes over the data.
        max_steps: number of steps, in place of num_train_epochs.
        per_device_eval_batch_size: rows a device takes at once in an evaluation; null: as in training.
        eval_steps: evaluate every so many steps; below 1: after such a share of the run's steps each time, rounded up;
            epoch: at the end of each; null: at the end only.
        early_stopping_patience: end after so many evaluations in a row that are no better than the best; null: never.
        early_stopping_threshold: how much lower than the best an evaluation's loss must be to be better, in nats.
        group_by_length: with data.packing: false: the rows of a step are of similar length, and a step computes its
            longest row instead of max_seq_length tokens; one program for each of eight lengths at most.
        logging_steps: print a line every so many steps where the output is not a terminal.
        accumulation_dtype: dtype in which the gradients of a step's portions are added up.
        offload_optimizer: hold AdamW's moments of matrices in the host's memory; the GPU fetches, updates and sends
            them back layer by layer. It is for full fine-tuning, where they are half of what the GPU holds.
        initial_loss_scale: with model.dtype float16: the first factor of the loss.
        loss_scale_window: with float16: after so many steps without an overflow the scale doubles; an overflow halves
            it, and that step changes nothing.
        label_smoothing_factor: share of the training loss that is the mean of −log p over the vocabulary (label
            smoothing); evaluations are plain cross-entropy.
        z_loss_coef: factor of the mean square of the logits' logsumexp, which is added to the training loss (z-loss).
        neftune_noise_alpha: magnitude of the noise on the embeddings in training (NEFTune); null: none.
        router_aux_loss_coef: of a mixture of experts: factor of the load-balancing loss that is added to the loss.
        router_z_loss_coef: likewise: factor of the mean square of the router logits' logsumexp.
        qat: quantisation-aware training: the layers' matrices have the values that they will decode to after
            quantisation, an adapter merged first; gradients pass straight through. A name: int4_weight_only (int4-32),
            int8_dynamic_int4 (int4-32, inputs in int8), float8 (fp8-row, inputs in fp8), nvfp4, nf4, mxfp4, q4_0,
            q8_0; or a section with weights. null: none.
        deterministic: on a GPU, deterministic operations only, and kernels chosen once and kept beside the
            checkpoints: two equal runs are equal bit for bit. Slower. On a CPU they always are.
        step_timeout: seconds that a step may take, compiling included, or a save, or a few batches of an evaluation,
            before the run ends with the stacks of its threads, as where another process hangs; null: for ever. The
            device has less for a step that others have come before: 300 s and ten times the slowest of the last 16.
        seed: of the order of the rows and of dropout.
    """

    per_device_train_batch_size: int = 2
    gradient_accumulation_steps: int = 1
    num_train_epochs: float = 1.0
    max_steps: int | None = None
    per_device_eval_batch_size: int | None = None
    eval_steps: int | float | Literal["epoch"] | None = None
    early_stopping_patience: int | None = None
    early_stopping_threshold: float = 0.0
    group_by_length: bool = False
    logging_steps: int = 10
    accumulation_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    offload_optimizer: bool = False
    initial_loss_scale: float = 65536.0
    loss_scale_window: int = 1000
    label_smoothing_factor: float = 0.0
    z_loss_coef: float = 0.0
    neftune_noise_alpha: float | None = None
    router_aux_loss_coef: float = 0.0
    router_z_loss_coef: float = 0.0
    qat: QATScheme | QATSettings | None = None
    deterministic: bool = False
    step_timeout: float | None = 3600.0
    seed: int = 3407

    def __post_init__(self) -> None:
        check_section("training", self)
        for name in (
            "per_device_train_batch_size",
            "gradient_accumulation_steps",
            "max_steps",
            "per_device_eval_batch_size",
            "early_stopping_patience",
            "logging_steps",
            "loss_scale_window",
        ):
            value = getattr(self, name)
            expect(f"training.{name}", value, value is None or value >= 1, "at least 1")
        expect_interval("training.eval_steps", self.eval_steps)
        for name in ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"):
            value = getattr(self, name)
            expect(f"training.{name}", value, value is None or value <= MAX_ROWS, f"of at most {MAX_ROWS}")
        expect("training.max_steps", self.max_steps, (self.max_steps or 1) <= MAX_STEPS, f"of at most {MAX_STEPS}")
        for name in ("num_train_epochs", "neftune_noise_alpha", "step_timeout"):
            value = getattr(self, name)
            expect(f"training.{name}", value, value is None or value > 0, "greater than 0")
        smoothing = self.label_smoothing_factor
        expect("training.label_smoothing_factor", smoothing, 0 <= smoothing < 1, "in [0, 1)")
        for name in ("z_loss_coef", "router_aux_loss_coef", "router_z_loss_coef"):
            value = getattr(self, name)
            expect(f"training.{name}", value, value >= 0, "at least 0")
        scale = self.initial_loss_scale
        expect("training.initial_loss_scale", scale, 1 <= scale <= 2.0**24, "from 1 to 2^24")
        threshold = self.early_stopping_threshold
        expect("training.early_stopping_threshold", threshold, threshold >= 0, "at least 0")
        if self.quantization is not None:
            check_section("training.qat", self.quantization)
            start = self.quantization.start_step
            expect("training.qat.start_step", start, start >= 0, "at least 0")
        expect("training.seed", self.seed, 0 <= self.seed < 2**32, "in [0, 2^32)")

    @property
    def quantization(self) -> QATSettings | None:
        """`qat` as a section."""
        return NAMED[self.qat] if isinstance(self.qat, str) else self.qat
