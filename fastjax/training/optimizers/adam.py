"""Adam's direction (Kingma and Ba, arXiv 1412.6980), with moments of 32 bits, of 16, or of 8 as in bitsandbytes.

With 16 bits a step updates the moments of matrices in float32, takes the direction from these, and rounds them to
bfloat16 stochastically (Gupta et al., arXiv 1502.02551): to the nearest, the second one would stand still, because 0.1%
of it is below half a unit in its last place.

With 8 bits (Dettmers et al., arXiv 2110.02861) a step decodes the moments, updates them in float32, takes the
direction from these, and only then encodes them again: the first with the signed dynamic map, the second with the
unsigned one, in blocks of 256 (`blockwise.py`). That is a quarter of the memory. A tensor with fewer than 4,096
elements keeps 32 bits, as in bitsandbytes; each stacked layer counts as one tensor.

Moments in the host's memory (as in ZeRO-Offload, arXiv 2101.06840) are fetched, updated and sent back part by part.
"""

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, BFloat16, Bool, Float, Int

from fastjax.host_memory import in_host_memory, zeros_in_host_memory
from fastjax.training.optimizers.blockwise import BLOCK, Blockwise, block_absmax, dequantize, quantize, zeros
from fastjax.training.optimizers.groups import stack_dims

#: Tensors with fewer elements keep moments of 32 bits (bitsandbytes' min_8bit_size).
MIN_8BIT_SIZE = 4096
#: Of a table's gradient in float32, whose moments in the host's memory are updated at once.
PART_BYTES = 2**26


class AdamState(NamedTuple):
    """Moments of the gradient.

    Attributes:
        count: updates made; int32 [].
        mu: mean of the gradient; a leaf is a float32 or bfloat16 array or `Blockwise`.
        nu: mean of its square, in the same types.
    """

    count: Int[Array, ""]
    mu: Any
    nu: Any


def scale_by_adam(
    b1: float, b2: float, eps: float, *, bits: Literal[8, 16, 32], offload: bool = False
) -> optax.GradientTransformationExtraArgs:
    """The direction m / (√v + eps), with m and v the bias-corrected means of the gradient and of its square.

    Args:
        b1: decay of the first mean.
        b2: decay of the second mean.
        eps: added to the root.
        bits: of the moments; 8: of tensors with at least `MIN_8BIT_SIZE` elements; 16: of matrices, in bfloat16.
        offload: keep the moments of matrices in the host's memory.

    Returns:
        A transformation of float32 gradients into float32 directions. With `offload` its update takes `finite`, a bool
        []: where it is False the moments in the host stay as they are.
    """

    def moment(path: tuple[Any, ...], leaf: Any) -> Array | Blockwise:
        stack = stack_dims(path, leaf)
        make = zeros_in_host_memory if offload and leaf.ndim > 1 else jnp.zeros
        if bits == 8 and math.prod(leaf.shape[stack:]) >= MIN_8BIT_SIZE:
            return zeros(leaf.shape, stack, make)
        return make(leaf.shape, jnp.bfloat16 if bits == 16 and leaf.ndim - stack > 1 else jnp.float32)

    def init(params: Any) -> AdamState:
        mu, nu = (jax.tree_util.tree_map_with_path(moment, params) for _ in range(2))
        return AdamState(jnp.zeros((), jnp.int32), mu, nu)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        del params
        count = state.count + 1
        leaf = _leaf(b1, b2, eps, count)

        def anywhere(gradient: Float[Array, "..."], mu: Any, nu: Any) -> tuple[Array, Any, Any]:
            if not in_host_memory(jax.tree.leaves(mu)[0]):
                return leaf(gradient, mu, nu)
            return _updated_in_host(leaf, gradient, (mu, nu), extra["finite"])

        leaves, structure = jax.tree.flatten(updates)
        results = map(anywhere, leaves, structure.flatten_up_to(state.mu), structure.flatten_up_to(state.nu))
        columns = list(zip(*results, strict=True)) or [()] * 3  # of no weight, as where all are another rule's
        directions, mu, nu = map(structure.unflatten, columns)
        return directions, AdamState(count, mu, nu)

    return optax.GradientTransformationExtraArgs(init, update)


def _leaf(b1: float, b2: float, eps: float, count: Int[Array, ""]) -> Callable[..., tuple[Array, Any, Any]]:
    """The function (gradient, moments) -> the direction and the new moments, of one leaf on the device."""
    # One division for each number: the corrections' reciprocals are those of scalars.
    rates = 1 / one_minus_power(b1, count), jax.lax.rsqrt(one_minus_power(b2, count))

    def moments(gradient: Float[Array, "..."], mu: Any, nu: Any) -> tuple[Array, Array]:
        m = b1 * _load(mu, signed=True) + (1 - b1) * gradient
        return m, b2 * _load(nu, signed=False) + (1 - b2) * gradient * gradient

    @jax.jit  # leaves of a shape are traced and lowered once
    def leaf(gradient: Float[Array, "..."], mu: Any, nu: Any) -> tuple[Array, Any, Any]:
        m, v = moments(gradient, mu, nu)
        if isinstance(mu, Blockwise):
            stack = mu.absmax.ndim - 1
            scales = block_absmax(m, stack), block_absmax(v, stack)
            # The barrier forces the moments to be recomputed: one kernel finds the scales, one does the rest, and
            # 32-bit moments never reach memory.
            old, scales = jax.lax.optimization_barrier(((mu.absmax, nu.absmax), scales))
            m, v = moments(gradient, mu._replace(absmax=old[0]), nu._replace(absmax=old[1]))
            mu, nu = quantize(m, scales[0], signed=True), quantize(v, scales[1], signed=False)
        elif mu.dtype == jnp.bfloat16:
            mu, nu = round_stochastically((m, v), count)
        else:
            mu, nu = m, v
        return m * rates[0] / (jnp.sqrt(v) * rates[1] + eps), mu, nu

    return leaf


def _updated_in_host(
    leaf: Callable[..., Any], gradient: Float[Array, "..."], moments: Any, finite: Bool[Array, ""]
) -> tuple[Array, Any, Any]:
    """`leaf` of moments in the host's memory, in their places, part by part: layers, or rows of a table."""
    parts = _parts(gradient, moments)

    def taken(stack: Array, index: Array) -> Array:
        rows = stack.shape[0] // parts
        here = jax.lax.dynamic_slice_in_dim(stack, index * rows, rows, allow_negative_indices=False)
        return jax.device_put(here, jax.memory.Space.Device) if in_host_memory(stack) else here

    def put(stack: Array, index: Array, part: Array) -> Array:
        part = jax.device_put(part, jax.memory.Space.Host) if in_host_memory(stack) else part
        start = index * (stack.shape[0] // parts)
        return jax.lax.dynamic_update_slice_in_dim(stack, part, start, 0, allow_negative_indices=False)

    def body(carry: Any, _: None) -> tuple[Any, None]:
        index, gradient, moments = carry
        old = jax.tree.map(lambda stack: taken(stack, index), moments)
        direction, *new = leaf(taken(gradient, index), *old)
        kept = jax.tree.map(lambda new, old: jnp.where(finite, new, old), tuple(new), old)
        moments = jax.tree.map(lambda stack, part: put(stack, index, part), moments, kept)
        # The directions take the gradient's place.
        return (index + 1, put(gradient, index, direction), moments), None

    (_, direction, moments), _ = jax.lax.scan(body, (jnp.int32(0), gradient, moments), None, length=parts)
    return direction, *moments


def _parts(gradient: Float[Array, "..."], moments: Any) -> int:
    """The number of equal parts of whole blocks: a stack's layers; of a table the fewest of at most `PART_BYTES`."""
    rows = [leaf.shape[0] for leaf in jax.tree.leaves((gradient, moments))]
    if gradient.ndim > 2:
        return rows[0]
    fewest = -(-4 * gradient.size // PART_BYTES)
    even = (
        n for n in range(fewest, rows[0]) if not any(count % n for count in rows) and not gradient.size // n % BLOCK
    )
    return 1 if fewest == 1 else next(even, 1)


def _load(moment: Any, *, signed: bool) -> Float[Array, "..."]:
    return dequantize(moment, signed=signed) if isinstance(moment, Blockwise) else moment.astype(jnp.float32)


def one_minus_power(base: float, count: Int[Array, ""]) -> Float[Array, ""]:
    """1 - base^count without cancellation: at count 1, 1 - 0.999 in float32 has an error of one in 80,000."""
    return -jnp.expm1(count.astype(jnp.float32) * (math.log(base) if base else -math.inf))


def round_stochastically(
    pair: tuple[Float[Array, "..."], Float[Array, "..."]], draw: Int[Array, ""]
) -> tuple[BFloat16[Array, "..."], BFloat16[Array, "..."]]:
    """Round each number to one of its two neighbours in bfloat16, to the nearer one more often.

    The random bits are a hash of the draw and of the number's place in the last two axes, so that layers in a stack are
    rounded as they would be by themselves, on any number of devices; its lower half is for the first array, its upper
    half for the second.

    Args:
        pair: float32, finite, of one shape.
        draw: another one gives other random bits.
    """
    shape = pair[0].shape
    rows, columns = (jax.lax.broadcasted_iota(jnp.uint32, shape, axis) for axis in (len(shape) - 2, len(shape) - 1))
    noise = _hash((rows * jnp.uint32(shape[-1]) + columns) ^ _hash(draw.astype(jnp.uint32)))
    return _rounded(pair[0], noise & jnp.uint32(0xFFFF)), _rounded(pair[1], noise >> 16)


def _rounded(x: Array, noise: Array) -> Array:
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32) + noise  # a carry into the upper half rounds up
    upper = bits & jnp.uint32(0xFFFF0000)
    return jax.lax.bitcast_convert_type(upper, jnp.float32).astype(jnp.bfloat16)


def _hash(x: Array) -> Array:
    """A bijection of 32 bits whose results look independent (C. Wellons, "lowbias32", 2018)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)
