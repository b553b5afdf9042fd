"""The gradient of a step's loss: summed over microbatches and devices, divided once by the loss's weight."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from fastjax.data.batches import Batch
from fastjax.errors import ConfigError
from fastjax.lora.params import Constant
from fastjax.models.layout import logical_axes
from fastjax.parallel import BATCH, MeshShape, batch_part, local
from fastjax.parallel.checks import check_exchange
from fastjax.parallel.exchange import Feedback, exchange
from fastjax.parallel.gather import scattered
from fastjax.training.loss import Loss, LossSums, loss_sums
from fastjax.training.placement import sums_apart, weight_shardings


@dataclasses.dataclass(frozen=True)
class StepGradient:
    """The gradient of a batch by the trained arrays of a `TrainState`.

    Attributes:
        graphdef: of the decoder.
        trainable_filter: the nnx filter that split the decoder.
        loss: of a microbatch.
        accumulation_dtype: as for `make_train_step`, and so the others.
        mesh: of several devices; None: there is one.
        gradient_exchange: how gradients travel between replicas.
        sum_once: each device sums its gradient with the others' once.
        quantize_from: updates made before fake quantisers come into force.
    """

    graphdef: nnx.GraphDef
    trainable_filter: Any
    loss: Loss = loss_sums
    accumulation_dtype: Any = jnp.float32
    mesh: Mesh | None = None
    gradient_exchange: str = "float32"
    sum_once: bool = False
    quantize_from: int = 0

    def __call__(
        self, state: Any, frozen: Any, batch: Batch, targets: Array
    ) -> tuple[Any, LossSums, Array, Feedback | None]:
        """The gradient of the loss's mean, its sums over the batch, its weight, and the new feedback.

        Args:
            state: the TrainState.
            frozen: the frozen weights.
            batch: int32 [A, B, S] arrays.
            targets: tokens with a target in the batch, at least 1; float32 [].

        Raises:
            ConfigError: a mesh or a model that `gradient_exchange` or `sum_once` does not serve.
        """
        if self.gradient_exchange == "float32" and not self.sum_once:
            return *self._mean(state, frozen, batch, targets, lambda sums: sums), None
        config = nnx.merge(self.graphdef, state.trainable, frozen).config
        shape = MeshShape() if self.mesh is None else MeshShape(**self.mesh.shape)
        check_exchange(config, shape, self.gradient_exchange)
        for reason in sums_apart(state.trainable, frozen, config, self.mesh) if self.sum_once else ():
            raise ConfigError(f"sum_once: expected False {reason}, got True")
        return self._apart(state._replace(opt_state=None), frozen, batch, targets)

    def _mean(self, state: Any, frozen: Any, batch: Batch, targets: Array, total: Callable[[Any], Any]) -> Any:
        """Gradient, sums and weight, of the rows here; `total` adds up the sums of all devices."""
        factor = None if state.loss_scale is None else state.loss_scale.scale
        gradient = self.of_microbatch(state, frozen, targets, factor)
        grads, sums = accumulate(gradient, batch, jnp.dtype(self.accumulation_dtype))
        sums, weight = total(sums), targets
        if factor is not None:
            grads = jax.tree.map(lambda g: g.astype(jnp.float32) / factor, grads)
        if sums.weight is not None:
            weight = jnp.where(sums.weight > 0, sums.weight, 1).astype(jnp.float32)
            grads = jax.tree.map(lambda g: (g.astype(jnp.float32) * (targets / weight)).astype(g.dtype), grads)
        return grads, sums, weight

    def _apart(self, state: Any, frozen: Any, batch: Batch, targets: Array) -> Any:
        """The result of `_mean` and the feedback; each replica takes its own rows and then sends its gradient."""
        if state.feedback is None and self.gradient_exchange != "float32":
            raise ValueError(f"state: expected feedback, of init_state with {self.gradient_exchange!r}, got none")

        def of_replica(state: Any, feedback: Feedback | None, frozen: Any, batch: Batch, targets: Array) -> Any:
            state = state._replace(key=jax.random.fold_in(state.key, batch_part()))
            grads, *sums = self._mean(state, frozen, batch, targets, lambda sums: jax.lax.psum(sums, BATCH))
            if feedback is None:
                grads = jax.lax.psum(grads, BATCH)
            else:
                grads, feedback = exchange(grads, feedback, self.gradient_exchange, BATCH)
            return grads, *sums, feedback

        whole, parts, shards = P(), P(BATCH), P()
        if self.mesh is not None and self.mesh.shape["fsdp"] > 1:
            config = nnx.merge(self.graphdef, state.trainable, frozen).config
            shards = jax.tree.map(lambda place: place.spec, weight_shardings(frozen, config, self.mesh))
        places = (whole, parts, shards, P(None, BATCH), whole), (whole, whole, whole, parts)
        # An island: gradients are summed where they are sent, and not layer by layer beside the backward pass.
        island = local(of_replica, *places)
        return island(state._replace(feedback=None), state.feedback, frozen, batch, targets)

    def of_microbatch(
        self, state: Any, frozen: Any, targets: Array, factor: Array | None
    ) -> Callable[[Array, Batch], tuple[Any, LossSums]]:
        """The function (number, rows) of a microbatch -> the gradient of `loss_sum / targets * factor`, and the sums.

        Args:
            state: the TrainState.
            frozen: the frozen weights.
            targets: float32 [].
            factor: of the loss, float32 []; None: 1.
        """
        key = jax.random.fold_in(state.key, state.step)

        def microbatch_loss(trainable: Any, number: Array, rows: Batch) -> tuple[Array, LossSums]:
            model = nnx.merge(self.graphdef, trainable, frozen)
            if self.quantize_from:
                model.quantizing = nnx.data(Constant(state.step >= self.quantize_from))
            sums = self.loss(model, self.trainable_filter, rows, key=jax.random.fold_in(key, number))
            mean = sums.loss_sum / targets
            return mean if factor is None else mean * factor, sums

        def gradient(number: Array, rows: Batch) -> tuple[Any, LossSums]:
            grads, sums = jax.grad(microbatch_loss, has_aux=True)(state.trainable, number, rows)
            config = nnx.merge(self.graphdef, state.trainable, frozen).config
            return scattered(grads, logical_axes(grads, config)), sums

        return gradient


def accumulate(gradient: Callable[..., tuple[Any, LossSums]], batch: Batch, dtype: jnp.dtype) -> tuple[Any, LossSums]:
    """Gradients and sums added over the accumulation axis; of several microbatches, gradients in `dtype`.

    Args:
        gradient: of `StepGradient.of_microbatch`.
        batch: [A, B, S] arrays.
        dtype: of the sum of the gradients.
    """
    count = batch.tokens.shape[0]
    if count == 1:
        return gradient(jnp.int32(0), jax.tree.map(lambda array: array[0], batch))

    def body(total: Any, xs: tuple[Array, Batch]) -> tuple[Any, None]:
        return jax.tree.map(lambda t, new: t + new.astype(t.dtype), total, gradient(*xs)), None

    numbers = jnp.arange(count, dtype=jnp.int32)
    shapes = jax.eval_shape(gradient, numbers[0], jax.tree.map(lambda array: array[0], batch))
    gradients, sums = shapes
    zero = (
        jax.tree.map(lambda s: jnp.zeros(s.shape, dtype), gradients),
        jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), sums),
    )
    return jax.lax.scan(body, zero, (numbers, batch))[0]
