"""A part of a layer that computes each token by itself, chunk by chunk of tokens: a tiled MLP.

Beside its input and its output it holds one chunk's intermediate results, in the forward pass as in the backward pass,
which computes them again (Arctic Long Sequence Training, arXiv 2506.13996). The output is written over the input, and
the input's gradient over the output's. Gradients of trained arrays are summed in float32. A packed weight is decoded
once a pass, not once a chunk. The chunks are cut along the sequence: of a row that several devices share, out of each
one's part, so that it stays theirs.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.custom_derivatives import SymbolicZero, custom_vjp_primal_tree_values
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from convert.model.config import ModelConfig
from fastjax.errors import ConfigError
from fastjax.execution.policies import POLICIES
from fastjax.models.residual_stream import FeedForward
from fastjax.parallel import CONTEXT, TENSOR, batch_devices, devices_along, local
from fastjax.quantization.float8 import FORWARD, decoded_in_float8
from fastjax.quantization.weight import Weight, after

#: Tokens of a chunk, and the fewest tokens of a device that are cut, where the setting is "auto".
AUTO_CHUNK, AUTO_TOKENS = 2048, 16384
#: The option, for errors.
CHUNK = "mlp_chunk"
#: `by_chunks`' setting: tokens of a chunk; "auto": `AUTO_CHUNK` of long rows; None: the whole at once.
Chunk = int | Literal["auto"] | None
#: (state, dropout key, x [B, C, E], others [B, C, …]) -> x's successor [B, C, E].
Function = Callable[..., Array]


def check_chunk(chunk: Chunk, config: ModelConfig) -> Chunk:
    """The setting itself.

    Args:
        chunk: tokens of a chunk, "auto" or None.
        config: the model's.

    Raises:
        ConfigError: a number, and all layers have mixtures of experts.
    """
    if isinstance(chunk, int) and all(config.mixtures):
        raise ConfigError(f"{CHUNK}: expected auto or null with mixtures of experts in all layers, got {chunk}")
    return chunk


def chunk_size(chunk: Chunk, shape: tuple[int, ...], policy: str) -> int | None:
    """Tokens of a chunk, along the sequence, in each device's part of a row; None: all.

    Args:
        chunk: the setting. "auto" leaves policies alone that keep the projections' results: the MLP's would be computed
            again.
        shape: [B, S, E] of the layers' input.
        policy: of the layer, a name of `policies.POLICIES`.

    Raises:
        ConfigError: a number of tokens on several devices along `tensor`.
    """
    if devices_along(TENSOR) > 1:
        if isinstance(chunk, int):
            raise ConfigError(f"{CHUNK}: expected auto or null with parallel.tensor above 1, got {chunk}")
        return None
    rows, length = -(-shape[0] // batch_devices()), shape[1] // devices_along(CONTEXT)
    if chunk == "auto":
        setting = POLICIES[policy]
        again = setting is not None and "projection" not in setting.kept
        chunk = AUTO_CHUNK if again and rows * length >= AUTO_TOKENS else None
    size = length if chunk is None else max(1, chunk // rows)
    return size if size < length else None


def feed_by_chunks(
    size: int, part: FeedForward, key: PRNGKeyArray | None, tokens: tuple[Array, ...]
) -> Float[Array, "B S E"]:
    """The feed-forward part of a chunk of tokens at a time (`DecoderLayer.feed`).

    Args:
        size: as in `by_chunks`.
        part: the MLP between its two ends in the residual stream.
        key: the layer's dropout key; None switches dropout off.
        tokens: its inputs.
    """
    graphdef, state = nnx.split(part)

    def run(state: Any, key: PRNGKeyArray | None, *tokens: Array) -> Array:
        return nnx.merge(graphdef, state)(key, *tokens)

    decode = part.mlp.decoded_into(tokens[0].dtype)
    return by_chunks(run, nnx.to_pure_dict(state), key, *tokens, size=size, decode=decode)


class _Call(NamedTuple):
    """The static part of a call.

    Attributes:
        function: as in `by_chunks`.
        structure: of its state, with packed weights as leaves.
        size: tokens of a chunk, along the sequence.
        decode: dtype into which packed weights are decoded before the loop, or a value of `base_compute`; None: they
            are not.
    """

    function: Function
    structure: Any
    size: int
    decode: Any

    def over(self, length: int, body: Callable[[Any, Array, int, Array], Any], carry: Any) -> Any:
        """Carry through (carry, start, size, number) of every chunk; the last may be shorter."""
        whole, rest = divmod(length, self.size)
        numbers = jnp.arange(whole, dtype=jnp.int32)
        carry, _ = lax.scan(lambda c, n: (body(c, n * self.size, self.size, n), None), carry, numbers)
        return body(carry, jnp.int32(whole * self.size), rest, jnp.int32(whole)) if rest else carry

    def decoded(self, x: Array, leaves: list[Any], *, gradient: bool) -> tuple[Array, list[Any]]:
        """x, and the leaves, with packed weights decoded no earlier than x is there; in float8 for one pass or both."""
        packed = {number: leaf for number, leaf in enumerate(leaves) if isinstance(leaf, Weight)}
        if self.decode is None or not packed:
            return x, leaves

        def decode(weight: Weight) -> Any:
            if isinstance(self.decode, str):
                return decoded_in_float8(weight, FORWARD[self.decode], gradient=gradient)
            return weight.dequantize(self.decode)

        island = local(decode, in_specs=P(), out_specs=P())
        waiting, x = after(list(packed.values()), x)
        arrays = lax.optimization_barrier(dict(zip(packed, map(island, waiting), strict=True)))
        return x, [arrays.get(number, leaf) for number, leaf in enumerate(leaves)]

    def run(self, leaves: list[Any], key: PRNGKeyArray | None, number: Array, *tokens: Array) -> Array:
        """The function of one chunk, which has a dropout key of its own."""
        chunk_key = None if key is None else jax.random.fold_in(key, number)
        return self.function(jax.tree.unflatten(self.structure, leaves), chunk_key, *tokens)


def by_chunks(
    function: Function,
    state: PyTree,
    key: PRNGKeyArray | None,
    x: Float[Array, "B S E"],
    *others: Float[Array, "B S F"],
    size: int,
    decode: Any = None,
) -> Float[Array, "B S E"]:
    """`function(state, key, x, *others)`, computed chunk by chunk; its masks of dropout are each chunk's own.

    Args:
        function: of tokens that do not see one another; it must not close over traced values.
        state: its arrays and packed weights, which are frozen.
        key: dropout key; None switches dropout off.
        x: the input in whose place the output, of the same shape and dtype, comes.
        *others: further inputs.
        size: tokens of a chunk, along the sequence, in each device's part of a row.
        decode: dtype in which the function reads packed weights, or a value of `base_compute` where its products are
            in float8; they are decoded into it before the loop. None: the function decodes them.
    """
    leaves, structure = jax.tree.flatten(state, is_leaf=lambda node: isinstance(node, Weight))
    return _by_chunks(_Call(function, structure, size, decode), key, leaves, x, others)


def _chunked(call: _Call, key: PRNGKeyArray | None, leaves: list[Any], x: Array, others: tuple[Array, ...]) -> Array:
    x, leaves = call.decoded(x, leaves, gradient=False)

    def body(y: Array, start: Array, size: int, number: Array) -> Array:
        piece = call.run(leaves, key, number, *(_cut(array, start, size) for array in (y, *apart)))
        return _put(y, piece, start)

    first, *apart = map(_parts, (x, *others))
    return call.over(first.shape[2], body, first).reshape(x.shape)


_by_chunks = jax.custom_vjp(_chunked, nondiff_argnums=(0,))


def _forward(call: _Call, *arguments: Any) -> tuple[Array, Any]:
    trains = [any(one.perturbed for one in jax.tree.leaves(leaf)) for leaf in arguments[1]]
    key, leaves, x, others = custom_vjp_primal_tree_values(arguments)
    trained = [leaf if train else None for leaf, train in zip(leaves, trains, strict=True)]
    frozen = [None if train else leaf for leaf, train in zip(leaves, trains, strict=True)]
    return _chunked(call, key, leaves, x, others), (key, trained, frozen, x, others)


def _backward(call: _Call, residuals: Any, dy: Any) -> tuple[Any, ...]:
    key, trained, frozen, x, others = residuals
    dy = jnp.zeros_like(x) if isinstance(dy, SymbolicZero) else dy
    x, frozen = call.decoded(x, frozen, gradient=True)

    def body(carry: Any, start: Array, size: int, number: Array) -> Any:
        def run(trained: list[Any], *tokens: Array) -> Array:
            leaves = [old if new is None else new for old, new in zip(frozen, trained, strict=True)]
            return call.run(leaves, key, number, *tokens)

        total, gradients = carry
        tokens = [_cut(array, start, size) for array in inputs]
        _, pull_back = jax.vjp(run, trained, *tokens)
        dtrained, *pieces = pull_back(_cut(gradients[0], start, size))
        total = jax.tree.map(lambda sums, part: sums + part.astype(jnp.float32), total, dtrained)
        return total, [_put(whole, piece, start) for whole, piece in zip(gradients, pieces, strict=True)]

    inputs = [_parts(array) for array in (x, *others)]
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), trained)
    carry = zeros, [_parts(dy), *map(jnp.zeros_like, inputs[1:])]
    total, gradients = call.over(inputs[0].shape[2], body, carry)
    dx, *dothers = (whole.reshape(array.shape) for whole, array in zip(gradients, (x, *others), strict=True))
    dtrained = jax.tree.map(lambda sums, leaf: sums.astype(leaf.dtype), total, trained)
    return None, dtrained, dx, tuple(dothers)


_by_chunks.defvjp(_forward, _backward, symbolic_zeros=True)


def _parts(array: Float[Array, "B S F"]) -> Float[Array, "B D S/D F"]:
    """The array by the devices that share a row."""
    return array.reshape(array.shape[0], devices_along(CONTEXT), -1, array.shape[-1])


def _cut(array: Float[Array, "B D S/D F"], start: Array, size: int) -> Float[Array, "B C F"]:
    piece = lax.dynamic_slice_in_dim(array, start, size, axis=2)
    return piece.reshape(array.shape[0], -1, array.shape[-1])


def _put(array: Float[Array, "B D S/D F"], piece: Float[Array, "B C F"], start: Array) -> Array:
    whole = piece.reshape(*array.shape[:2], -1, array.shape[-1])
    return lax.dynamic_update_slice_in_dim(array, whole, start, axis=2)
