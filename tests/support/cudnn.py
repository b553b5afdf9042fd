"""A stand-in for cuDNN's attention on machines without a GPU: its two custom calls in NumPy.

Arrays have the layout of `fused_attention_stablehlo`.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.cudnn import fused_attention_stablehlo as fused


def install(monkeypatch):
    """Replace cuDNN by the stand-in; returns the list of its calls, each ("fwd" or "bwd", operands, parameters)."""
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

    for direction, *parts in (("fwd", _forward, _forward_results), ("bwd", _backward, _backward_results)):
        name = f"_dot_product_attention_{direction}_p_wrapper"
        monkeypatch.setattr(fused, name, Primitive(direction, *parts))
    return calls


def _forward_results(q, k, v, *_):
    lse = jax.ShapeDtypeStruct((q.shape[0], q.shape[2], q.shape[1]), jnp.float32)
    return jax.ShapeDtypeStruct((*q.shape[:3], v.shape[3]), q.dtype), lse


def _backward_results(q, k, v, *_):
    return tuple(jax.ShapeDtypeStruct(array.shape, array.dtype) for array in (q, k, v))


def _shared(q, *arrays):
    """Keys, or values, for each query head."""
    return [np.repeat(array, q.shape[2] // array.shape[2], axis=2) for array in arrays]


def _weights(q, k, bias, lse=None, *, scale, mask_type, sliding_window_length, **_):
    """Weights [B, H, S, T] and the log-sum-exp."""
    logits = np.einsum("bshd,bthd->bhst", q, k) * scale
    if bias.size:
        logits = logits + bias
    if mask_type == fused.MaskType.CAUSAL:
        logits = np.where(np.tri(*logits.shape[2:], dtype=bool), logits, -np.inf)
    if sliding_window_length is not None:
        assert mask_type == fused.MaskType.CAUSAL and not bias.size
        logits = np.where(np.tri(*logits.shape[2:], -sliding_window_length, dtype=bool), -np.inf, logits)
    lse = np.logaddexp.reduce(logits, axis=-1) if lse is None else lse
    assert not np.any(np.isnan(lse))
    return np.exp(logits - lse[..., None]), lse


def _forward(q, k, v, bias, *others, **parameters):
    assert parameters["is_training"] and parameters["dropout_rate"] == 0.0
    k, v = _shared(q, k, v)
    weights, lse = _weights(q, k, bias, **parameters)
    return np.einsum("bhst,bthd->bshd", weights, v), lse


def _backward(q, k, v, bias, *others, **parameters):
    lse, out, dout = others[6:]
    kv_heads = k.shape[2]
    k, v = _shared(q, k, v)
    weights, _ = _weights(q, k, bias, lse, **parameters)
    delta = np.einsum("bshd,bshd->bhs", dout, out)
    dweights = np.einsum("bshd,bthd->bhst", dout, v)
    dlogits = weights * (dweights - delta[..., None]) * parameters["scale"]

    def summed(per_head):
        batch, keys, _, size = per_head.shape
        return per_head.reshape(batch, keys, kv_heads, -1, size).sum(axis=3)

    dq = np.einsum("bhst,bthd->bshd", dlogits, k)
    return dq, summed(np.einsum("bhst,bshd->bthd", dlogits, q)), summed(np.einsum("bhst,bshd->bthd", weights, dout))
