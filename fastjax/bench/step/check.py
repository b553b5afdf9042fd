"""The step beside a reference: the model's first layers in plain XLA operations, every sum in float32.

A measured step computes what the reference computes, but in 16 bits and by other kernels. How far 16 bits alone lead
astray depends on the model (a mixture's router chooses other experts where scores are near), so it is measured: the
plain operations once more in bfloat16, every intermediate result rounded. Kernels round other intermediate results, in
another order: they may be off by three times as much (by a quarter more where products are in float8). Loss and the
gradient of every trained array of each layer are compared, since the loss alone, of random weights, is near the
logarithm of the vocabulary whatever the layers compute. An adapter's B starts at zero, which leaves A without a
gradient: here it starts small. The step of several devices is compared with that of one, of as many rows.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

from fastjax.bench.step.build import build_model, first_state, make_batch
from fastjax.bench.step.case import StepCase
from fastjax.bench.step.mesh import open_case_mesh
from fastjax.data.batches import Batch
from fastjax.errors import TrainingError
from fastjax.language_model.model import LanguageModel
from fastjax.models.chunks import chunk_places
from fastjax.models.leaves import LORA_B, leaf_at
from fastjax.models.remat import policy_of
from fastjax.parallel import MeshShape
from fastjax.planning.work import plain_path
from fastjax.training.health import leaf_names, squared_norms
from fastjax.training.step import make_train_step
from pallas_kernels.attention import attention_implementation

_LAYERS = 2
#: Tokens of the one row; of a mixture fewer, since plain XLA multiplies every row by every expert.
_TOKENS, _TOKENS_OF_MIXTURES = 2048, 512
#: Chunks of that row where the case has chunks.
_CHUNKS = 4
#: Times the error of the plain operations in bfloat16.
_FACTOR = 3.0
#: Times their error with products in float8: its rounding, the same in both, is nearly all of it.
_FACTOR_IN_FLOAT8 = 1.25
_BFLOAT16_ROUNDING = 2.0**-9


class _Allowance(NamedTuple):
    """The error that a dtype is allowed: `times` bfloat16's, and `least` for sums in another order."""

    times: float
    least: float


#: By the significant bits: float16 has three more than bfloat16, float32 sixteen.
_ALLOWED = {
    "bfloat16": _Allowance(1.0, 0.0),
    "float16": _Allowance(2.0**-3, 0.0),
    "float32": _Allowance(2.0**-16, 1e-5),
}
_B_DEVIATION = 0.02
#: Keeps the gradients as its state and changes nothing.
_RECORDER = optax.GradientTransformation(
    lambda params: jax.tree.map(jnp.zeros_like, params),
    lambda updates, state, params=None: (jax.tree.map(jnp.zeros_like, updates), updates),  # pyright: ignore[reportArgumentType]
)


class _Outcome(NamedTuple):
    """Of one step: the loss, and the gradients as the trained arrays lie."""

    loss: float
    gradients: Any


def fault_of(case: StepCase) -> str | None:
    """Compare the first step of the model's first layers with the reference.

    Args:
        case: the settings; rows, checkpointing of other layers and number of steps do not matter.

    Returns:
        What is wrong; None: nothing.

    Raises:
        ConfigError: settings that the model does not take.
    """
    layers = min(_LAYERS, case.layers or _LAYERS)
    mesh, shape = open_case_mesh(case), case.mesh or MeshShape()
    tokens = min(case.seq, _TOKENS) // shape.token_parts * shape.token_parts
    dtype = case.dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
    cut = dataclasses.replace(
        case,
        layers=layers,
        batch=1,
        seq=tokens,
        lengths=None,
        dtype="bfloat16",
        offload_embedding=False,
        mlp_chunk=None,
    )
    model = _with_gradients(build_model(cut))
    if model.config.moe is not None:
        cut = dataclasses.replace(cut, seq=min(tokens, _TOKENS_OF_MIXTURES // shape.replicas))
    batch = make_batch(cut, model.config.vocab_size, None)
    with plain_path():
        exact = _step(_in_dtype(model, "float32"), batch, {})
        rounded = _step(model, batch, {"xla_allow_excess_precision": False})
    with attention_implementation(case.attention):
        found = _step(_by_chunks(_in_dtype(model, dtype), case, tokens), batch, case.options, mesh)
    return _judged(model, dtype, found=found, rounded=rounded, exact=exact)


def _by_chunks(model: LanguageModel, case: StepCase, tokens: int) -> LanguageModel:
    """The model whose MLPs compute a row of so many tokens by chunks, where the case's rows are computed so."""
    devices = case.mesh or MeshShape()
    shape = case.batch, case.seq // devices.context, model.config.hidden_size
    if devices.tensor > 1 or chunk_places(case.mlp_chunk or "auto", shape, policy_of(case.checkpointing, 0)) is None:
        return model
    decoder = model.module()
    decoder.mlp_chunk = -(-tokens // (devices.context * _CHUNKS))
    return model.replace(graphdef=nnx.split(decoder, model.trainable_filter, ...)[0])


def _with_gradients(model: LanguageModel) -> LanguageModel:
    """The model with every B drawn, so small that the adapters change little of what the base computes."""

    def drawn(path: Any, leaf: jax.Array) -> jax.Array:
        if leaf_at(path).kind not in LORA_B:
            return leaf
        return (_B_DEVIATION * jax.random.normal(jax.random.key(leaf.size), leaf.shape)).astype(leaf.dtype)

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
    step = make_train_step(model.graphdef, _RECORDER, model.trainable_filter, compiler_options=options, mesh=mesh)
    state, metrics = step(first_state(model, _RECORDER), model.frozen, batch)
    if not metrics["finite"]:
        raise TrainingError(
            f"the first step in {model.dtype}: loss {float(metrics['loss']):g}, or a gradient not finite"
        )
    return _Outcome(float(metrics["loss"]), jax.device_put(state.opt_state, jax.devices()[0]))


def _judged(model: LanguageModel, dtype: str, *, found: _Outcome, rounded: _Outcome, exact: _Outcome) -> str | None:
    names, norms = leaf_names(model.trainable, model.plan), squared_norms(exact.gradients, model.plan)
    if dead := [name for name, norm in zip(names, np.asarray(norms), strict=True) if not norm > 0]:
        return f"the reference has no gradient of {', '.join(dead)}"

    def errors(outcome: _Outcome) -> dict[str, float]:
        off = jax.tree.map(lambda ours, theirs: ours.astype(jnp.float32) - theirs, outcome.gradients, exact.gradients)
        relative = np.sqrt(np.asarray(squared_norms(off, model.plan) / norms))
        return {"loss": abs(outcome.loss / exact.loss - 1)} | dict(zip(names, relative.tolist(), strict=True))

    factor = _FACTOR if model.precision.base_compute is None else _FACTOR_IN_FLOAT8
    bounds, off = _bounds(errors(rounded), _ALLOWED[dtype], factor), errors(found)
    if vague := [name for name, bound in bounds.items() if not bound < 1]:
        return f"rounding to {dtype} alone makes another gradient of {', '.join(vague)}: it cannot be compared"
    wrong = [f"{name} by {off[name]:.1e} of {bound:.1e}" for name, bound in bounds.items() if not off[name] <= bound]
    shown = ", ".join(wrong[:5]) + (f" and {len(wrong) - 5} more" if len(wrong) > 5 else "")
    return f"the first step is off the reference, more than rounding allows: {shown}" if wrong else None


def _bounds(rounded: Mapping[str, float], allowed: _Allowance, factor: float) -> dict[str, float]:
    """The allowed error of the loss and of each leaf, `factor` times those of the plain operations in bfloat16.

    Where these were lucky: as the same weight in the other layer, or as the median leaf; the loss as one rounding.
    """
    median = float(np.median([error for name, error in rounded.items() if name != "loss"]))
    largest: dict[str, float] = {}
    for name, error in rounded.items():
        least = _BFLOAT16_ROUNDING if name == "loss" else median
        kind = _kind(name)
        largest[kind] = max(error, least, largest.get(kind, 0.0))
    return {name: factor * allowed.times * largest[_kind(name)] + allowed.least for name in rounded}


def _kind(name: str) -> str:
    return re.sub(r"^layers\.\d+\.", "", name)
