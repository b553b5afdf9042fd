"""LoRA as the papers write it, in plain jax.numpy and differentiated by JAX: the oracle of the fused units.

Every adapter is a sum of its own beside its projection, in any dtype, float64 included. Arguments are those of the
units: `linear.project`, `mlp.gated_block`, `experts.routed_experts` and `params.LoraEmbedding`.
"""

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from fastjax.lora import experts as of_experts
from fastjax.lora.dropout import drop
from fastjax.lora.mlp import Block, Operands
from fastjax.lora.params import LoraEmbedding, LoraLinear
from fastjax.lora.rank_products import Matrices, PartSpec
from fastjax.lora.units import row_slices
from fastjax.quantization import WeightLike
from fastjax.quantization.dense import linear
from fastjax.quantization.weights import as_weight, dequantize, matmul
from pallas_kernels.glu import clamped_swiglu
from pallas_kernels.glu.reference import ACTIVATIONS


def project(
    sizes: Sequence[tuple[str, int]],
    weight: WeightLike,
    adapters: Mapping[str, LoraLinear],
    x: Float[Array, "B S in"],
    key: PRNGKeyArray | None,
    dropped: Float[Array, "B S in"] | None = None,
    residual: Float[Array, "B S out"] | None = None,
) -> Float[Array, "B S out"]:
    """The parts' x·Wᵀ + s·(d·Aᵀ)·Bᵀ, d the dropped input; with DoRA the part of d scaled by m / ‖W + s·B·A‖.

    Args:
        sizes: as in `linear.project`.
        weight: as there.
        adapters: as there.
        x: as there.
        key: as there.
        dropped: as there.
        residual: as there.
    """
    whole, outputs, wide = _product(x, weight), [], _wide(x)
    for (name, _), here in zip(sizes, row_slices(rows for _, rows in sizes), strict=True):
        base = whole[..., here]
        if name not in adapters:
            outputs.append(base)
            continue
        adapter = adapters[name]
        a, b = adapter.lora_A[...].astype(wide), adapter.lora_B[...].astype(wide)
        read = masked(x, key, name, adapter.dropout) if dropped is None else dropped
        delta = linear(linear(read, a), b * adapter.scaling)
        if adapter.magnitude is None:
            outputs.append(base + delta)
            continue
        full = dequantize(weight, jnp.float32)[here].astype(wide) + adapter.scaling * linear(b, a.T)
        scale = _scale(adapter.magnitude[...].astype(wide), full, axis=1, dtype=x.dtype)
        inner = base if read is x else _product(read, weight)[..., here]
        outputs.append(base + (scale - 1) * inner + scale * delta)
    y = jnp.concatenate(outputs, axis=-1)
    return y if residual is None else residual + y


def gated_block(
    block: Block, x: Float[Array, "B S E"], arrays: Operands, residual: Float[Array, "B S E"] | None = None
) -> Float[Array, "B S E"]:
    """down(act(gate(x)) · up(x)), each projection with its adapter, without the down projection's bias.

    Args:
        block: as in `mlp.gated_block`.
        x: as there.
        arrays: as there.
        residual: as there.
    """
    gate_up = _parts(block.parts, arrays.gate_up, arrays.matrices, x, arrays.key)
    if arrays.bias is not None:
        gate_up = gate_up + arrays.bias.astype(x.dtype)[None, None]
    gate, up = jnp.split(gate_up.astype(_wide(x)), 2, axis=-1)
    h = (ACTIVATIONS[block.activation](gate) * up).astype(x.dtype)
    y = _parts((block.down,), arrays.down, arrays.matrices, h, arrays.key)
    return y if residual is None else residual + y


def routed_experts(
    block: of_experts.Block,
    x: Float[Array, "N E"],
    weights: Float[Array, "N k"],
    experts: Int[Array, "N k"],
    arrays: of_experts.Operands,
) -> Float[Array, "N E"]:
    """The weighted sum of each token's experts: every expert on every token, and zero weights.

    Args:
        block: as in `experts.routed_experts`.
        x: as there.
        weights: as there.
        experts: as there.
        arrays: as there.
    """

    def product(part: PartSpec, weight: WeightLike, bias: Array | None, x: Float[Array, "X N in"]) -> Array:
        decoded = as_weight(weight).experts(jnp.float32 if x.dtype == jnp.float64 else x.dtype)
        y = _by_expert(x, decoded.astype(x.dtype))
        if part.rank:
            a, b = (matrix.astype(x.dtype) for matrix in arrays.matrices[part.name])
            y = y + _by_expert(_by_expert(x, a), b * part.scaling)
        return y if bias is None else y + bias.astype(x.dtype)[:, None]

    gate_up = product(block.gate_up, arrays.gate_up, arrays.gate_up_bias, jnp.tile(x[None], (block.num_experts, 1, 1)))
    gate, up = jnp.split(gate_up.astype(_wide(x)), 2, axis=-1)
    h = (
        ACTIVATIONS[block.activation](gate) * up
        if block.clamp is None
        else clamped_swiglu(gate, up, **block.clamp._asdict())
    )
    y = product(block.down, arrays.down, arrays.down_bias, h.astype(x.dtype))
    chosen = jax.nn.one_hot(experts, block.num_experts, dtype=_wide(x)) * weights.astype(_wide(x))[:, :, None]
    return jnp.einsum("xne,nkx->ne", y.astype(_wide(x)), chosen, precision="highest").astype(x.dtype)


def embed(
    adapter: LoraEmbedding, tokens: Int[Array, "B S"], table: Float[Array, "V E"], dtype: jnp.dtype
) -> Float[Array, "B S E"]:
    """Rows of W + s·(B·A)ᵀ; with DoRA each feature scaled by m / ‖W + s·(B·A)ᵀ‖.

    Args:
        adapter: of the table.
        tokens: token ids.
        table: W.
        dtype: of the embeddings.
    """
    wide = jnp.float64 if jnp.dtype(dtype) == jnp.float64 else jnp.float32
    a, b = adapter.lora_embedding_A[...].astype(wide), adapter.lora_embedding_B[...].astype(wide)
    full = table.astype(wide) + adapter.scaling * linear(a.T, b)
    rows = jnp.take(full, tokens, axis=0).astype(dtype)
    if adapter.magnitude is None:
        return rows
    return rows * _scale(adapter.magnitude[...].astype(wide), full, axis=0, dtype=rows.dtype)


def masked(x: Array, key: PRNGKeyArray | None, name: str, rate: float) -> Array:
    """`drop`, in float64 with the mask of the other dtypes.

    Args:
        x: as in `drop`.
        key: as there.
        name: as there.
        rate: as there.
    """
    if x.dtype != jnp.float64 or key is None or rate == 0.0:
        return drop(x, key, name, rate)
    with jax.enable_x64(False):
        mask = drop(jnp.ones(x.shape, jnp.float32), key, name, rate) > 0
    return jnp.where(mask, x / (1.0 - rate), 0.0)


def _parts(
    parts: Sequence[PartSpec], weight: WeightLike, matrices: Matrices, x: Array, key: PRNGKeyArray | None
) -> Array:
    """The parts' outputs side by side."""
    sizes = [(part.name, part.rows) for part in parts]
    adapters = {
        part.name: LoraLinear(
            matrices[part.name][0], matrices[part.name][1], None, scaling=part.scaling, dropout=part.dropout
        )
        for part in parts
        if part.rank
    }
    return project(sizes, weight, adapters, x, key)


def _by_expert(x: Float[Array, "X N in"], w: Float[Array, "X out in"]) -> Float[Array, "X N out"]:
    return jnp.einsum("xni,xoi->xno", x, w, precision="highest")


def _product(x: Array, weight: WeightLike) -> Array:
    """x·Wᵀ; in float64 with the decoded values of a packed weight."""
    if x.dtype != jnp.float64:
        return matmul(x, weight)
    decoded = weight if isinstance(weight, jax.Array) else dequantize(weight, jnp.float32)
    return jnp.einsum("...i,oi->...o", x, decoded.astype(jnp.float64), precision="highest")


def _scale(magnitude: Array, full: Array, *, axis: int, dtype: jnp.dtype) -> Array:
    """DoRA's factors of a last axis; the norm is a constant (arXiv 2402.09353, section 4.3)."""
    norm = jax.lax.stop_gradient(jnp.linalg.norm(full, axis=axis))
    return (magnitude / norm).astype(dtype)[None, None, :]


def _wide(x: Array) -> jnp.dtype:
    return jnp.dtype(jnp.float64 if x.dtype == jnp.float64 else jnp.float32)
