"""A stand-in for cuDNN's attention on machines without a GPU: its two custom calls in NumPy.

Outputs that cuDNN leaves unwritten (tokens of no document) are NaN, and inputs that it ignores may be anything, so
tests catch a caller that relies on either. Arrays have the layout of `fused_attention_stablehlo`.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.cudnn import fused_attention_stablehlo as fused


def install(monkeypatch):
    """Replace cuDNN by the stand-in; returns the list of its calls, each (name, operands, parameters)."""
    calls = []

    class Primitive:
        def __init__(self, name, function, results):
            self.name, self.function, self.results = name, function, results

        def bind(self, *operands, **parameters):
            calls.append((self.name, operands, parameters))
            results = self.results(*operands)

            def run(*arrays):
                wide = [np.asarray(a, np.float64 if jnp.issubdtype(a.dtype, jnp.floating) else a.dtype) for a in arrays]
                found = self.function(*wide, **parameters)
                return tuple(array.astype(result.dtype) for array, result in zip(found, results, strict=True))

            return jax.pure_callback(run, results, *operands)

    for suffix in ("", "_wrapper"):
        for direction, *parts in (("fwd", _forward, _forward_results), ("bwd", _backward, _backward_results)):
            name = f"_dot_product_attention_{direction}_p{suffix}"
            monkeypatch.setattr(fused, name, Primitive(name, *parts))
    return calls


def _forward_results(q, k, v, bias, q_seqlen, kv_seqlen, q_offsets, *_):
    most = q_offsets.shape[1] - 1 if q_offsets.ndim == 2 else 1
    return (
        jax.ShapeDtypeStruct((*q.shape[:3], v.shape[3]), q.dtype),
        jax.ShapeDtypeStruct((q.shape[0] * most, q.shape[2], q.shape[1]), jnp.float32),
    )


def _backward_results(q, k, v, *_):
    return tuple(jax.ShapeDtypeStruct(array.shape, array.dtype) for array in (q, k, v))


def _sequences(q, k, q_seqlen, kv_seqlen, q_offsets, kv_offsets, *, mask_type, **_):
    """(place in the list, row of q and k, queries, keys) of every sequence; rows joined where there is a list."""
    padded = mask_type in (fused.MaskType.PADDING, fused.MaskType.PADDING_CAUSAL)
    if not padded:
        return [(row, row, slice(0, q.shape[1]), slice(0, k.shape[1])) for row in range(q.shape[0])]
    most = q_offsets.shape[1] - 1
    assert most > 1 and q_seqlen.shape == kv_seqlen.shape == (q.shape[0], most)
    found = []
    per_query, per_key = q.shape[2] * q.shape[3], k.shape[2] * k.shape[3]
    lists = (q_seqlen, kv_seqlen, q_offsets, kv_offsets)
    for number, (queries, keys, q_start, k_start) in enumerate(
        zip(*(np.asarray(a, np.int64).reshape(-1)[: q.shape[0] * most] for a in lists), strict=True)
    ):
        if queries > 0:
            q_start, k_start = q_start // per_query, k_start // per_key
            found.append((number, None, slice(q_start, q_start + queries), slice(k_start, k_start + keys)))
    return found


def _of(array, row, part):
    return array[row, part] if row is not None else array.reshape(-1, *array.shape[2:])[part]


def _weights(q, k, bias, row, *, scale, mask_type, sliding_window_length, statistics=None, **_):
    """Weights [H, queries, keys] of one sequence and its log-sum-exp."""
    k = np.repeat(k, q.shape[1] // k.shape[1], axis=1)
    logits = np.einsum("shd,thd->hst", q, k) * scale
    if bias.size:
        logits = logits + bias[row]
    if mask_type in (fused.MaskType.CAUSAL, fused.MaskType.PADDING_CAUSAL):
        logits = np.where(np.tri(*logits.shape[1:], dtype=bool), logits, -np.inf)
    if sliding_window_length is not None:
        assert mask_type == fused.MaskType.CAUSAL and not bias.size
        logits = np.where(np.tri(*logits.shape[1:], -sliding_window_length, dtype=bool), -np.inf, logits)
    if statistics is None:
        statistics = np.logaddexp.reduce(logits, axis=-1)
    assert not np.any(np.isnan(statistics))
    return np.exp(logits - statistics[..., None]), statistics


def _forward(q, k, v, bias, *others, **parameters):
    assert parameters["is_training"] and parameters["dropout_rate"] == 0.0
    lists = others[:4]
    out, statistics = (np.full(result.shape, np.nan) for result in _forward_results(q, k, v, bias, *others))
    for number, row, queries, keys in _sequences(q, k, *lists, **parameters):
        weights, lse = _weights(_of(q, row, queries), _of(k, row, keys), bias, row, **parameters)
        values = np.repeat(_of(v, row, keys), q.shape[2] // k.shape[2], axis=1)
        _of(out, row, slice(None))[queries] = np.einsum("hst,thd->shd", weights, values)
        statistics[number, :, : lse.shape[1]] = lse
    return out, statistics


def _backward(q, k, v, bias, *others, **parameters):
    lists, (statistics, out, dout) = others[:4], others[6:]
    gradients = [np.full(a.shape, np.nan) for a in (q, k, v)]
    group = q.shape[2] // k.shape[2]
    for number, row, queries, keys in _sequences(q, k, *lists, **parameters):
        one_q, one_out, one_dout = (_of(a, row, queries) for a in (q, out, dout))
        one_k, one_v = _of(k, row, keys), _of(v, row, keys)
        known = statistics[number][:, : one_q.shape[0]]
        weights, _lse = _weights(one_q, one_k, bias, row, statistics=known, **parameters)
        delta = np.einsum("shd,shd->hs", one_dout, one_out)
        dweights = np.einsum("shd,thd->hst", one_dout, np.repeat(one_v, group, axis=1))
        dlogits = weights * (dweights - delta[..., None]) * parameters["scale"]

        def shared(per_head):
            return per_head.reshape(per_head.shape[0], -1, group, per_head.shape[2]).sum(axis=2)

        dq = np.einsum("hst,thd->shd", dlogits, np.repeat(one_k, group, axis=1))
        dk = shared(np.einsum("hst,shd->thd", dlogits, one_q))
        dv = shared(np.einsum("hst,shd->thd", weights, one_dout))
        for gradient, part, found in zip(gradients, (queries, keys, keys), (dq, dk, dv), strict=True):
            _of(gradient, row, slice(None))[part] = found
    return tuple(gradients)
