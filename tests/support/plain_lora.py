"""LoRA as the papers write it, in plain jax.numpy, differentiated by JAX: what the units must equal.

Every adapter is a sum of its own beside its projection, in any dtype, float64 included. `everywhere` puts it in the
place of the units of a whole model.
"""

import jax
import jax.numpy as jnp

from fastjax.lora.dropout import drop
from fastjax.models.mlp import MLP
from fastjax.quantization import dense, matmul
from fastjax.quantization.weights import linear
from pallas_kernels.glu.reference import ACTIVATIONS


def product(x, weight):
    """x·Wᵀ; in float64 with what a packed weight decodes to."""
    if x.dtype == jnp.float64:
        decoded = dense(weight, jnp.float32) if not isinstance(weight, jax.Array) else weight
        return jnp.einsum("...i,oi->...o", x, decoded.astype(jnp.float64), precision="highest")
    return matmul(x, weight)


def dropped(x, key, name, rate):
    """`fastjax.lora.drop`, with the same mask where numbers are drawn in 64 bits."""
    if x.dtype != jnp.float64 or key is None or rate == 0.0:
        return drop(x, key, name, rate)
    with jax.enable_x64(False):
        mask = drop(jnp.ones(x.shape, jnp.float32), key, name, rate) > 0
    return jnp.where(mask, x / (1.0 - rate), 0.0)


def project(sizes, weight, adapters, x, key, given=None):
    """`fastjax.lora.linear.project`."""
    whole, outputs, start = product(x, weight), [], 0
    wide = jnp.float64 if x.dtype == jnp.float64 else jnp.float32
    for name, rows in sizes:
        here = slice(start, start + rows)
        start += rows
        base = whole[..., here]
        if name not in adapters:
            outputs.append(base)
            continue
        adapter = adapters[name]
        a, b = adapter.lora_A[...].astype(wide), adapter.lora_B[...].astype(wide)
        read = dropped(x, key, name, adapter.dropout) if given is None else given
        delta = linear(linear(read, a), b * adapter.scaling)
        if adapter.magnitude is None:
            outputs.append(base + delta)
            continue
        full = dense(weight, jnp.float32)[here].astype(wide) + adapter.scaling * linear(b, a.T)
        norm = jax.lax.stop_gradient(jnp.linalg.norm(full, axis=1))
        scale = (adapter.magnitude[...].astype(wide) / norm).astype(x.dtype)[None, None, :]
        inner = base if read is x else product(read, weight)[..., here]
        outputs.append(base + (scale - 1) * inner + scale * delta)
    return tuple(outputs)


def mlp(block, x, key):
    """A whole `fastjax.models.mlp.MLP`."""
    wide = jnp.float64 if x.dtype == jnp.float64 else jnp.float32

    def projection(module, x):
        parts = project(module.parts, module.weight.get_value(), module.adapters, x, key)
        both = jnp.concatenate(parts, axis=-1)
        return both if module.bias is None else both + module.bias[...].astype(x.dtype)[None, None]

    gate, up = jnp.split(projection(block.gate_up, x).astype(wide), 2, axis=-1)
    return projection(block.down, (ACTIVATIONS[block.activation](gate) * up).astype(x.dtype))


def everywhere(monkeypatch):
    """Put it in the place of the units."""
    monkeypatch.setattr("fastjax.models.projection.project", project)
    monkeypatch.setattr(MLP, "why_not_fused", lambda self, dtype: "the test says so")
