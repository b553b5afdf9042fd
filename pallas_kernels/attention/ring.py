"""Causal attention of rows whose tokens lie on several devices: a ring (Liu et al., arXiv 2310.01889).

Queries stay where they are; keys and values travel from device to device, and the result over each device's keys is
joined to the others by the log-sum-exp of its logits, in float32. The backward pass sends keys and values round once
more, and their gradients with them, which come home after the last step.

A row is cut into 2n parts for n devices, and device i holds parts i and 2n-1-i ("zig-zag", as in Llama 3's training,
arXiv 2407.21783), so that causality gives all devices the same work: its own tokens, which are in order and take a
causal call, and with the keys of each other device exactly two pairs of parts of which one lies wholly before the
other, in one call over both. What no query may see is not computed. Documents and a sliding window are ranges of keys a
query (`ranges`), in places of the whole row, and are cut to a pair's own.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from pallas_kernels.attention import config
from pallas_kernels.attention.api import REGISTRY, choose_pair
from pallas_kernels.attention.call import Call, Cotangents, Mask, Operands, Options
from pallas_kernels.attention.ranges import SegmentRanges, ordered
from pallas_kernels.transformations import custom_vjp


def ring_attention(
    q: Float[Array, "B C H D"],
    k: Float[Array, "B C K D"],
    v: Float[Array, "B C K Dv"],
    *,
    axis: str,
    segment_ranges: SegmentRanges | None = None,
    sliding_window: int | None = None,
    logits_soft_cap: float | None = None,
    sinks: Float[Array, " H"] | None = None,
    scale: float | None = None,
    implementation: str | tuple[str | None, str | None] | None = None,
) -> Float[Array, "B C H Dv"]:
    """Causal attention over whole rows, inside a shard_map.

    Args:
        q: queries of this device's two parts of each row, C = S/n tokens.
        k: their keys.
        v: their values.
        axis: the mesh axis over which the rows lie.
        segment_ranges: of the whole rows, S tokens in their order; None: each is one document.
        sliding_window: as in `attention`.
        logits_soft_cap: as in `attention`.
        sinks: as in `attention`.
        scale: as in `attention`.
        implementation: as in `attention`; of all calls on pairs of parts.

    Returns:
        The weighted values of this device's queries; differentiable in q, k, v and sinks.

    Raises:
        ValueError: a number of tokens that is not two equal parts.
        NotImplementedError: the forced implementation cannot serve the calls of a pair of parts.
    """
    if q.shape[1] % 2:
        raise ValueError(f"ring_attention: expected two equal parts of a row on each device, got {q.shape[1]} tokens")
    options = Options(q.shape[3] ** -0.5 if scale is None else scale, True, None, logits_soft_cap, 0.0, 0)
    bounds = _bounds(q, segment_ranges, sliding_window, lax.axis_size(axis) * q.shape[1])
    ring = _Ring(axis, options, config.forced() if implementation is None else implementation)
    return _attend(q, k, v, bounds, sinks, ring)  # pyright: ignore[reportReturnType]


class _Bounds(NamedTuple):
    """Places of the whole row, int32 [B, S]: each query's keys [k_low, k_high), each key's queries [q_low, q_high)."""

    k_low: Array
    k_high: Array
    q_low: Array
    q_high: Array


class _Ring(NamedTuple):
    """The static part of a call: mesh axis, options of the causal call, forced implementation."""

    axis: str
    options: Options
    implementation: Any


def _bounds(q: Array, ranges: SegmentRanges | None, window: int | None, length: int) -> _Bounds | None:
    """The part of each row that documents and window leave, beside causality; None: all of it."""
    if ranges is None and window is None:
        return None
    place = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32)[None], (q.shape[0], length))
    if ranges is None:
        bounds = _Bounds(jnp.zeros_like(place), jnp.full_like(place, length), jnp.zeros_like(place), place + length)
    else:
        bounds = _Bounds(ranges.k_start, ranges.k_end, ranges.q_start, ranges.q_end)
    if window is None:
        return bounds
    low = jnp.minimum(jnp.maximum(bounds.k_low, place - (window - 1)), bounds.k_high)
    high = jnp.maximum(jnp.minimum(bounds.q_high, place + window), bounds.q_low)
    return bounds._replace(k_low=low, q_high=high)


class _Step(NamedTuple):
    """Whose keys a device has in a step of the ring.

    Attributes:
        here: the device, int32 []; it has parts `here` and 2n-1-`here`.
        there: the device that the keys are of.
        devices: n.
    """

    here: Array
    there: Array
    devices: int

    @property
    def earlier(self) -> Array:
        """Whether the other's first part is the earlier one, so that its second part is the later one."""
        return self.there < self.here

    def next(self) -> "_Step":
        """The step after this one."""
        return self._replace(there=(self.there - 1) % self.devices)

    def parts(self, device: Array) -> tuple[Array, Array]:
        """The parts that a device has."""
        return device, 2 * self.devices - 1 - device


class _Queries(NamedTuple):
    """The arrays of the queries, the tokens on axis 1; the last four in the backward pass.

    Attributes:
        q: [B, C, H, D].
        lse: of the whole row's logits, [B, C, H]; +inf for a query that sees nothing.
        delta: rowsum(dout ∘ out), [B, C, H].
        dout: gradient of the output, [B, C, H, Dv].
        out: the output.
    """

    q: Array
    lse: Array | None = None
    delta: Array | None = None
    dout: Array | None = None
    out: Array | None = None


@custom_vjp(nondiff_argnums=(5,))
def _attend(q, k, v, bounds, sinks, ring: _Ring) -> Array:
    return _forward(q, k, v, bounds, sinks, ring)[0]


def _forward(q, k, v, bounds, sinks, ring: _Ring):
    step, coming = _first_step(ring.axis), (k, v)
    total, lse = None, None
    for number in range(step.devices):
        keys, total, lse = lax.optimization_barrier((coming, total, lse))  # no keys travel ahead of the steps
        if number + 1 < step.devices:
            coming = _passed_on(keys, ring.axis)  # under way while this step computes
        if total is None or lse is None:
            out, row_lse = _call(_Queries(q), keys, _own_mask(bounds, step, q), ring, sinks)
            total, lse = out.astype(jnp.float32), row_lse
        else:
            queries, pairs = _pairs(_Queries(q), keys, step)
            out, row_lse = _call(queries, pairs, _mask_of_pairs(bounds, step, q), _uncausal(ring))
            shares = _places(out.astype(jnp.float32), step, 0.0), _places(row_lse, step, -jnp.inf)
            for share in zip(*shares, strict=True):
                total, lse = _joined((total, lse), share)
        step = step.next()
    assert total is not None and lse is not None
    lse = jnp.where(lse == -jnp.inf, jnp.inf, lse).transpose(0, 2, 1)
    results = lax.optimization_barrier((total.astype(q.dtype), lse))
    out, lse = (checkpoint_name(*pair) for pair in zip(results, config.SAVEABLE_NAMES, strict=True))
    return out, (q, k, v, bounds, sinks, out, lse)


def _backward(ring: _Ring, residuals, dout):
    q, k, v, bounds, sinks, out, lse = residuals
    lse = lse.transpose(0, 2, 1)
    delta = jnp.sum(dout.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
    rows = _Queries(q, lse, delta, dout, out)
    step, coming = _first_step(ring.axis), (k, v)
    dq, dkeys = None, None
    for number in range(step.devices):
        keys, dq, dkeys = lax.optimization_barrier((coming, dq, dkeys))
        if number + 1 < step.devices:
            coming = _passed_on(keys, ring.axis)
        if dq is None or dkeys is None:
            gradients = _gradients(rows, keys, _own_mask(bounds, step, q), ring, sinks)
            dq, *dkeys = (gradient.astype(jnp.float32) for gradient in gradients)
        else:
            arriving = _passed_on(tuple(dkeys), ring.axis)  # those of the keys that are here now, from steps before
            queries, pairs = _pairs(rows, keys, step)
            gradients = _gradients(queries, pairs, _mask_of_pairs(bounds, step, q), _uncausal(ring))
            wide = [gradient.astype(jnp.float32) for gradient in gradients]
            dq = dq + sum(_places(wide[0], step, 0.0))
            shares = (sum(_places(gradient, step, 0.0, keys=True)) for gradient in wide[1:])
            dkeys = [before + share for before, share in zip(arriving, shares, strict=True)]
        step = step.next()
    assert dq is not None and dkeys is not None
    dk, dv = _passed_on(tuple(dkeys), ring.axis) if step.devices > 1 else dkeys
    dsinks = None
    if sinks is not None:
        weights = jnp.exp(sinks.astype(jnp.float32)[None, None] - lse)
        dsinks = -jnp.sum(weights * delta, axis=(0, 1)).astype(sinks.dtype)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None, dsinks


_attend.defvjp(_forward, _backward)


def _first_step(axis: str) -> _Step:
    here = lax.axis_index(axis)
    return _Step(here, here, lax.axis_size(axis))


def _passed_on(arrays: tuple[Array, ...], axis: str) -> tuple[Array, ...]:
    """The arrays of the device before this one in the ring."""
    devices = lax.axis_size(axis)
    return lax.ppermute(arrays, axis, [(device, (device + 1) % devices) for device in range(devices)])


def _uncausal(ring: _Ring) -> _Ring:
    return ring._replace(options=dataclasses.replace(ring.options, causal=False))


def _pairs(rows: _Queries, keys: tuple[Array, ...], step: _Step) -> tuple[_Queries, tuple[Array, ...]]:
    """Two pairs of parts along the batch axis, the keys' part before the queries' in both.

    The second part of a device comes after the first one of any other. The other pair is the two first parts where the
    keys' is the earlier one, else the two second parts.
    """

    def queries(array: Array) -> Array:
        first, second = jnp.split(array, 2, axis=1)
        return jnp.concatenate([second, jnp.where(step.earlier, first, second)])

    def of_keys(array: Array) -> Array:
        first, second = jnp.split(array, 2, axis=1)
        return jnp.concatenate([first, jnp.where(step.earlier, first, second)])

    return jax.tree.map(queries, rows), tuple(map(of_keys, keys))


def _places(results: Array, step: _Step, empty: float, *, keys: bool = False) -> tuple[Array, Array]:
    """The results of `_pairs` in the places of their queries, or keys: those of each pair, `empty` elsewhere."""
    one, other = jnp.split(results, 2)
    nothing = jnp.full_like(one, empty)
    pairs = (one, nothing) if keys else (nothing, one)
    first = jnp.where(step.earlier, other, nothing)
    second = jnp.where(step.earlier, nothing, other)
    return jnp.concatenate(pairs, axis=1), jnp.concatenate([first, second], axis=1)


def _joined(total: tuple[Array, Array], share: tuple[Array, Array]) -> tuple[Array, Array]:
    """Weighted values and log-sum-exp over both sets of keys, float32 [B, C, H, Dv] and [B, C, H]."""
    (left, left_lse), (right, right_lse) = total, share
    lse = jnp.logaddexp(left_lse, right_lse)
    sees = lse != -jnp.inf
    weights = (jnp.where(sees, jnp.exp(part - jnp.where(sees, lse, 0.0)), 0.0) for part in (left_lse, right_lse))
    left_weight, right_weight = (weight[..., None] for weight in weights)
    return left * left_weight + right * right_weight, lse


def _own_mask(bounds: _Bounds | None, step: _Step, q: Array) -> Mask:
    """The mask of a device's own parts, which are one row of two parts, in order."""
    size, parts = q.shape[1] // 2, step.parts(step.here)
    return _mask(bounds, size, parts, parts, causal=True)


def _mask_of_pairs(bounds: _Bounds | None, step: _Step, q: Array) -> Mask:
    """The mask of `_pairs`, which are rows of one part each."""
    size = q.shape[1] // 2
    (first, second), (first_key, second_key) = step.parts(step.here), step.parts(step.there)
    one = _mask(bounds, size, (second,), (first_key,), causal=False)
    queries, keys = jnp.where(step.earlier, first, second), jnp.where(step.earlier, first_key, second_key)
    other = _mask(bounds, size, (queries,), (keys,), causal=False)
    ranges = jax.tree.map(lambda *each: jnp.concatenate(each), one.ranges, other.ranges)
    return one._replace(ranges=ranges)


def _mask(bounds: _Bounds | None, size: int, queries: tuple[Array, ...], keys: tuple[Array, ...], *, causal: bool):
    """The mask of the queries of some parts and the keys of some, side by side in their order."""
    offset = jnp.zeros((1,), jnp.int32)
    if bounds is None:
        return Mask(None, None, None, offset)

    def own(array: Array, parts: tuple[Array, ...]) -> Array:
        return jnp.concatenate([lax.dynamic_slice_in_dim(array, p * size, size, axis=1) for p in parts], axis=1)

    def among(places: Array, parts: tuple[Array, ...]) -> Array:
        return sum((jnp.clip(places - p * size, 0, size) for p in parts), jnp.zeros_like(places))

    k_start, k_end = (among(own(edge, queries), keys) for edge in (bounds.k_low, bounds.k_high))
    q_start, q_end = (among(own(edge, keys), queries) for edge in (bounds.q_low, bounds.q_high))
    return Mask(ordered(k_start, k_end, q_start, q_end, causal=causal), None, None, offset)


def _chosen(rows: _Queries, keys: tuple[Array, ...], mask: Mask, ring: _Ring, sinks: Array | None) -> tuple[str, str]:
    """The names of the implementations of one call."""
    k, v = keys
    about: Any = {"documents": mask.ranges is not None, "sinks": sinks is not None}
    return choose_pair(ring.implementation, Call(rows.q, k, v, ring.options, **about))


def _call(rows: _Queries, keys: tuple[Array, ...], mask: Mask, ring: _Ring, sinks: Array | None = None):
    """Output, and log-sum-exp [B, C, H] with -inf for a query that sees nothing."""
    forward, _ = _chosen(rows, keys, mask, ring, sinks)
    k, v = keys
    out, lse = REGISTRY[forward].forward(Operands(rows.q, k, v, mask, sinks, None), ring.options)
    lse = lse.transpose(0, 2, 1)
    return out, jnp.where(lse == jnp.inf, -jnp.inf, lse)


def _gradients(rows: _Queries, keys: tuple[Array, ...], mask: Mask, ring: _Ring, sinks: Array | None = None):
    """Gradients of the queries, keys and values of one call, whose weights follow from the whole row's log-sum-exp."""
    _, backward = _chosen(rows, keys, mask, ring, sinks)
    assert rows.lse is not None and rows.delta is not None
    assert rows.dout is not None and rows.out is not None
    (k, v), (lse, delta) = keys, (array.transpose(0, 2, 1) for array in (rows.lse, rows.delta))
    operands, cotangents = Operands(rows.q, k, v, mask, None, None), Cotangents(lse, delta, rows.dout, rows.out)
    return REGISTRY[backward].backward(operands, cotangents, ring.options)
