"""The adapters of a projection, as the passes for a few rows take them."""

import dataclasses

import jax
from jaxtyping import Array, Int8

from pallas_kernels.tiles import padded_rank


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Adapters:
    """The adapters of a projection's parts, which lie side by side in its output.

    Attributes:
        lora_A: [R, in] of each part, in any float dtype; None: no adapter.
        lora_B: [rows, R] of each part; None as there.
        parts: output features of each.
        scalings: of each part.
        chosen: which of its rank products, `slot` for each part, a row has: 1 or 0, int8; None: each has all.
    """

    lora_A: tuple[Array | None, ...]
    lora_B: tuple[Array | None, ...]
    parts: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    scalings: tuple[float, ...] = dataclasses.field(metadata={"static": True})
    chosen: Int8[Array, "N R"] | None = None

    @property
    def rank(self) -> int:
        """The largest rank; 0 without an adapter."""
        return max((a.shape[0] for a in self.lora_A if a is not None), default=0)

    @property
    def slot(self) -> int:
        """R: columns of the rank products that each part has, 0 where it has no adapter."""
        return padded_rank(self.rank)
