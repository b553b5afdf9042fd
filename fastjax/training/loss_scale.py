"""Dynamic loss scaling, which keeps float16 gradients out of the subnormal numbers.

The loss is multiplied by a power of two before the backward pass and the gradients are divided by it after
(Micikevicius et al., "Mixed Precision Training", arXiv 1710.03740, section 3.2). If a gradient overflows, the step
changes nothing but the scale, which halves; after a window of steps without an overflow it doubles.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

#: An overflow at this scale has another cause.
SMALLEST = 1.0
LARGEST = 2.0**24


class LossScale(NamedTuple):
    """The scale and its history.

    Attributes:
        scale: the factor of the loss, a power of two; float32 [].
        good_steps: steps without an overflow since the scale changed; int32 [].
        skipped_steps: steps without an update, in the whole run; int32 [].
    """

    scale: Float[Array, ""]
    good_steps: Int[Array, ""]
    skipped_steps: Int[Array, ""]

    @classmethod
    def start(cls, scale: float) -> "LossScale":
        """The scale before the first step."""
        return cls(jnp.float32(scale), jnp.int32(0), jnp.int32(0))

    def after(self, finite: Bool[Array, ""], window: int) -> "LossScale":
        """The scale after a step.

        Args:
            finite: whether the step's loss and gradients were finite.
            window: steps without an overflow after which the scale doubles.
        """
        good = self.good_steps + 1
        grows = good >= window
        grown = jnp.where(grows, jnp.minimum(self.scale * 2, LARGEST), self.scale)
        return LossScale(
            jnp.where(finite, grown, jnp.maximum(self.scale / 2, SMALLEST)),
            jnp.where(finite & ~grows, good, 0),
            self.skipped_steps + jnp.where(finite, 0, 1),
        )

    @property
    def exhausted(self) -> Bool[Array, ""]:
        """Whether the scale is at its minimum."""
        return self.scale <= SMALLEST
