"""The gated feed-forward block of one layer."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, PRNGKeyArray

from fastjax.lora.linear import describe, matrices_of
from fastjax.lora.mlp import Arrays, Block, gated_block
from fastjax.models.projection import Projection
from fastjax.residuals import keep
from pallas_kernels.glu import glu


class MLP(nnx.Module):
    """down(act(gate(x)) · up(x))  (Shazeer, arXiv 2002.05202).

    Attributes:
        activation: Hugging Face's name of act.
        gate_up: the two projections of the input, or one to both, gate first.
        down: the projection back.
        float32: whether all of it is computed in float32, whatever the input's dtype.
    """

    def __init__(self, activation: str, gate_up: Projection, down: Projection, float32: bool = False):
        self.activation, self.gate_up, self.down, self.float32 = activation, gate_up, down, float32

    def __call__(self, x: Float[Array, "B S E"], key: PRNGKeyArray | None) -> Float[Array, "B S E"]:
        """The block on normalised inputs."""
        inner = x.astype(jnp.float32) if self.float32 else x
        if self.apart(inner.dtype) is None:
            return self._unit(inner, key).astype(x.dtype)
        parts = self.gate_up(inner, key)
        gate, up = parts if len(parts) == 2 else jnp.split(parts[0], 2, axis=-1)
        (out,) = self.down(glu(gate, up, activation=self.activation), key)
        return out.astype(x.dtype)

    def apart(self, dtype: jnp.dtype) -> str | None:
        """Why the block is not one unit with its adapters, as a clause; None: it is.

        Args:
            dtype: of the block's input.
        """
        adapters = [*self.gate_up.adapters.values(), *self.down.adapters.values()]
        if not adapters:
            return "no adapter is in it"
        if any(adapter.magnitude is not None for adapter in adapters):
            return "DoRA scales the projections' results"
        if len({*self.gate_up.dtypes(dtype), *self.down.dtypes(dtype)}) > 1:
            return "its projections are computed in different dtypes"
        return None

    def block(self) -> Block:
        """What the unit knows of the block while tracing."""
        return Block(
            self.activation,
            describe(self.gate_up.parts, self.gate_up.adapters),
            *describe(self.down.parts, self.down.adapters),
        )

    def _unit(self, x: Float[Array, "B S E"], key: PRNGKeyArray | None) -> Float[Array, "B S E"]:
        dtype = self.down.dtypes(x.dtype)[0]
        bias = None if self.gate_up.bias is None else self.gate_up.bias[...]
        matrices = matrices_of({**self.gate_up.adapters, **self.down.adapters})
        arrays = Arrays(self.gate_up.weight.get_value(), bias, self.down.weight.get_value(), matrices, key)
        out = gated_block(self.block(), x.astype(dtype), arrays)
        if self.down.bias is not None:
            out = out + self.down.bias[...].astype(dtype)[None, None, :]
        return keep(out, "projection")
