"""Tokens on their way to the devices that hold their experts, and back.

Device d of the mesh axis `expert` holds the experts d·X/n to (d + 1)·X/n - 1. All tokens come to every device, which
makes of each one the sum of its own experts, and these sums are added up where the token is. Shapes are static, so
there is room for all tokens everywhere, and none is ever dropped. The room is hardly larger than what has to travel: of
8 choices among 128 experts nine tokens in ten go to each of four devices, two in three to each of eight; and whole it
needs no order of its own: tokens and sums travel as they lie (`tokens.all_tokens` and `own_sums`, along `expert`).
All of it is called inside an island, and sums have a fixed order.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from fastjax.parallel.islands import devices_along

AXIS = "expert"


class Choices(NamedTuple):
    """The choices of all T tokens that come to a device, among its own experts; k each.

    Attributes:
        experts: their numbers there, int32 [T, k]; the number of these experts, of choices that lie elsewhere.
        weights: of these choices, zero of those that lie elsewhere.
    """

    experts: Int[Array, "T k"]
    weights: Float[Array, "T k"]


def own_choices(experts: Int[Array, "N k"], weights: Float[Array, "N k"], own: int) -> Choices:
    """The choices of all tokens, as this device's experts have them; on one device the arguments themselves.

    Args:
        experts: chosen by each of this device's tokens.
        weights: of these choices.
        own: the number of its experts.
    """
    if devices_along(AXIS) == 1:
        return Choices(experts, weights)
    experts, weights = (lax.all_gather(array, AXIS, axis=0, tiled=True) for array in (experts, weights))
    first = own * lax.axis_index(AXIS).astype(experts.dtype)
    here = (experts >= first) & (experts < first + own)
    return Choices(jnp.where(here, experts - first, own), jnp.where(here, weights, 0))
