"""The train step: one pure function of (state, frozen weights, batch), jitted in one place.

The loss is a sum over the batch divided by its weight, such as the number of target tokens, both over all microbatches
and devices: accumulation, packing and data parallelism do not change it. A step whose loss or gradient is not finite
leaves the weights as they were, decided inside jit. Under float16 a gradient's is an overflow: the loss scale falls and
training goes on. Otherwise the state is halted: later steps, which the host may have dispatched already, change nothing
either.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Int, PRNGKeyArray

from convert.model.config import ModelConfig
from fastjax.data.batches import Batch
from fastjax.errors import ConfigError
from fastjax.execution import remat
from fastjax.execution.tensor_parts import held_apart
from fastjax.host_memory import in_host_memory
from fastjax.lora.params import Constant
from fastjax.models.layout import logical_axes
from fastjax.parallel import BATCH, MeshShape, batch_part, local, place, row_shardings
from fastjax.parallel.checks import check_exchange, check_rows
from fastjax.parallel.exchange import Feedback, exchange, no_feedback
from fastjax.parallel.gather import scattered
from fastjax.training.commit import finite_or_kept
from fastjax.training.health import squared_norms
from fastjax.training.loss import Loss, LossSums, Mean, loss_sums
from fastjax.training.loss_scale import LossScale
from fastjax.training.placement import state_shardings, sums_apart, weight_shardings

#: Label of places without target, as in PyTorch's and Hugging Face's losses.
IGNORED = -100
#: Metrics of a loss that are counts of tokens, not means.
COUNTS = ("num_targets", "num_correct")
#: XLA's options for a step. Its Triton products hide sums from cuBLAS, which adds a rank product to a large product as
#: it writes this one; and they take part in the autotuning, the longest part of compiling.
COMPILER_OPTIONS: Mapping[str, Any] = {"xla_gpu_enable_triton_gemm": False}
#: Metrics of a step beside those of its loss.
STEP_METRICS = ("loss", "grad_norm", "squared_norms", "finite", "updates", "loss_scale", "skipped_steps")


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
    trainable = jax.tree.map(jnp.copy, trainable)
    scale = None if initial_loss_scale is None else LossScale.start(initial_loss_scale)
    feedback = None if gradient_exchange == "float32" else no_feedback(trainable, replicas)
    step, halted = jnp.zeros((), jnp.int32), jnp.zeros((), bool)
    return TrainState(step, trainable, optimizer.init(trainable), jnp.copy(key), scale, halted, feedback)


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
        compiler_options: XLA's, for this step alone, beside `COMPILER_OPTIONS` and before them.

    Returns:
        The step. Its batch holds int32 [A, B, S] arrays, A the accumulation axis; `segment_ids` may be None where
        every row is one document, and `extra` fields are [A, B, …]. Metrics, on the device: loss (mean over the
        weight), the loss's own (num_targets and num_correct as sums, others as means), grad_norm
        (before clipping), squared_norms (float32 [n], in the order of `health.leaf_names`), finite, updates (made
        before this step), and with a loss scale loss_scale (that of this step) and skipped_steps (so far).
    """

    def mean(state: TrainState, frozen: Any, batch: Batch, targets: Array, total: Callable[[Any], Any]) -> Any:
        """Gradients of the step's loss, sums over the batch, and the loss's weight."""
        factor = None if state.loss_scale is None else state.loss_scale.scale
        gradient = _gradient(graphdef, trainable_filter, loss, state, frozen, targets, factor, quantize_from)
        grads, sums = _accumulate(gradient, batch, jnp.dtype(accumulation_dtype))
        sums, weight = total(sums), targets
        if factor is not None:
            grads = jax.tree.map(lambda g: g.astype(jnp.float32) / factor, grads)
        if sums.weight is not None:
            weight = jnp.where(sums.weight > 0, sums.weight, 1).astype(jnp.float32)
            grads = jax.tree.map(lambda g: (g.astype(jnp.float32) * (targets / weight)).astype(g.dtype), grads)
        return grads, sums, weight

    def apart(state: TrainState, frozen: Any, batch: Batch, targets: Array) -> Any:
        """The same and the feedback, each replica with its own rows until it sends its gradient."""
        if state.feedback is None and gradient_exchange != "float32":
            raise ValueError(f"state: expected feedback, of init_state with {gradient_exchange!r}, got none")

        def own(state: TrainState, kept: Feedback | None, frozen: Any, batch: Batch, targets: Array) -> Any:
            state = state._replace(key=jax.random.fold_in(state.key, batch_part()))
            grads, *sums = mean(state, frozen, batch, targets, lambda sums: jax.lax.psum(sums, BATCH))
            if kept is None:
                grads = jax.lax.psum(grads, BATCH)
            else:
                grads, kept = exchange(grads, kept, gradient_exchange, BATCH)
            return grads, *sums, kept

        whole, parts, shards = P(), P(BATCH), P()
        if mesh is not None and mesh.shape["fsdp"] > 1:
            config = nnx.merge(graphdef, state.trainable, frozen).config
            shards = jax.tree.map(lambda place: place.spec, weight_shardings(frozen, config, mesh))
        places = (whole, parts, shards, P(None, BATCH), whole), (whole, whole, whole, parts)
        island = local(own, *places, mesh=mesh)
        return island(state._replace(feedback=None), state.feedback, frozen, batch, targets)

    def step(state: TrainState, frozen: Any, batch: Batch) -> tuple[TrainState, dict[str, Array]]:
        targets = jnp.maximum(jnp.sum(batch.targets != IGNORED), 1).astype(jnp.float32)
        decoder, feedback = nnx.merge(graphdef, state.trainable, frozen), None
        if gradient_exchange == "float32" and not sum_once:
            grads, sums, weight = mean(state, frozen, batch, targets, lambda sums: sums)
        else:
            check_exchange(decoder.config, MeshShape() if mesh is None else MeshShape(**mesh.shape), gradient_exchange)
            for reason in sums_apart(state.trainable, frozen, decoder.config, mesh) if sum_once else ():
                raise ConfigError(f"sum_once: expected False {reason}, got True")
            grads, sums, weight, feedback = apart(state._replace(opt_state=None), frozen, batch, targets)
        norms = squared_norms(grads, decoder.plan)
        grad_norm = jnp.sqrt(jnp.sum(norms))
        finite = jnp.isfinite(sums.loss_sum) & jnp.isfinite(grad_norm) & ~state.halted
        # optax mixes Python floats with its integer counters
        with jax.numpy_dtype_promotion("standard"), jax.named_scope("optimizer"):
            # Of a state in the host's memory the optimizer keeps what a step that is not finite must not change.
            extra = {"finite": finite} if any(map(in_host_memory, jax.tree.leaves(state.opt_state))) else {}
            updates, opt_state = optimizer.update(grads, state.opt_state, state.trainable, **extra)
            trainable = optax.apply_updates(state.trainable, updates)
        updated = state._replace(step=state.step + 1, trainable=trainable, opt_state=opt_state, feedback=feedback)
        new_state = finite_or_kept(finite, updated, state)
        metrics = {
            **{name: _reported(name, value, weight) for name, value in sums.metrics.items()},
            "loss": sums.loss_sum / weight,
            "grad_norm": grad_norm,
            "squared_norms": norms,
            "finite": finite,
            "updates": state.step,
        }
        lost = jnp.asarray(True)
        if state.loss_scale is not None:
            scale = state.loss_scale.after(finite, loss_scale_window)
            new_state = new_state._replace(loss_scale=scale)
            # A smaller scale mends gradients; it is no part of the forward pass.
            lost = state.loss_scale.exhausted | ~jnp.isfinite(sums.loss_sum)
            metrics |= {"loss_scale": state.loss_scale.scale, "skipped_steps": scale.skipped_steps}
        return new_state._replace(halted=state.halted | (~finite & lost)), metrics

    return _on_mesh(
        step, graphdef, trainable_filter, mesh, compiler_options, donate=(0,) if donate else (), updates=True
    )


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

    return _on_mesh(evaluate, graphdef, trainable_filter, mesh, compiler_options, donate=(), updates=False)


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

    return _on_mesh(forward, graphdef, trainable_filter, mesh, compiler_options, donate=(), updates=False)


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
        gradient = _gradient(graphdef, trainable_filter, loss, state, frozen, jnp.float32(1.0), None)
        grads, sums = _accumulate(gradient, batch, jnp.dtype(jnp.float32))
        return sums.loss_sum, optax.tree.norm(grads)

    return _on_mesh(probe, graphdef, trainable_filter, mesh, None, donate=(), updates=False)


def _gradient(
    graphdef: nnx.GraphDef,
    trainable_filter: Any,
    loss: Loss,
    state: TrainState,
    frozen: Any,
    targets: Array,
    factor: Array | None,
    quantize_from: int = 0,
) -> Callable[[Array, Batch], tuple[Any, LossSums]]:
    """(number, rows) of a microbatch -> the gradient of `loss_sum / targets * factor`, and the sums."""
    key = jax.random.fold_in(state.key, state.step)

    def microbatch_loss(trainable: Any, number: Array, rows: Batch) -> tuple[Array, LossSums]:
        model = nnx.merge(graphdef, trainable, frozen)
        if quantize_from:
            model.quantizing = nnx.data(Constant(state.step >= quantize_from))
        sums = loss(model, trainable_filter, rows, key=jax.random.fold_in(key, number))
        mean = sums.loss_sum / targets
        return mean if factor is None else mean * factor, sums

    def gradient(number: Array, rows: Batch) -> tuple[Any, LossSums]:
        found, sums = jax.grad(microbatch_loss, has_aux=True)(state.trainable, number, rows)
        config = nnx.merge(graphdef, state.trainable, frozen).config
        return scattered(found, logical_axes(found, config)), sums

    return gradient


def _accumulate(gradient: Callable[..., tuple[Any, LossSums]], batch: Batch, dtype: jnp.dtype) -> tuple[Any, LossSums]:
    """Gradients and sums added over the accumulation axis; of several microbatches, gradients in `dtype`."""
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


def _reported(name: str, value: Array | Mean, weight: Array) -> Array:
    """A metric of the sums: a count, or the mean over its own weight or that of the loss."""
    if isinstance(value, Mean):
        return value.total / value.weight
    return value if name in COUNTS else value / weight


def _on_mesh(
    function: Callable[..., Any],
    graphdef: nnx.GraphDef,
    trainable_filter: Any,
    mesh: Mesh | None,
    compiler_options: Mapping[str, Any] | None,
    donate: tuple[int, ...],
    updates: bool,
) -> Callable[..., Any]:
    """Jit the function, which may be one that updates its state.

    On a mesh: rows over all devices, weights and state by the table (`placement`), other results replicated. What is
    returned has `shardings(state, frozen, batch)`, those of its arguments, and `trace`, which takes their shapes;
    `jitted` is the function, called in `jax.set_mesh`.
    """
    # Where every weight is trained, gradients take the link too, and an early start of the gathers does not help.
    gathers = (
        mesh is not None and max(mesh.shape["fsdp"], mesh.shape["tensor"]) > 1 and trainable_filter is not nnx.Param
    )
    options = {**COMPILER_OPTIONS, **remat.compiler_options(graphdef, gathers=gathers), **(compiler_options or {})}
    if mesh is None:
        return jax.jit(function, donate_argnums=donate, compiler_options=options)
    places: dict[Any, Any] = {}  # by the structure of the frozen weights, which splitting over tensor changes
    known: list[ModelConfig] = []
    shape = MeshShape(**mesh.shape)

    def config(state: Any, frozen: Any) -> ModelConfig:
        if not known:
            if any(map(in_host_memory, jax.tree.leaves(frozen))):
                raise ConfigError(
                    f"frozen: expected arrays in the memory of {mesh.size} devices, got some in the host's"
                )
            known.append(nnx.merge(graphdef, getattr(state, "trainable", state), frozen).config)
        return known[0]

    def apart(state: Any, frozen: Any) -> Any:
        return frozen if shape.tensor == 1 else held_apart(frozen, config(state, frozen), shape.tensor)

    def shardings(state: Any, frozen: Any, batch: Batch) -> tuple[Any, Any, Any]:
        structure = jax.tree.structure(frozen)
        if structure not in places:
            model = config(state, frozen)
            places[structure] = state_shardings(state, model, mesh), weight_shardings(frozen, model, mesh)
        return *places[structure], row_shardings(batch, mesh)

    def placed(state: Any, frozen: Any, batch: Batch) -> Any:
        places = shardings(state, frozen, batch)
        results = function(*jax.tree.map(jax.lax.with_sharding_constraint, (state, frozen, batch), places))
        found = jax.tree.map(lambda _: NamedSharding(mesh, P()), results)
        if updates:
            found = places[0], found[1]
        return jax.tree.map(jax.lax.with_sharding_constraint, results, found)

    jitted = jax.jit(placed, donate_argnums=donate, compiler_options=options)

    @functools.wraps(jitted)
    def call(state: Any, frozen: Any, batch: Batch) -> Any:
        check_rows(batch.tokens.shape[1], batch.tokens.shape[2], shape)
        # Placed before the call, not by it: a step compiled for a state on one device would be compiled again for its
        # own result.
        frozen = apart(state, frozen)
        arguments = place((state, frozen, batch), shardings(state, frozen, batch))
        with jax.set_mesh(mesh):
            return jitted(*arguments)

    def trace(state: Any, frozen: Any, batch: Batch) -> Any:
        check_rows(batch.tokens.shape[1], batch.tokens.shape[2], shape)
        arguments = (state, jax.eval_shape(lambda frozen: apart(state, frozen), frozen), batch)
        specs = jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            arguments,
            shardings(*arguments),
        )
        with jax.set_mesh(mesh):
            return jitted.trace(*specs)

    call.jitted, call.trace = jitted, trace  # pyright: ignore[reportAttributeAccessIssue]
    call.shardings = shardings  # pyright: ignore[reportAttributeAccessIssue]
    return call
