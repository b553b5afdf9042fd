"""The experts' adapters of one projection, as the passes for a few tokens take them."""

import dataclasses

import jax
from jaxtyping import Array

from pallas_kernels.tiles import padded_rank


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Adapter:
    """A and B of all experts, as they are trained.

    Attributes:
        lora_A: [X, R, in], in any float dtype.
        lora_B: [X, out, R].
        scaling: factor of B.
    """

    lora_A: Array
    lora_B: Array
    scaling: float = dataclasses.field(metadata={"static": True})

    @property
    def slot(self) -> int:
        """Columns of its rank products: R, or a larger rank that the kernels serve."""
        return padded_rank(self.lora_A.shape[1])
