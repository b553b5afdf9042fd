"""The train step: one pure function of (state, frozen weights, batch), jitted in one place.

The loss is the sum over target tokens divided by their number in the whole batch, over all microbatches and devices:
accumulation, packing and data parallelism do not change it. A step whose loss or gradient is not finite leaves the
state as it was, decided inside jit.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, PRNGKeyArray

from fastjax.data.batches import Batch
from fastjax.errors import ConfigError
from fastjax.parallel import batch_sharding, shard_frozen
from fastjax.training.loss import LossSums, loss_sums

#: Places that carry no target, as in PyTorch's and Hugging Face's losses.
IGNORED = -100


class TrainState(NamedTuple):
    """Everything that a step changes.

    Attributes:
        step: updates made; int32 [].
        trainable: the trained arrays.
        opt_state: the optimizer's.
        key: random state of dropout; a step draws from it by its number.
        loss_scale: float32 [] under float16, else None.
    """

    step: Int[Array, ""]
    trainable: Any
    opt_state: Any
    key: PRNGKeyArray
    loss_scale: Float[Array, ""] | None


def init_state(trainable: Any, optimizer: optax.GradientTransformation, key: PRNGKeyArray) -> TrainState:
    """The state before the first step.

    The arrays are copied: the step donates its state, and the caller keeps what it passed in.

    Args:
        trainable: the arrays to train.
        optimizer: makes the optimizer's state for them.
        key: random state of dropout.
    """
    trainable = jax.tree.map(jnp.copy, trainable)
    return TrainState(jnp.zeros((), jnp.int32), trainable, optimizer.init(trainable), jnp.copy(key), None)


def make_train_step(
    graphdef: nnx.GraphDef,
    optimizer: optax.GradientTransformation,
    trainable_filter: Any,
    *,
    chunk_size: int | None = None,
    donate: bool = True,
    mesh: Mesh | None = None,
) -> Callable[[TrainState, Any, Batch], tuple[TrainState, dict[str, Array]]]:
    """Build the jitted step (state, frozen, batch) -> (state, metrics).

    Args:
        graphdef: of the decoder, from `nnx.split(model, trainable_filter, ...)`.
        optimizer: any optax transformation; its updates are added to the trainable arrays.
        trainable_filter: the nnx filter that split the decoder.
        chunk_size: sequence places whose logits exist at once (None: by the size of the vocabulary).
        donate: reuse the state's memory; the state passed in is gone afterwards.
        mesh: spread the batch over these devices (`parallel.make_mesh`). Frozen weights that lie elsewhere are sent
            to them in every step: place them once, `jax.device_put(frozen, shard_frozen(frozen, mesh))`.

    Returns:
        The step. Its batch holds int32 [A, B, S] arrays, A the accumulation axis; `segment_ids` may be None where
        every row is one document. Metrics, all scalars on the device: loss (mean over target tokens), num_targets,
        num_correct, grad_norm (before clipping), finite.
    """

    def step(state: TrainState, frozen: Any, batch: Batch) -> tuple[TrainState, dict[str, Array]]:
        targets = jnp.maximum(jnp.sum(batch.targets != IGNORED), 1).astype(jnp.float32)
        key = jax.random.fold_in(state.key, state.step)

        def microbatch_loss(trainable: Any, number: Array, rows: Any) -> tuple[Array, LossSums]:
            model = nnx.merge(graphdef, trainable, frozen)
            sums = loss_sums(
                model,
                trainable_filter,
                rows.tokens,
                rows.targets,
                rows.positions,
                rows.segment_ids,
                key=jax.random.fold_in(key, number),
                chunk_size=chunk_size,
            )
            return sums.loss_sum / targets, sums

        gradient = jax.grad(microbatch_loss, has_aux=True)
        grads, sums = _accumulate(functools.partial(gradient, state.trainable), batch)
        grad_norm = optax.tree.norm(grads)
        with jax.numpy_dtype_promotion("standard"):  # optax mixes Python floats with its integer counters
            updates, opt_state = optimizer.update(grads, state.opt_state, state.trainable)
            trainable = optax.apply_updates(state.trainable, updates)
        updated = TrainState(state.step + 1, trainable, opt_state, state.key, state.loss_scale)
        finite = jnp.isfinite(sums.loss_sum) & jnp.isfinite(grad_norm)
        new_state = jax.tree.map(lambda new, old: jnp.where(finite, new, old), updated, state)
        metrics = {
            "loss": sums.loss_sum / targets,
            "num_targets": sums.num_targets,
            "num_correct": sums.num_correct,
            "grad_norm": grad_norm,
            "finite": finite,
        }
        return new_state, metrics

    return _on_mesh(step, mesh, donate=(0,) if donate else ())


def make_eval_step(
    graphdef: nnx.GraphDef, trainable_filter: Any, *, chunk_size: int | None = None, mesh: Mesh | None = None
) -> Callable[[Any, Any, Batch], LossSums]:
    """Build the jitted evaluation (trainable, frozen, batch) -> sums over the batch's target tokens, without dropout.

    Args:
        graphdef: of the decoder.
        trainable_filter: the nnx filter that split the decoder.
        chunk_size: as for `make_train_step`.
        mesh: as for `make_train_step`.
    """

    def evaluate(trainable: Any, frozen: Any, batch: Batch) -> LossSums:
        def one(rows: Any) -> LossSums:
            model = nnx.merge(graphdef, trainable, frozen)
            return loss_sums(
                model,
                trainable_filter,
                rows.tokens,
                rows.targets,
                rows.positions,
                rows.segment_ids,
                key=None,
                chunk_size=chunk_size,
            )

        return jax.tree.map(lambda sums: sums.sum(0), jax.lax.map(one, batch))

    return _on_mesh(evaluate, mesh, donate=())


def _accumulate(gradient: Callable[..., tuple[Any, LossSums]], batch: Batch) -> tuple[Any, LossSums]:
    """Gradients and sums added over the accumulation axis, in float32 and in the dtype of the parameters."""
    count = batch.tokens.shape[0]
    if count == 1:
        return gradient(jnp.int32(0), jax.tree.map(lambda array: array[0], batch))

    def body(total: Any, xs: tuple[Array, Batch]) -> tuple[Any, None]:
        return jax.tree.map(lambda t, new: t + new.astype(t.dtype), total, gradient(*xs)), None

    numbers = jnp.arange(count, dtype=jnp.int32)
    shapes = jax.eval_shape(gradient, numbers[0], jax.tree.map(lambda array: array[0], batch))
    dtypes = jax.tree.map(lambda s: jnp.float32 if jnp.issubdtype(s.dtype, jnp.floating) else s.dtype, shapes)
    zero = jax.tree.map(lambda s, dtype: jnp.zeros(s.shape, dtype), shapes, dtypes)
    total, _ = jax.lax.scan(body, zero, (numbers, batch))
    return jax.tree.map(lambda t, s: t.astype(s.dtype), total, shapes)


def _on_mesh(function: Callable[..., Any], mesh: Mesh | None, donate: tuple[int, ...]) -> Callable[..., Any]:
    """The function jitted; on a mesh: rows over all devices, frozen weights by the table, the rest repeated."""
    if mesh is None:
        return jax.jit(function, donate_argnums=donate)
    whole = NamedSharding(mesh, P())
    rows = batch_sharding(mesh)

    def placed(state: Any, frozen: Any, batch: Batch) -> Any:
        frozen = jax.tree.map(jax.lax.with_sharding_constraint, frozen, shard_frozen(frozen, mesh))
        batch = jax.tree.map(lambda array: jax.lax.with_sharding_constraint(array, rows), batch)
        return function(state, frozen, batch)

    jitted = jax.jit(placed, donate_argnums=donate, out_shardings=whole)

    @functools.wraps(jitted)
    def call(state: Any, frozen: Any, batch: Batch) -> Any:
        count = batch.tokens.shape[1]
        if count % mesh.size:
            raise ConfigError(
                f"batch: expected a multiple of the mesh's {mesh.size} devices in rows a microbatch, given {count}"
            )
        # Placed before the call, not by it: a step compiled for a state that lies on one device would be compiled
        # again for the state that it returns.
        state = jax.device_put(state, whole)
        frozen = jax.device_put(frozen, shard_frozen(frozen, mesh))
        with jax.set_mesh(mesh):
            return jitted(state, frozen, jax.device_put(batch, rows))

    call.jitted = jitted  # pyright: ignore[reportAttributeAccessIssue]
    return call
