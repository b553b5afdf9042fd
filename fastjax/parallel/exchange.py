"""Gradients of replicas, summed over the link in few bits, with error feedback.

Each replica cuts its gradient into one part a replica, quantises it in blocks and sends the parts to their owners (an
all-to-all); the owner adds what it gets in float32, quantises the sum and sends it to all (an all-gather). So a number
is rounded twice, whatever the number of replicas, and all replicas hold the same bits (ZeRO++, Wang et al., arXiv
2306.10209; SDP4Bit, Jia et al., arXiv 2410.15526). What rounding loses, the sender's and the owner's, is kept and added
to the next step's (1-bit Adam's two-sided feedback, Tang et al., arXiv 2102.02888; LoCo, Xie et al., arXiv 2407.04480).

A number takes the link twice, as in a float32 all-reduce of n replicas, which moves 2(n - 1)/n · 4 bytes of it: so a
format moves its share of float32's bytes, 1/2 for bfloat16, 1/3.94 for int8 and 1/7.11 for int4, scales included.
No format of eight bits can come below 1/4; but it travels once a step, and float32's all-reduce once a microbatch.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

#: Arrays with fewer elements travel in float32: norms and biases, whose few bytes do not matter.
MIN_SIZE = 4096
SCALE_BYTES = 4


class Format(NamedTuple):
    """How a number travels.

    Attributes:
        bits: of one number.
        levels: the code of a block's largest magnitude; 0: a floating-point number without scale.
        block: elements that share a scale.
    """

    bits: int
    levels: int = 0
    block: int = 1

    @property
    def bytes(self) -> float:
        """Bytes of one number, with its share of the scale."""
        return self.bits / 8 + (SCALE_BYTES / self.block if self.levels else 0)


FORMATS = {"float32": Format(32), "bfloat16": Format(16), "int8": Format(8, 127, 256), "int4": Format(4, 7, 64)}
#: Parts are multiples of it: whole blocks of every format, and halves of them.
UNIT = 256


class Packed(NamedTuple):
    """Numbers as they travel.

    Attributes:
        codes: bfloat16 or int8 [..., N], or uint8 [..., N / 2], two codes a byte.
        scales: float32 [..., N / block], the magnitude of code 1 in each block; None of a floating-point format.
    """

    codes: Array
    scales: Float[Array, "... blocks"] | None


class Feedback(NamedTuple):
    """Rounding errors that the next step adds, bfloat16, replica by replica; None for arrays that travel in float32.

    Attributes:
        sent: of each replica's own gradient, [replicas, *shape].
        summed: of each replica's part of the sums, [replicas, *stack, part].
    """

    sent: Any
    summed: Any


def no_feedback(gradients: Any, replicas: int) -> Feedback:
    """Zeros: nothing has been kept back.

    Args:
        gradients: arrays or shapes, as one replica has them.
        replicas: their number.
    """

    def sent(leaf: Any) -> Array | None:
        return jnp.zeros((replicas, *leaf.shape), jnp.bfloat16) if _travels_packed(leaf) else None

    def summed(leaf: Any) -> Array | None:
        stack = leaf.shape[: _stack_dims(leaf)]
        part = _part(math.prod(leaf.shape[_stack_dims(leaf) :]), replicas)
        return jnp.zeros((replicas, *stack, part), jnp.bfloat16) if _travels_packed(leaf) else None

    return Feedback(jax.tree.map(sent, gradients), jax.tree.map(summed, gradients))


def exchange(gradients: Any, feedback: Feedback, name: str, axes: tuple[str, ...]) -> tuple[Any, Feedback]:
    """The sums of the replicas' gradients, the same on each, and what rounding keeps back; inside a shard_map.

    A number that is not finite makes its block of the sum not finite.

    Args:
        gradients: this replica's, in its share of the sum.
        feedback: of the step before, this replica's: its leading axes are one.
        name: a key of `FORMATS`.
        axes: mesh axes of the replicas.
    """
    leaves, structure = jax.tree.flatten(gradients)
    sent, summed = (structure.flatten_up_to(tree) for tree in feedback)
    results = [_exchange(*arrays, FORMATS[name], axes) for arrays in zip(leaves, sent, summed, strict=True)]
    sums, sent, summed = (structure.unflatten(column) for column in zip(*results, strict=True))
    return sums, Feedback(sent, summed)


def pack(numbers: Float[Array, "... N"], form: Format) -> Packed:
    """Quantise; the nearest code, symmetric about zero.

    Args:
        numbers: float32, N a multiple of `UNIT`.
        form: of the result.
    """
    if not form.levels:
        return Packed(numbers.astype(jnp.bfloat16 if form.bits == 16 else jnp.float32), None)
    blocks = numbers.reshape(*numbers.shape[:-1], -1, form.block)
    scales = jnp.max(jnp.abs(blocks), axis=-1) / form.levels
    scales = jnp.where(jnp.all(jnp.isfinite(blocks), axis=-1), scales, jnp.nan)  # a maximum may pass over NaN
    codes = jnp.round(blocks / jnp.where(scales == 0, 1, scales)[..., None])
    codes = jnp.clip(codes, -form.levels, form.levels).reshape(numbers.shape).astype(jnp.int8)
    if form.bits == 4:
        low, high = jnp.split(codes + 8, 2, axis=-1)
        codes = low.astype(jnp.uint8) | (high.astype(jnp.uint8) << 4)
    return Packed(codes, scales)


def unpack(packed: Packed, form: Format) -> Float[Array, "... N"]:
    """The numbers of `pack` in float32.

    Args:
        packed: codes and scales.
        form: of the codes.
    """
    codes = packed.codes
    if packed.scales is None:
        return codes.astype(jnp.float32)
    if form.bits == 4:
        codes = jnp.concatenate([codes & 15, codes >> 4], axis=-1).astype(jnp.int8) - 8
    blocks = codes.reshape(*codes.shape[:-1], -1, form.block).astype(jnp.float32) * packed.scales[..., None]
    return blocks.reshape(codes.shape)


def _exchange(gradient: Array, sent: Array | None, summed: Array | None, form: Format, axes: tuple[str, ...]):
    """The sum of one array, and what is kept back of it."""
    if sent is None or summed is None:
        return jax.lax.psum(gradient.astype(jnp.float32), axes).astype(gradient.dtype), None, None

    def one(arrays: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        total, kept, rest = _matrix(*arrays, form, axes)
        return total.astype(gradient.dtype), kept, rest

    def of_matrices(array: Array) -> Array:
        return array.reshape(rows, *array.shape[stack:])

    # A stack goes layer by layer: the buffers are a layer's.
    stack, shapes = _stack_dims(gradient), (gradient.shape, sent.shape, summed.shape)
    rows = math.prod(gradient.shape[:stack])
    results = jax.lax.map(one, (of_matrices(gradient), of_matrices(sent[0]), of_matrices(summed[0])))
    total, sent, summed = (array.reshape(shape) for array, shape in zip(results, shapes, strict=True))
    return total, sent, summed


def _matrix(gradient: Array, sent: Array, summed: Array, form: Format, axes: tuple[str, ...]):
    replicas = jax.lax.axis_size(axes)
    numbers = (gradient.astype(jnp.float32) + sent.astype(jnp.float32)).reshape(-1)
    parts = jnp.pad(numbers, (0, summed.size * replicas - numbers.size)).reshape(replicas, -1)
    packed = pack(parts, form)
    error = (parts - unpack(packed, form)).reshape(-1)[: numbers.size].reshape(sent.shape)
    received = jax.tree.map(lambda a: jax.lax.all_to_all(a, axes, 0, 0, tiled=True), packed)
    total = jnp.sum(unpack(received, form), axis=0) + summed.astype(jnp.float32)
    packed = pack(total, form)
    rest = total - unpack(packed, form)
    whole = unpack(jax.tree.map(lambda a: jax.lax.all_gather(a, axes), packed), form)
    whole = whole.reshape(-1)[: numbers.size].reshape(gradient.shape)
    return whole, error.astype(sent.dtype), rest.astype(summed.dtype)


def _travels_packed(leaf: Any) -> bool:
    return math.prod(leaf.shape[_stack_dims(leaf) :]) >= MIN_SIZE


def _stack_dims(leaf: Any) -> int:
    """Leading axes over separate matrices."""
    return max(0, len(leaf.shape) - 2)


def _part(size: int, replicas: int) -> int:
    """Elements of a replica's part of an array, whole units."""
    return -(-size // (replicas * UNIT)) * UNIT
