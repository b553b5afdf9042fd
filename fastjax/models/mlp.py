"""The gated feed-forward block of one layer."""

from flax import nnx
from jaxtyping import Array, Float, PRNGKeyArray

from fastjax.models.projection import Projection
from pallas_kernels.glu import glu


class MLP(nnx.Module):
    """down(act(gate(x)) · up(x))  (Shazeer, arXiv 2002.05202)."""

    def __init__(self, activation: str, gate_up: Projection, down: Projection):
        self.activation, self.gate_up, self.down = activation, gate_up, down

    def __call__(self, x: Float[Array, "B S E"], key: PRNGKeyArray | None) -> Float[Array, "B S E"]:
        """The block on normalised inputs."""
        gate, up = self.gate_up(x, key)
        (out,) = self.down(glu(gate, up, activation=self.activation), key)
        return out
