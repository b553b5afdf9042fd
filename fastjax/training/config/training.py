"""The section `training`: length, batches, evaluation and numerics."""

from typing import Annotated, Literal

from annotated_types import Interval

from fastjax.limits import MAX_ROWS, MAX_STEPS
from fastjax.options import checked
from fastjax.options.kinds import Cadence, Count, NotNegative, Part, Positive, Seed
from fastjax.training.config.qat import NAMED, QATScheme, QATSettings

Rows = Annotated[int, Interval(ge=1, le=MAX_ROWS)]


@checked("training")
class TrainingSection:
    """Length, batches, evaluation and numerics of the training."""

    per_device_train_batch_size: Rows = 2
    """rows a device takes at once."""
    gradient_accumulation_steps: Rows = 1
    """such portions a step."""
    num_train_epochs: Positive = 1.0
    """passes over the data."""
    max_steps: Annotated[int, Interval(ge=1, le=MAX_STEPS)] | None = None
    """number of steps, in place of num_train_epochs."""
    per_device_eval_batch_size: Rows | None = None
    """rows a device takes at once in an evaluation; null: as in training."""
    eval_steps: Cadence | None = None
    """evaluate every so many steps; below 1: after such a share of the run's steps each time, rounded up; epoch: at the
    end of each; null: at the end only."""
    early_stopping_patience: Count | None = None
    """end after so many evaluations in a row that are no better than the best; null: never."""
    early_stopping_threshold: NotNegative = 0.0
    """how much lower than the best an evaluation's loss must be to be better, in nats."""
    group_by_length: bool = False
    """with data.packing: false: the rows of a step are of similar length, so that it computes less padding."""
    logging_steps: Count = 10
    """print a line every so many steps where the output is not a terminal."""
    accumulation_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """dtype in which the gradients of a step's portions are added up."""
    offload_optimizer: bool = False
    """hold AdamW's moments of matrices in the host's memory; the GPU fetches, updates and sends them back layer by
    layer. It is for full fine-tuning, where they are half of what the GPU holds."""
    initial_loss_scale: Annotated[float, Interval(ge=1, le=2**24)] = 65536.0
    """with model.dtype float16: the first factor of the loss."""
    loss_scale_window: Count = 1000
    """with float16: after so many steps without an overflow the scale doubles; an overflow halves it, and that step
    changes nothing."""
    label_smoothing_factor: Part = 0.0
    """share of the training loss that is the mean of −log p over the vocabulary (label smoothing); evaluations are
    plain cross-entropy."""
    z_loss_coef: NotNegative = 0.0
    """factor of the mean square of the logits' logsumexp, which is added to the training loss (z-loss)."""
    neftune_noise_alpha: Positive | None = None
    """magnitude of the noise on the embeddings in training (NEFTune); null: none."""
    router_aux_loss_coef: NotNegative = 0.0
    """of a mixture of experts: factor of the load-balancing loss that is added to the loss."""
    router_z_loss_coef: NotNegative = 0.0
    """of a mixture of experts: factor of the mean square of the router logits' logsumexp."""
    qat: QATScheme | QATSettings | None = None
    """quantisation-aware training: the layers' matrices have the values that they will decode to after quantisation, an
    adapter merged first; gradients pass straight through. A name: int4_weight_only (int4-32), int8_dynamic_int4
    (int4-32, inputs in int8), float8 (fp8-row, inputs in fp8), nvfp4, nf4, mxfp4, q4_0, q8_0; or a section with
    weights. null: none."""
    deterministic: bool = False
    """on a GPU, deterministic operations only, and kernels chosen once and kept beside the checkpoints: two equal runs
    are equal bit for bit. Slower. On a CPU they always are."""
    step_timeout: Positive | None = 3600.0
    """seconds that a step may take, compiling included, or a save, or a few batches of an evaluation, before the run
    ends with the stacks of its threads, as where another process hangs; null: for ever. The device has less for a step
    that others have come before: 300 s and ten times the slowest of the last 16."""
    seed: Seed = 3407
    """of the order of the rows and of dropout."""

    @property
    def quantization(self) -> QATSettings | None:
        """`qat` as a section."""
        return NAMED[self.qat] if isinstance(self.qat, str) else self.qat
