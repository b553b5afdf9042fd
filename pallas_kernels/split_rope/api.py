"""Queries, keys and values out of one product, turned by their positions: the public function.

Between the product of an attention's input with the weights of all three and the attention itself lies a pass over
memory: the product is read once, and queries, keys and values are each written once, as arrays of their own with the
rotary embedding (arXiv 2104.09864) applied. The backward pass writes the gradient of the product as one array.

Implementations, in order of preference:

- ``triton``: NVIDIA GPUs of compute capability 8.0 or more, 16-bit products, head sizes that are multiples of 16;
- ``xla``: everything else.
"""

from jaxtyping import Array, Float

from pallas_kernels.dispatch import HALF, Implementation, Target, triton_or_xla
from pallas_kernels.rope.api import check_tables
from pallas_kernels.split_rope import triton, xla
from pallas_kernels.transformations import custom_vjp


def split_rope(
    qkv: Float[Array, "B S N"],
    cos: Float[Array, "B S R//2"] | None,
    sin: Float[Array, "B S R//2"] | None,
    *,
    heads: int,
    key_heads: int,
    interleaved: bool = False,
    query_scales: Float[Array, "B S"] | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "B S H D"], Float[Array, "B S K D"], Float[Array, "B S K D"]]:
    """Cut a product into queries, keys and values, and apply ``rope.rope`` to queries and keys.

    The turn is computed in float32 and rounded once. The backward pass keeps the tables and scales alone.

    Args:
        qkv: for each token the features of H query heads, K key heads and K value heads, N = (H + 2K) · D.
        cos: as in ``rope.rope``; None: nothing turns.
        sin: as in ``rope.rope``.
        heads: H.
        key_heads: K.
        interleaved: as in ``rope.rope``.
        query_scales: factors of the turned queries of each token; they are rounded to the dtype of the product.
        implementation: None, "triton" or "xla".

    Returns:
        q, k and v in the dtype of the product. Differentiable in `qkv`; the others are constants.

    Raises:
        ValueError: operands that do not fit.
        NotImplementedError: the forced implementation cannot serve this call; the message says why.
    """
    size = _head_size(qkv, cos, sin, heads, key_heads, query_scales)
    chosen = REGISTRY.choose(implementation, dtype=qkv.dtype, size=size)
    tables = None if cos is None or sin is None else (cos, sin)
    return _split(qkv, tables, query_scales, (heads, key_heads), interleaved, chosen)


def _why_not_triton(_: Target, size: int, **facts) -> str | None:
    if size % 16 or size > 256:
        return f"the head size must be a multiple of 16 and at most 256, not {size}"
    return None


#: forward(qkv, (cos, sin) or None, query_scales or None, (H, K), interleaved) -> (q, k, v)
#: backward((dq, dk, dv), (cos, sin) or None, query_scales or None, interleaved, with_absmax)
#:     -> (dqkv, the largest magnitude for each token or None)
REGISTRY = triton_or_xla(
    "split_rope",
    Implementation(triton.forward, triton.backward, dtypes=HALF, why_not=_why_not_triton),
    Implementation(xla.forward, xla.backward),
)


@custom_vjp(nondiff_argnums=(3, 4, 5))
def _split(qkv, tables, scales, heads: tuple[int, int], interleaved: bool, implementation: str):
    return REGISTRY[implementation].forward(qkv, tables, scales, heads, interleaved)


def _forward(qkv, tables, scales, heads, interleaved, implementation):
    return _split(qkv, tables, scales, heads, interleaved, implementation), (tables, scales)


def _backward(heads, interleaved, implementation, residuals, gradients):
    tables, scales = residuals
    return REGISTRY[implementation].backward(gradients, tables, scales, interleaved)[0], None, None


_split.defvjp(_forward, _backward)


def _head_size(qkv, cos, sin, heads: int, key_heads: int, scales) -> int:
    """The head size of operands that fit."""
    every = heads + 2 * key_heads
    if qkv.ndim != 3 or qkv.shape[2] % every:
        raise ValueError(
            f"split_rope: qkv must be [B, S, (H + 2K) · D] for H = {heads} and K = {key_heads}, got {list(qkv.shape)}"
        )
    size = qkv.shape[2] // every
    if (cos is None) != (sin is None):
        raise ValueError("split_rope: cos and sin must be given together, got one of them")
    if cos is not None:
        check_tables("split_rope", cos, sin, (qkv.shape[0], qkv.shape[1], size))
    if scales is not None and scales.shape != qkv.shape[:2]:
        raise ValueError(f"split_rope: query_scales must be {list(qkv.shape[:2])}, got {list(scales.shape)}")
    return size
