"""Gated DeltaNet: a linear attention with one matrix of state a head (Yang et al., arXiv 2412.06464).

A short convolution over queries, keys and values comes before the recurrence, a normalisation with an output gate
behind it. Both stop at documents. In generation a layer keeps the matrices, and the last inputs of the convolution.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, PRNGKeyArray

from convert.model import layers
from fastjax.errors import ConfigError
from fastjax.lora.norm import PreparedRows
from fastjax.lora.params import BaseParam
from fastjax.models.context import Context, Slots
from fastjax.models.layer_inputs import LayerInputs
from fastjax.models.projection import Projection
from fastjax.parallel import BATCH, ROWS, local
from pallas_kernels.gated_delta import gated_delta, gated_delta_token
from pallas_kernels.glu import ACTIVATIONS, glu
from pallas_kernels.rms_norm import rms_norm
from pallas_kernels.short_conv import short_conv, short_conv_token

#: The convolution's weights: of queries, keys and values together, or apart.
CONVOLUTIONS = ("conv1d", "q_conv1d", "k_conv1d", "v_conv1d")
#: Added to a query's or key's sum of squares before its root.
_EPS = 1e-6


class DeltaState(NamedTuple):
    """The state of Gated DeltaNet.

    Attributes:
        matrices: of each value head, float32.
        inputs: the convolution's last inputs, the newest last.
    """

    matrices: Float[Array, "L R G P U"]
    inputs: Float[Array, "L R T C"]

    PACKS = False
    AXES = (("layers", "rows", "heads", "head_dim", "head_dim"), ("layers", "rows", "taps", "channels"))


class Weight(nnx.Module):
    """An array of the recurrence.

    Attributes:
        weight: the array.
    """

    def __init__(self, weight: Array):
        self.weight = BaseParam(weight)


class GatedDelta(nnx.Module):
    """Gated DeltaNet.

    Attributes:
        settings: its heads and sizes.
        qkvz: projection of the input to queries, keys, values and output gates.
        ba: its projection to updates and decays.
        out: projection to the output.
        convolutions: names of the convolution's weights [channels, 1, taps], which are attributes: of queries, keys and
            values together, or apart.
        dt_bias: added to the decays' input, [G].
        A_log: logarithm of the decays' factor, [G].
        norm: scale of the output's normalisation, [U].
        eps: added to its mean square.
        float32: as in `Mixer`.
        across: as in `Mixer`.
    """

    def __init__(self, settings: layers.GatedDelta, inputs: LayerInputs):
        block = settings.block
        own = inputs.weights[block]
        self.settings, self.float32 = settings, block in inputs.float32
        self.across: str | None = None
        self.qkvz, self.ba, self.out = (inputs.projection(f"{block}.{name}") for name in ("qkvz", "ba", "out"))
        self.convolutions = tuple(name for name in CONVOLUTIONS if name in own)
        for name in self.convolutions:
            setattr(self, name, Weight(own[name]["weight"]))
        self.norm = Weight(own["norm"]["weight"])
        self.dt_bias, self.A_log = Weight(own["dt_bias"]["weight"]), Weight(own["A_log"]["weight"])
        self.eps = inputs.config.norm_eps if settings.norm_eps is None else settings.norm_eps

    @property
    def inner(self) -> tuple[Projection, ...]:
        """The projections of its input."""
        return (self.qkvz, self.ba)

    @property
    def outer(self) -> tuple[Projection, ...]:
        """The projections to its output."""
        return (self.out,)

    def united(self, dtype: jnp.dtype) -> Projection | None:
        """None: two projections read its input."""
        return None

    @jax.named_scope("gated_delta")
    def __call__(
        self,
        x: Float[Array, "B S E"],
        context: Context,
        key: PRNGKeyArray | None,
        residual: Float[Array, "B S E"] | None = None,
        prepared: PreparedRows | None = None,
    ) -> Float[Array, "B S E"]:
        """The output for whole rows, as `Mixer.__call__`."""
        if self.across is not None:
            raise ConfigError(f"parallel.{self.across}: expected 1 with layers of {self.settings.block}, got more")
        documents = None
        if context.segment_ranges is not None:
            documents = _documents(context.segment_ranges.k_start, context.segment_ranges.k_end)
        mixed, gates, updates = self._projected(x.astype(jnp.float32) if self.float32 else x, key)

        def mix(mixed, updates, documents, weights):
            *taps, bias, log = weights
            heads = self._convolved(mixed, taps, segment_ids=documents)
            options = {"scale": self._scale, "segment_ids": documents}
            return gated_delta(*self._heads(heads), *self._gates(updates, bias, log), **options)[0]

        island = local(mix, in_specs=(ROWS, ROWS, P(BATCH), P()), out_specs=ROWS)
        mixed = island(mixed, updates, documents, self._weights)
        return self._out(mixed, gates, x.dtype, key, residual)

    def init(self, layers: int, batch: int, pages: tuple[int, int], dtype: jnp.dtype) -> DeltaState:
        """The state before the first token."""
        its = self.settings
        matrices = (layers, batch, its.value_heads, its.key_dim, its.value_dim)
        inputs = (layers, batch, its.taps - 1, its.sizes["2J*P+G*U"])
        dtype = jnp.dtype(jnp.float32) if self.float32 else dtype
        return DeltaState(jnp.zeros(matrices, jnp.float32), jnp.zeros(inputs, dtype))

    @jax.named_scope("gated_delta")
    def step(
        self,
        x: Float[Array, "B S E"],
        state: DeltaState,
        context: Context,
        residual: Float[Array, "B S E"] | None = None,
        prepared: PreparedRows | None = None,
    ) -> tuple[Float[Array, "B S E"], DeltaState]:
        """The output for new tokens, as `Mixer.step`; of one document a row, with padding behind its tokens."""
        slots = context.slots
        assert slots is not None and context.segment_ranges is None, "new tokens of one document go on a row"
        step = self._token if x.shape[1] == 1 else self._tokens
        out, gates, state = step(x.astype(jnp.float32) if self.float32 else x, state, slots)
        return self._out(out, gates, x.dtype, None, residual), state

    def _token(
        self, x: Float[Array, "B 1 E"], state: DeltaState, slots: Slots
    ) -> tuple[Float[Array, "B 1 G U"], Float[Array, "B 1 N"], DeltaState]:
        """The recurrence's output for one token a row, which goes on, the output's gates, and the state."""
        its, row = self.settings, (slots.layer, slots.rows[:, 0])
        whole = None if its.interleaved else self.qkvz.whole(x)
        if whole is None:
            mixed, gates, updates = self._projected(x, None)
        else:  # the gates lie behind the channels
            mixed, gates, updates = whole, whole[..., state.inputs.shape[3] :], self.ba(x, None)
        *taps, bias, log = self._weights
        given = {"activation": its.activation, "units": (2 * its.key_heads, its.key_dim), "eps": _EPS}
        heads, inputs = short_conv_token(mixed, _taps(taps), state.inputs, *row, **given)
        rate, beta = self._gates(updates, bias, log)
        out, matrices = gated_delta_token(heads, rate, beta, state.matrices, *row, scale=self._scale)
        return out, gates, DeltaState(matrices, inputs)

    def _tokens(
        self, x: Float[Array, "B S E"], state: DeltaState, slots: Slots
    ) -> tuple[Float[Array, "B S G U"], Float[Array, "B S N"], DeltaState]:
        """The same for several tokens a row."""
        mixed, gates, updates = self._projected(x, None)
        *taps, bias, log = self._weights
        before, real = DeltaState(*map(slots.state_before, state)), slots.tokens[:, :, None] != 0
        heads = self._convolved(mixed, taps, before=before.inputs)
        gated = (jnp.where(real, gate, 0.0) for gate in self._gates(updates, bias, log))  # padding leaves the state
        out, matrices = gated_delta(*self._heads(heads), *gated, scale=self._scale, state=before.matrices)
        after = matrices, _last_inputs(before.inputs, mixed, slots.tokens)
        return out, gates, DeltaState(*map(slots.with_state, state, after))

    @property
    def _scale(self) -> float:
        """Factor of the recurrence's output."""
        return self.settings.key_dim**-0.5

    @property
    def _weights(self) -> tuple[Array, ...]:
        """The convolutions' taps, the decays' bias and the logarithm of their factor."""
        return tuple(getattr(self, name).weight[...] for name in (*self.convolutions, "dt_bias", "A_log"))

    def _projected(self, x: Float[Array, "B S E"], key: PRNGKeyArray | None) -> tuple[Array, Array, tuple[Array, ...]]:
        """Queries, keys and values side by side, the gates of the output, and the inputs of update and decay."""
        its = self.settings
        if not its.interleaved:
            *mixed, gates = self.qkvz(x, key)
            return jnp.concatenate(mixed, axis=-1) if len(mixed) > 1 else mixed[0], gates, self.ba(x, key)
        (whole,), (pairs,) = self.qkvz(x, key), self.ba(x, key)
        values = its.value_heads // its.key_heads * its.value_dim
        ends = [its.key_dim, 2 * its.key_dim, 2 * its.key_dim + values]
        *mixed, gates = _by_key_heads(whole, its.key_heads, ends)
        update, decay = _by_key_heads(pairs, its.key_heads, [its.value_heads // its.key_heads])
        return jnp.concatenate(mixed, axis=-1), gates, (update, decay)

    def _convolved(
        self,
        mixed: Float[Array, "B S C"],
        taps: Sequence[Array],
        *,
        segment_ids: Int[Array, "B S"] | None = None,
        before: Float[Array, "B T C"] | None = None,
    ) -> Float[Array, "B S C"]:
        """The activated sums of the convolution; arguments as of `short_conv`."""
        silu = self.settings.activation == "silu"
        activation, options = "silu" if silu else None, {"segment_ids": segment_ids, "before": before}
        sums = short_conv(mixed, _taps(taps), activation=activation, **options)
        return sums if silu else ACTIVATIONS[self.settings.activation](sums.astype(jnp.float32)).astype(sums.dtype)

    def _gates(
        self, updates: tuple[Float[Array, "B S G"], ...], bias: Float[Array, " G"], log: Float[Array, " G"]
    ) -> tuple[Float[Array, "B S G"], Float[Array, "B S G"]]:
        """The logarithms of the decays and the updates, float32.

        Args:
            updates: inputs of update and decay.
            bias: added to the decay's.
            log: logarithm of the decay's factor.
        """
        update, decay = updates
        bias, log = (weight.astype(jnp.float32)[None, None] for weight in (bias, log))
        beta = self.settings.largest_update * jax.nn.sigmoid(update.astype(jnp.float32))
        return -jnp.exp(log) * jax.nn.softplus(decay.astype(jnp.float32) + bias), beta

    def _heads(self, heads: Float[Array, "B S C"]) -> tuple[Float[Array, "B S J P"], Array, Float[Array, "B S G U"]]:
        """Queries and keys of unit length, and values, by head."""
        its, rows = self.settings, heads.shape[:2]
        keys = its.key_heads * its.key_dim
        q, k, v = jnp.split(heads, [keys, 2 * keys], axis=-1)

        def unit(x: Array) -> Array:
            size = its.key_dim  # x / √(sum of squares + ε), with one rounding
            weight = jnp.zeros(size, jnp.float32)
            return rms_norm(x.reshape(*rows, -1, size), weight, eps=_EPS / size, offset=size**-0.5)

        return unit(q), unit(k), v.reshape(*rows, its.value_heads, its.value_dim)

    def _out(
        self,
        mixed: Float[Array, "B S G U"],
        gates: Float[Array, "B S N"],
        dtype: jnp.dtype,
        key: PRNGKeyArray | None,
        residual: Array | None,
    ) -> Float[Array, "B S E"]:
        """The projection of the normalised and gated output, added to the residual stream where there is one."""
        normed = rms_norm(mixed, self.norm.weight[...], eps=self.eps)
        out = glu(gates.reshape(mixed.shape), normed.astype(gates.dtype), activation="silu")
        out = out.reshape(*out.shape[:2], -1)
        if residual is None or set(self.out.dtypes(out.dtype)) == {residual.dtype}:
            (out,) = self.out(out, key, residual=residual)
            return out.astype(dtype)
        (out,) = self.out(out, key)
        return residual + out.astype(dtype)


def _taps(parts: Sequence[Float[Array, "C 1 T"]]) -> Float[Array, "C T"]:
    """The convolutions' taps, as of one."""
    return jnp.concatenate(parts)[:, 0]


def _by_key_heads(x: Float[Array, "B S N"], heads: int, ends: list[int]) -> list[Float[Array, "B S M"]]:
    """Parts of each key head's features, of all heads side by side."""
    parts = jnp.split(x.reshape(*x.shape[:2], heads, -1), ends, axis=-1)
    return [part.reshape(*x.shape[:2], -1) for part in parts]


def _documents(start: Int[Array, "B S"], end: Int[Array, "B S"]) -> Int[Array, "B S"]:
    """A number of each token's document from the places where it starts and ends, 0 of padding."""
    return jnp.where(end > start, start + 1, 0)


def _last_inputs(
    before: Float[Array, "B T C"], new: Float[Array, "B S C"], tokens: Int[Array, "B S"]
) -> Float[Array, "B T C"]:
    """The last T inputs, of those before and the new ones, with padding behind them.

    Args:
        before: the last ones before.
        new: the new ones.
        tokens: 0 of padding.
    """
    every = jnp.concatenate([before, new.astype(before.dtype)], axis=1)
    count = jnp.sum(tokens != 0, axis=1, dtype=jnp.int32)
    places = count[:, None] + jnp.arange(before.shape[1], dtype=jnp.int32)[None]
    return jnp.take_along_axis(every, places[:, :, None], axis=1)
