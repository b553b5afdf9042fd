"""The way from the qkv projection with LoRA adapters to attention (arXiv 2104.09864, 2106.09685), in one pass.

Queries, keys and values come side by side as W leaves them. Their adapters' B is applied, they are parted, and queries
and keys are turned where they are read: the sum is not an array of its own. The backward pass turns the gradients back
side by side, and reads the result once for the gradients of the rank products and of B.

Implementations, in order of preference:

- ``triton``: NVIDIA GPUs of compute capability 8.0 or more, 16-bit activations;
- ``xla``: everything else.
"""

import functools
from typing import Any, NamedTuple

from jaxtyping import Array, Float

from pallas_kernels import low_rank
from pallas_kernels.dispatch import Implementation, Target, triton_or_xla
from pallas_kernels.float8.scaled import Rounded, Scaled, product_of
from pallas_kernels.split_rope.lora import triton, xla
from pallas_kernels.transformations import with_automatic_axes


class Gradients(NamedTuple):
    """Results of the backward pass.

    Attributes:
        base: the gradient of the large product.
        products: of the rank products.
        lora_B: of B, float32.
        rows: that of the large product as `float8.quantize_rows` makes it; None: it was not asked for.
    """

    base: Float[Array, "N F"]
    products: Float[Array, "N PR"]
    lora_B: Float[Array, "F R"]
    rows: Rounded | None


def split_rope_lora_forward(
    base: Float[Array, "N F"] | Scaled,
    products: Float[Array, "N PR"],
    lora_B: Float[Array, "F R"],
    cos: Float[Array, "N D/2"],
    sin: Float[Array, "N D/2"],
    *,
    heads: tuple[int, int],
    implementation: str | None = None,
) -> tuple[Float[Array, "N HD"], Float[Array, "N KD"], Float[Array, "N KD"]]:
    """Queries and keys, turned as by `pallas_kernels.rope`, and values; each rounded once.

    Args:
        base: queries, keys and values without their adapters; of a product in float8 its scales may be left to this.
        products: x·Aᵀ of queries, keys and values, in the dtype of base; [N, R] where one adapter serves all.
        lora_B: with the adapters' scale.
        cos: cosines of the tokens' angles.
        sin: sines of the same.
        heads: H of queries and K of keys.
        implementation: None, "triton" or "xla".

    Raises:
        ValueError: operands that do not fit.
        NotImplementedError: the forced implementation cannot serve this call; the message says why.
    """
    large = product_of(base)
    _check("split_rope_lora_forward", large, products, lora_B, cos, sin, heads)
    chosen = REGISTRY.chosen(implementation, **_facts(large, lora_B, cos, heads))
    return with_automatic_axes(
        lambda *operands: chosen.forward(*operands, heads),
        *(base, products, lora_B, cos, sin),
        rows_like=large,
    )


def split_rope_lora_backward(
    gradients: tuple[Float[Array, "N HD"], Float[Array, "N KD"], Float[Array, "N KD"]],
    products: Float[Array, "N PR"],
    lora_B: Float[Array, "F R"],
    cos: Float[Array, "N D/2"],
    sin: Float[Array, "N D/2"],
    *,
    heads: tuple[int, int],
    rounded: bool = False,
    implementation: str | None = None,
) -> Gradients:
    """The gradients of `split_rope_lora_forward`'s first three arguments.

    Args:
        gradients: of queries, keys and values.
        products: as in `split_rope_lora_forward`.
        lora_B: as in `split_rope_lora_forward`.
        cos: as in `split_rope_lora_forward`.
        sin: as in `split_rope_lora_forward`.
        heads: as in `split_rope_lora_forward`.
        rounded: whether the gradient of the large product is wanted in float8 too.
        implementation: None, "triton" or "xla".

    Raises:
        ValueError: operands that do not fit.
        NotImplementedError: the forced implementation cannot serve this call; the message says why.
    """
    dq, dk, dv = gradients
    size = 2 * cos.shape[-1]
    shapes = [(dq.shape[0], count * size) for count in (heads[0], heads[1], heads[1])]
    if [array.shape for array in gradients] != shapes:
        given = [list(array.shape) for array in gradients]
        raise ValueError(
            f"split_rope_lora_backward: gradients must be {shapes} for {heads} heads of {size}, got {given}"
        )
    chosen = REGISTRY.chosen(implementation, **_facts(dq, lora_B, cos, heads))
    results = with_automatic_axes(
        lambda *operands: chosen.backward(*operands, heads, rounded),
        *(dq, dk, dv, products, lora_B, cos, sin),
        rows_like=(dq, dq, None, dq),
    )
    return Gradients(*results)


def _facts(array: Array, lora_B: Array, cos: Array, heads: tuple[int, int]) -> dict[str, Any]:
    size, rows, rank = 2 * cos.shape[-1], array.shape[0], lora_B.shape[1]
    return {"rows": rows, "heads": heads, "size": size, "dtype": array.dtype, "rank": rank}


def _check(op: str, base, products, lora_B, cos, sin, heads) -> None:
    queries, keys = heads
    rows, size, rank = base.shape[0], 2 * cos.shape[-1], lora_B.shape[-1]
    features = (queries + 2 * keys) * size
    if base.shape != (rows, features) or cos.shape != (rows, size // 2) or sin.shape != cos.shape:
        raise ValueError(
            f"{op}: for {queries} and {keys} heads of {size}, base must be [N, {features}] and cos and sin "
            f"[N, {size // 2}], got {list(base.shape)}, {list(cos.shape)} and {list(sin.shape)}"
        )
    if lora_B.shape != (features, rank) or products.shape not in ((rows, rank), (rows, 3 * rank)):
        raise ValueError(
            f"{op}: lora_B must be [{features}, R] and products [{rows}, 3R] or [{rows}, R], "
            f"got {list(lora_B.shape)} and {list(products.shape)}"
        )
    if not base.dtype == products.dtype == lora_B.dtype:
        given = [str(array.dtype) for array in (base, products, lora_B)]
        raise ValueError(f"{op}: base, products and lora_B must have one dtype, got {given}")


def _why_not_triton(device: Target, heads: tuple[int, int], size: int, **facts) -> str | None:
    parts = tuple(count * size for count in (heads[0], heads[1], heads[1]))
    if reason := low_rank.ADD["triton"].reason(device, parts=parts, **facts):
        return reason
    return None if size in triton.SIZES else f"it serves head sizes {list(triton.SIZES)}, not {size}"


#: forward(base, products, lora_B, cos, sin, heads) -> (queries, keys, values)
#: backward(dq, dk, dv, products, lora_B, cos, sin, heads, rounded) -> what `Gradients` holds
REGISTRY = triton_or_xla(
    "split_rope.lora",
    Implementation(triton.forward, functools.partial(xla.backward, implementation=None), why_not=_why_not_triton),
    Implementation(
        functools.partial(xla.forward, implementation="xla"), functools.partial(xla.backward, implementation="xla")
    ),
)
