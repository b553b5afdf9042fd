"""Models computed by `fastjax.lora.reference`: plain sums in place of the units."""

import jax.numpy as jnp

from fastjax.lora import reference
from fastjax.models.mixers.attention import Attention
from fastjax.models.mlp import MLP
from pallas_kernels.glu.reference import ACTIVATIONS


def mlp(block, x, key):
    """A whole `fastjax.models.mlp.MLP`."""
    if block.why_not_fused(x.dtype) is None:
        y = reference.gated_block(block.block(), x, block.operands(key))
        return y if block.down.bias is None else y + block.down.bias[...].astype(x.dtype)[None, None]

    def projection(module, x):
        whole = reference.project(module.parts, module.weight.get_value(), module.adapters, x, key)
        return whole if module.bias is None else whole + module.bias[...].astype(x.dtype)[None, None]

    wide = jnp.float64 if x.dtype == jnp.float64 else jnp.float32
    act, hidden = ACTIVATIONS[block.activation], projection(block.gate_up, x).astype(wide)
    if not block.gated:
        return projection(block.down, act(hidden).astype(x.dtype))
    gate, up = jnp.split(hidden, 2, axis=-1)
    return projection(block.down, (act(gate) * up).astype(x.dtype))


def everywhere(monkeypatch):
    """Replace the units by it."""

    def project(*arguments):
        *arguments, tokens = arguments
        assert not tokens.shared
        return reference.project(*arguments)

    monkeypatch.setattr("fastjax.models.projection.project", project)
    for module in (MLP, Attention):
        monkeypatch.setattr(module, "why_not_fused", lambda self, *case: "the test says so")
