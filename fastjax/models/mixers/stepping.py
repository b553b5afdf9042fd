"""A mixer that takes steps in the place of passes over whole rows."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from fastjax.lora.norm import Made
from fastjax.models.context import Context
from fastjax.models.mixers import Mixer
from fastjax.models.projection import Projection


class Stepping:
    """A mixer in the place of another, which takes steps.

    Attributes:
        mixer: the other.
        state: its state, replaced by each call.
    """

    def __init__(self, mixer: Mixer, state: Any):
        self.mixer, self.state = mixer, state

    def united(self, dtype: jnp.dtype) -> Projection | None:
        """As of `Mixer`."""
        return self.mixer.united(dtype)

    def __call__(
        self,
        x: Float[Array, "B S E"],
        context: Context,
        key: PRNGKeyArray | None,
        residual: Float[Array, "B S E"] | None = None,
        made: Made | None = None,
    ) -> Float[Array, "B S E"]:
        """As of `Mixer`, for new tokens."""
        out, self.state = self.mixer.step(x, self.state, context, residual, made)
        return out
