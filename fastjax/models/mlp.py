"""The gated feed-forward block of one layer."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, PRNGKeyArray

from fastjax.models.projection import Projection
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
        parts = self.gate_up(x.astype(jnp.float32) if self.float32 else x, key)
        gate, up = parts if len(parts) == 2 else jnp.split(parts[0], 2, axis=-1)
        (out,) = self.down(glu(gate, up, activation=self.activation), key)
        return out.astype(x.dtype)
