"""The adapters of a projection, as the passes for a few rows take them."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int8

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
        largest: with `chosen`, the most ranks that a row has, which lie side by side.
    """

    lora_A: tuple[Array | None, ...]
    lora_B: tuple[Array | None, ...]
    parts: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    scalings: tuple[float, ...] = dataclasses.field(metadata={"static": True})
    chosen: Int8[Array, "N R"] | None = None
    largest: int | None = dataclasses.field(default=None, metadata={"static": True})

    @property
    def rank(self) -> int:
        """The largest rank; 0 without an adapter."""
        return max((a.shape[0] for a in self.lora_A if a is not None), default=0)

    @property
    def slot(self) -> int:
        """R: rows of A and columns of B that each part has, 0 where it has no adapter."""
        return padded_rank(self.rank)

    @property
    def kept(self) -> int:
        """K: columns of the rank products that each part has. Rank r of those that a row has is in column r modulo K.

        A row's ranks lie side by side and are no more than K, so that no two of them meet.
        """
        return self.slot if self.chosen is None or self.largest is None else min(padded_rank(self.largest), self.slot)

    def unfolded(self, products: Float[Array, "N PK"]) -> Float[Array, "N PR"]:
        """Rank products in columns of their own, zeros where a row has none.

        Args:
            products: as `kept` describes them.
        """
        if self.kept == self.slot:
            return products
        apart = products.reshape(len(products), len(self.parts), 1, self.kept)
        apart = jnp.broadcast_to(apart, (*apart.shape[:2], self.slot // self.kept, self.kept))
        assert self.chosen is not None
        return jnp.where(self.chosen[:, None] != 0, apart.reshape(*apart.shape[:2], self.slot), 0).reshape(
            len(products), -1
        )
