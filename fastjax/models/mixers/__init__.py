"""Mixers: the part of a layer that moves values between the tokens of a row.

A mixer is a module that computes whole rows of documents in training, and in generation a few new tokens after those
whose `LayerState` it is given. A new kind is a class of settings with the name of its block (`convert.model.layers`),
rows of weights in its families' tables, a module, and an entry in `MIXERS`.
"""

from collections.abc import Callable
from typing import Any, ClassVar, Protocol

import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from convert.model import layers
from fastjax.lora.norm import PreparedRows
from fastjax.models.context import Context
from fastjax.models.layer_inputs import LayerInputs
from fastjax.models.mixers.attention import Attention
from fastjax.models.mixers.gated_delta import GatedDelta
from fastjax.models.mixers.latent import LatentAttention
from fastjax.models.projection import Projection


class LayerState(Protocol):
    """The state that the layers of a stack keep of the tokens so far, a pytree.

    Attributes:
        AXES: the names of each leaf's axes: "layers" first, then "rows" where each row has its own (`Slots.rows`), or
            "pages", which a table gives the rows; "page", the places of a page; and logical axes of weights.
        PACKS: whether new tokens of several rows may stand in one.
    """

    AXES: ClassVar[tuple[tuple[str, ...], ...]]
    PACKS: ClassVar[bool]


class Mixer(Protocol):
    """A mixer of tokens, causal and within documents; a call is of whole rows.

    Attributes:
        float32: whether all of it is computed in float32, whatever the input's dtype.
        across: the mesh axis along which a row's tokens lie on several devices; None: whole rows. An execution sets it.
    """

    float32: bool
    across: str | None

    def united(self, dtype: jnp.dtype) -> Projection | None:
        """The projection of its input that takes what `lora.norm` prepares; None: there is none.

        Args:
            dtype: of the input.
        """
        ...

    def __call__(
        self,
        x: Float[Array, "B S E"],
        context: Context,
        key: PRNGKeyArray | None,
        residual: Float[Array, "B S E"] | None = None,
        prepared: PreparedRows | None = None,
    ) -> Float[Array, "B S E"]:
        """The output.

        Args:
            x: normalised inputs.
            context: of all layers.
            key: the layer's dropout key; None switches dropout off.
            residual: the residual stream, to which the output is added; None: the output is returned alone.
            prepared: x as `lora.norm` prepares it for `united`.
        """
        ...

    @property
    def inner(self) -> tuple[Projection, ...]:
        """The projections of its input."""
        ...

    @property
    def outer(self) -> tuple[Projection, ...]:
        """The projections to its output."""
        ...

    def init(self, layers: int, batch: int, pages: tuple[int, int], dtype: jnp.dtype) -> Any:
        """The `LayerState` before the first token.

        Args:
            layers: that share it, each with a part of its own.
            batch: rows.
            pages: how many there are (page 0 is nobody's), and tokens of each.
            dtype: of what is kept of a token.
        """
        ...

    def step(
        self,
        x: Float[Array, "B S E"],
        state: Any,
        context: Context,
        residual: Float[Array, "B S E"] | None = None,
        prepared: PreparedRows | None = None,
    ) -> tuple[Float[Array, "B S E"], Any]:
        """The output for S new tokens of each row, and the state with them.

        Args:
            x: normalised inputs.
            state: of the tokens before, of all layers of the stack.
            context: of all layers, with `slots`: their `layer` says which part of the state is this one's.
            residual: the residual stream, to which the output is added; None: the output is returned alone.
            prepared: x as `lora.norm` prepares it for `united`.
        """
        ...


#: Class of settings -> (settings, inputs) -> the module.
MIXERS: dict[type, Callable[[Any, LayerInputs], Mixer]] = {
    layers.Attention: Attention,
    layers.GatedDelta: GatedDelta,
    layers.LatentAttention: LatentAttention,
}
