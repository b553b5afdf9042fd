"""The step beside a reference: the model's first layers in plain XLA operations, every sum in float32.

A measured step computes what the reference computes, but in 16 bits and by other kernels. How far 16 bits alone lead
astray depends on the model (a mixture's router chooses other experts where scores are near), so it is measured: the
plain operations once more in bfloat16, every intermediate result rounded. Kernels round other intermediate results, in
another order: they may be off by three times as much (by a quarter more where products are in float8). Loss and the
gradient of every trained array of each layer are compared, since the loss alone, of random weights, is near the
logarithm of the vocabulary whatever the layers compute. An adapter's B starts at zero, which leaves A without a
gradient: here it starts small. The reference keeps everything for the backward pass and calls its layers one by one, on
one device, of as many rows as a step of several.
"""

import dataclasses
import re
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

from fastjax.bench.step.build import build_model, filled, first_state, make_batch, placed
from fastjax.bench.step.case import ROUNDING, StepCase
from fastjax.bench.step.mesh import open_case_mesh
from fastjax.bench.step.small import reference_step
from fastjax.data.batches import Batch
from fastjax.errors import TrainingError
from fastjax.execution.stacks import layer_of
from fastjax.language_model.model import LanguageModel
from fastjax.models.layout import LayerStack
from fastjax.models.leaves import LORA_B, leaf_at
from fastjax.planning.work import plain_path
from fastjax.runs.steps import sums_once
from fastjax.training.health import leaf_names, squared_norms
from fastjax.training.step import make_train_step
from pallas_kernels.attention import attention_implementation

#: Times the error of the plain operations in bfloat16.
_FACTOR = 3.0
#: Times their error with products in float8: its rounding, the same in both, is nearly all of it.
_FACTOR_IN_FLOAT8 = 1.25
_BFLOAT16_ROUNDING = 2.0**-9
_B_DEVIATION = 0.02
#: Keeps the gradients as its state and changes nothing.
_RECORDER = optax.GradientTransformation(
    lambda params: jax.tree.map(jnp.zeros_like, params),
    lambda updates, state, params=None: (jax.tree.map(jnp.zeros_like, updates), updates),  # pyright: ignore[reportArgumentType]
)


class _Outcome(NamedTuple):
    """Of one step: the loss, and the gradients as the trained arrays lie where each layer is by itself."""

    loss: float
    gradients: Any


class Reference(NamedTuple):
    """What small steps are compared with.

    Attributes:
        exact: the plain operations in float32.
        names: of the gradients' arrays.
        norms: theirs, squared; float32 [n].
        rounded: errors of the plain operations in bfloat16, by name, and of their loss.
        factor: times these errors that a step may be off.
    """

    exact: _Outcome
    names: Sequence[str]
    norms: np.ndarray
    rounded: Mapping[str, float]
    factor: float

    def errors(self, outcome: _Outcome) -> dict[str, float]:
        """The relative errors of a step's loss and gradients, by name.

        Args:
            outcome: of the step.
        """
        exact = self.exact
        off = jax.tree.map(lambda ours, theirs: ours.astype(jnp.float32) - theirs, outcome.gradients, exact.gradients)
        relative = np.sqrt(np.asarray(squared_norms(off, _alone(len(off["layers"])))) / self.norms)
        return {"loss": abs(outcome.loss / exact.loss - 1)} | dict(zip(self.names, relative.tolist(), strict=True))


def make_reference(small: StepCase) -> Reference:
    """The reference of a small step, and of every other one with the same `small.reference_step`.

    Args:
        small: of `small.small_step`.

    Raises:
        ConfigError: settings that the model does not take.
        TrainingError: a loss or gradient of the reference that is zero or not finite.
    """
    case, documents = filled(dataclasses.replace(reference_step(small), dtype="bfloat16"))
    model = _with_gradients(build_model(case))
    batch = make_batch(case, model.config.vocab_size, documents)
    with plain_path():
        exact = _step(_in_dtype(model.with_checkpointing("none"), "float32"), batch, {})
        rounded = _step(model, batch, {"xla_allow_excess_precision": False})
    names, norms = leaf_names(model.trainable, model.plan), np.asarray(squared_norms(exact.gradients, model.plan))
    if dead := [name for name, norm in zip(names, norms, strict=True) if not norm > 0]:
        raise TrainingError(f"the reference has no gradient of {', '.join(dead)}")
    factor = _FACTOR if model.precision.base_compute is None else _FACTOR_IN_FLOAT8
    found = Reference(exact, names, norms, {}, factor)
    return found._replace(rounded=found.errors(rounded))


def fault_of(small: StepCase, reference: Reference) -> str | None:
    """Compare a small step with its reference.

    Args:
        small: of `small.small_step`.
        reference: its own.

    Returns:
        What is wrong; None: nothing.

    Raises:
        ConfigError: settings that the model does not take.
        TrainingError: its loss or a gradient is not finite.
    """
    mesh, (case, documents) = open_case_mesh(small), filled(small)
    dtype = case.dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
    near = dataclasses.replace(case, dtype="bfloat16", offload_embedding=False, offload_layers=False)
    model = placed(_in_dtype(_with_gradients(build_model(near)), dtype), case)
    with attention_implementation(case.attention):
        found = _step(model, make_batch(case, model.config.vocab_size, documents), case.options, mesh)
    return judged(found, reference, dtype)


def judged(found: _Outcome, reference: Reference, dtype: str) -> str | None:
    """What is wrong with a step's loss and gradients; None: nothing.

    Args:
        found: the step's.
        reference: of the step.
        dtype: of the step.
    """
    bounds, off = _bounds(reference.rounded, dtype, reference.factor), reference.errors(found)
    if vague := [name for name, bound in bounds.items() if not bound < 1]:
        return f"rounding to {dtype} alone makes another gradient of {', '.join(vague)}: it cannot be compared"
    wrong = [f"{name} by {off[name]:.1e} of {bound:.1e}" for name, bound in bounds.items() if not off[name] <= bound]
    shown = ", ".join(wrong[:5]) + (f" and {len(wrong) - 5} more" if len(wrong) > 5 else "")
    return f"the first step is off the reference, more than rounding allows: {shown}" if wrong else None


def _with_gradients(model: LanguageModel) -> LanguageModel:
    """The model with every B drawn, so small that the adapters change little of what the base computes.

    A layer's B follows from its name, so that it is the same however the layers lie.
    """
    names = iter(leaf_names(model.trainable, model.plan))

    def drawn(path: Any, leaf: jax.Array) -> jax.Array:
        place = leaf_at(path)
        stacked = place.stack is not None and model.plan[place.stack].count > 1
        own = [next(names) for _ in range(leaf.shape[0] if stacked else 1)]
        if place.kind not in LORA_B:
            return leaf
        shape = leaf.shape[1:] if stacked else leaf.shape
        found = [jax.random.normal(jax.random.key(zlib.crc32(name.encode())), shape) for name in own]
        return (_B_DEVIATION * (jnp.stack(found) if stacked else found[0])).astype(leaf.dtype)

    return model.replace(trainable=jax.tree_util.tree_map_with_path(drawn, model.trainable))


def _in_dtype(model: LanguageModel, dtype: str) -> LanguageModel:
    """A bfloat16 model computed in another dtype from the same values; trained arrays are float32 with float32."""
    if dtype == "bfloat16":
        return model
    decoder = model.module()
    decoder.precision = precision = dataclasses.replace(model.precision, dtype=jnp.dtype(dtype))
    graphdef, trainable, frozen = nnx.split(decoder, model.trainable_filter, ...)

    def cast(tree: Any, to: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf.astype(to) if leaf.dtype == jnp.bfloat16 else leaf, tree)

    trained = nnx.to_pure_dict(trainable)
    return model.replace(
        graphdef=graphdef,
        trainable=cast(trained, jnp.float32) if dtype == "float32" else trained,
        frozen=cast(nnx.to_pure_dict(frozen), dtype),
        precision=precision,
    )


def _step(model: LanguageModel, batch: Batch, options: Mapping[str, Any], mesh: Mesh | None = None) -> _Outcome:
    placing = {"mesh": mesh, "sum_once": sums_once(model, mesh)}
    step = make_train_step(model.graphdef, _RECORDER, model.trainable_filter, compiler_options=options, **placing)
    state, metrics = step(first_state(model, _RECORDER), model.frozen, batch)
    if not metrics["finite"]:
        raise TrainingError(
            f"the first step in {model.dtype}: loss {float(metrics['loss']):g}, or a gradient not finite"
        )
    gradients = jax.device_put(state.opt_state, jax.devices()[0])
    return _Outcome(float(metrics["loss"]), _by_layer(gradients, model.plan))


def _by_layer(tree: Any, plan: Sequence[LayerStack]) -> Any:
    """Arrays as the trained ones, with each layer by itself."""
    runs = [[tree["layers"][number][place] for place in range(run.period)] for number, run in enumerate(plan)]
    count = sum(run.period * run.count for run in plan)
    return {**tree, "layers": {index: {0: layer_of(runs, plan, index)} for index in range(count)}}


def _alone(layers: int) -> tuple[LayerStack, ...]:
    """The plan of layers that are called one by one."""
    return tuple(LayerStack(index, 1, 1) for index in range(layers))


def _bounds(rounded: Mapping[str, float], dtype: str, factor: float) -> dict[str, float]:
    """The allowed error of the loss and of each leaf, `factor` times those of the plain operations in bfloat16.

    Where these were lucky: as the same weight in the other layer, or as the median leaf; the loss as one rounding.
    """
    median = float(np.median([error for name, error in rounded.items() if name != "loss"]))
    largest: dict[str, float] = {}
    for name, error in rounded.items():
        least = _BFLOAT16_ROUNDING if name == "loss" else median
        kind = _kind(name)
        largest[kind] = max(error, least, largest.get(kind, 0.0))
    times, least = ROUNDING[dtype]
    return {name: factor * times * largest[_kind(name)] + least for name in rounded}


def _kind(name: str) -> str:
    return re.sub(r"^layers\.\d+\.", "", name)
