"""The train step: one pure function of (state, frozen weights, batch), jitted in one place.

The loss is a sum over the batch divided by its weight, such as the number of target tokens, both over all microbatches
and devices: accumulation, packing and data parallelism do not change it. A step whose loss or gradient is not finite
leaves the weights as they were, decided inside jit. Under float16 a gradient's is an overflow: the loss scale falls and
training goes on. Otherwise the state is halted: later steps, which the host may have dispatched already, change nothing
either.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Int, PRNGKeyArray

from fastjax.data.batches import Batch
from fastjax.host_memory import in_host_memory
from fastjax.parallel.exchange import Feedback, no_feedback
from fastjax.training.commit import finite_or_kept
from fastjax.training.compiled import jitted
from fastjax.training.gradients import StepGradient, accumulate
from fastjax.training.health import squared_norms
from fastjax.training.loss import Loss, LossSums, Mean, loss_sums
from fastjax.training.loss_scale import LossScale
from fastjax.training.optimizers.schedules import rate_in_state

#: Label of places without target, as in PyTorch's and Hugging Face's losses.
IGNORED = -100
#: Metrics of a loss that are counts of tokens, not means.
COUNTS = ("num_targets", "num_correct")
#: Metrics of a step beside those of its loss.
STEP_METRICS = ("loss", "grad_norm", "squared_norms", "finite", "learning_rate", "loss_scale", "skipped_steps")


class TrainState(NamedTuple):
    """The state that a step changes.

    Attributes:
        step: updates made; int32 [].
        trainable: the trained arrays.
        opt_state: the optimizer's.
        key: random state of dropout; a step draws from it by its number.
        loss_scale: under float16, else None.
        halted: a step was not finite; later ones change nothing; bool [].
        feedback: what the exchange of gradients has rounded off, replica by replica; None in float32.
    """

    step: Int[Array, ""]
    trainable: Any
    opt_state: Any
    key: PRNGKeyArray
    loss_scale: LossScale | None
    halted: Bool[Array, ""]
    feedback: Feedback | None = None


def init_state(
    trainable: Any,
    optimizer: optax.GradientTransformation,
    key: PRNGKeyArray,
    initial_loss_scale: float | None = None,
    *,
    gradient_exchange: str = "float32",
    replicas: int = 1,
) -> TrainState:
    """The state before the first step.

    The arrays are copied, since the step donates its state.

    Args:
        trainable: the trained arrays.
        optimizer: initialises its state for them.
        key: random state of dropout.
        initial_loss_scale: for float16; None: the loss is not scaled.
        gradient_exchange: as for `make_train_step`.
        replicas: that exchange gradients.
    """
    trainable = _copies(trainable)
    scale = None if initial_loss_scale is None else LossScale.start(initial_loss_scale)
    feedback = None if gradient_exchange == "float32" else no_feedback(trainable, replicas)
    step, halted = jnp.zeros((), jnp.int32), jnp.zeros((), bool)
    return TrainState(step, trainable, optimizer.init(trainable), jnp.copy(key), scale, halted, feedback)


@jax.jit
def _copies(arrays: Any) -> Any:
    return jax.tree.map(jnp.copy, arrays)


def make_train_step(
    graphdef: nnx.GraphDef,
    optimizer: optax.GradientTransformation,
    trainable_filter: Any,
    *,
    loss: Loss = loss_sums,
    accumulation_dtype: Any = jnp.float32,
    loss_scale_window: int = 1000,
    donate: bool = True,
    mesh: Mesh | None = None,
    gradient_exchange: str = "float32",
    sum_once: bool = False,
    quantize_from: int = 0,
    learning_rates: np.ndarray | None = None,
    compiler_options: Mapping[str, Any] | None = None,
) -> Callable[[TrainState, Any, Batch], tuple[TrainState, dict[str, Array]]]:
    """Build the jitted step (state, frozen, batch) -> (state, metrics).

    Args:
        graphdef: of the decoder, from `nnx.split(model, trainable_filter, ...)`.
        optimizer: any optax transformation; its updates are added to the trainable arrays.
        trainable_filter: the nnx filter that split the decoder.
        loss: of a microbatch; see `training.loss.Loss`.
        accumulation_dtype: of the sum of the microbatches' gradients.
        loss_scale_window: steps without overflow after which a loss scale doubles.
        donate: reuse the state's memory; the state passed in becomes invalid.
        mesh: spread the batch over these devices (`parallel.make_mesh`). Frozen weights elsewhere are sent to them in
            every step: place them once with `parallel.shard_frozen`.
        gradient_exchange: how gradients travel between replicas, a key of `parallel.exchange.FORMATS`.
        sum_once: each device takes the gradient of its own rows and sums it with the others' once, behind the backward
            pass, where a scan over the layers would sum each layer's beside the next one's products. For adapters on
            meshes of `data` and `fsdp` (`training.placement.sums_apart` says what is refused), and losses that are
            sums over rows, without noise. With `fsdp` a device reads the others' shards of frozen weights where it can
            (`pallas_kernels.shard_gather`); the checkpointing policy "none" keeps what is gathered.
        quantize_from: updates made before fake quantisers (`models.quantized`) come into force, in the same program.
        learning_rates: by the number of updates made before, for the metrics; None: those in the optimizer's state, or
            none.
        compiler_options: XLA's, for this step alone, beside `COMPILER_OPTIONS` and before them.

    Returns:
        The step. Its batch holds int32 [A, B, S] arrays, A the accumulation axis; `segment_ids` may be None where
        every row is one document, and `extra` fields are [A, B, …]. Metrics, on the device: loss (mean over the
        weight), the loss's own (num_targets and num_correct as sums, others as means), grad_norm
        (before clipping), squared_norms (float32 [n], in the order of `health.leaf_names`), finite,
        learning_rate (of this step, where it is known), and with a loss scale loss_scale (that of this step) and
        skipped_steps (so far).
    """
    gradient = StepGradient(
        graphdef, trainable_filter, loss, accumulation_dtype, mesh, gradient_exchange, sum_once, quantize_from
    )

    def step(state: TrainState, frozen: Any, batch: Batch) -> tuple[TrainState, dict[str, Array]]:
        taken, metrics = _take(state, frozen, batch, gradient, optimizer, loss_scale_window)
        if learning_rates is not None:
            rates = jnp.asarray(learning_rates)
            metrics["learning_rate"] = jax.lax.dynamic_index_in_dim(rates, state.step, keepdims=False)
        return taken, metrics

    return jitted(step, graphdef, trainable_filter, mesh, compiler_options, updates=True, donate=donate)


def _take(
    state: TrainState,
    frozen: Any,
    batch: Batch,
    gradient: StepGradient,
    optimizer: optax.GradientTransformation,
    loss_scale_window: int,
) -> tuple[TrainState, dict[str, Array]]:
    """The state after a step, which is the one before where the step is not finite, and the step's metrics."""
    targets = jnp.maximum(jnp.sum(batch.targets != IGNORED), 1).astype(jnp.float32)
    grads, sums, weight, feedback = gradient(state, frozen, batch, targets)
    norms = squared_norms(grads, nnx.merge(gradient.graphdef, state.trainable, frozen).plan)
    grad_norm = jnp.sqrt(jnp.sum(norms))
    finite = jnp.isfinite(sums.loss_sum) & jnp.isfinite(grad_norm) & ~state.halted
    new_state = finite_or_kept(finite, _updated(state, optimizer, grads, finite, feedback), state)
    metrics = {
        **{name: _reported(name, value, weight) for name, value in sums.metrics.items()},
        "loss": sums.loss_sum / weight,
        "grad_norm": grad_norm,
        "squared_norms": norms,
        "finite": finite,
    }
    if (rate := rate_in_state(state.opt_state, state.step)) is not None:
        metrics["learning_rate"] = rate
    lost = jnp.asarray(True)
    if state.loss_scale is not None:
        scale = state.loss_scale.after(finite, loss_scale_window)
        new_state = new_state._replace(loss_scale=scale)
        # A smaller scale mends gradients; it is no part of the forward pass.
        lost = state.loss_scale.exhausted | ~jnp.isfinite(sums.loss_sum)
        metrics |= {"loss_scale": state.loss_scale.scale, "skipped_steps": scale.skipped_steps}
    return new_state._replace(halted=state.halted | (~finite & lost)), metrics


def _updated(
    state: TrainState,
    optimizer: optax.GradientTransformation,
    grads: Any,
    finite: Bool[Array, ""],
    feedback: Feedback | None,
) -> TrainState:
    """The state after the optimizer's update, finite or not."""
    # optax mixes Python floats with its integer counters
    with jax.numpy_dtype_promotion("standard"), jax.named_scope("optimizer"):
        # Of a state in the host's memory the optimizer keeps what a step that is not finite must not change.
        extra = {"finite": finite} if any(map(in_host_memory, jax.tree.leaves(state.opt_state))) else {}
        updates, opt_state = optimizer.update(grads, state.opt_state, state.trainable, **extra)
        trainable = optax.apply_updates(state.trainable, updates)
    return state._replace(step=state.step + 1, trainable=trainable, opt_state=opt_state, feedback=feedback)


def make_eval_step(
    graphdef: nnx.GraphDef,
    trainable_filter: Any,
    *,
    loss: Loss = loss_sums,
    mesh: Mesh | None = None,
    compiler_options: Mapping[str, Any] | None = None,
) -> Callable[[Any, Any, Batch], LossSums]:
    """Build the jitted evaluation (trainable, frozen, batch) -> sums over the batch, without dropout.

    Args:
        graphdef: of the decoder.
        trainable_filter: the nnx filter that split the decoder.
        loss: as for `make_train_step`.
        mesh: as for `make_train_step`.
        compiler_options: as for `make_train_step`.
    """

    def evaluate(trainable: Any, frozen: Any, batch: Batch) -> LossSums:
        def one(rows: Batch) -> LossSums:
            return loss(nnx.merge(graphdef, trainable, frozen), trainable_filter, rows, key=None)

        return jax.tree.map(lambda sums: sums.sum(0), jax.lax.map(one, batch))

    return jitted(evaluate, graphdef, trainable_filter, mesh, compiler_options)


def make_forward(
    graphdef: nnx.GraphDef,
    trainable_filter: Any,
    function: Callable[..., Any],
    *,
    mesh: Mesh | None = None,
    compiler_options: Mapping[str, Any] | None = None,
) -> Callable[[Any, Any, Batch], Any]:
    """Build the jitted (trainable, frozen, batch) -> a function's arrays, whole on every device.

    Args:
        graphdef: of the decoder.
        trainable_filter: the nnx filter that split the decoder.
        function: (model, trainable_filter, rows) -> arrays; of a microbatch.
        mesh: as for `make_train_step`.
        compiler_options: as for `make_train_step`.
    """

    def forward(trainable: Any, frozen: Any, batch: Batch) -> Any:
        return jax.lax.map(lambda rows: function(nnx.merge(graphdef, trainable, frozen), trainable_filter, rows), batch)

    return jitted(forward, graphdef, trainable_filter, mesh, compiler_options)


def make_probe(
    graphdef: nnx.GraphDef, trainable_filter: Any, *, loss: Loss = loss_sums, mesh: Mesh | None = None
) -> Callable[[TrainState, Any, Batch], tuple[Array, Array]]:
    """Build the jitted (state, frozen, batch) -> (loss sum, gradient norm), which finds the rows that break a step.

    Args:
        graphdef: of the decoder.
        trainable_filter: the nnx filter that split the decoder.
        loss: as for `make_train_step`.
        mesh: as for `make_train_step`.
    """

    def probe(state: TrainState, frozen: Any, batch: Batch) -> tuple[Array, Array]:
        gradient = StepGradient(graphdef, trainable_filter, loss).of_microbatch(state, frozen, jnp.float32(1.0), None)
        grads, sums = accumulate(gradient, batch, jnp.dtype(jnp.float32))
        return sums.loss_sum, optax.tree.norm(grads)

    return jitted(probe, graphdef, trainable_filter, mesh, None)


def _reported(name: str, value: Array | Mean, weight: Array) -> Array:
    """A metric of the sums: a count, or the mean over its own weight or that of the loss."""
    if isinstance(value, Mean):
        return value.total / value.weight
    return value if name in COUNTS else value / weight
