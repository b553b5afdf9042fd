"""Inputs that all layers share beside the residual stream, made once a batch, and sums over the layers."""

from collections.abc import Mapping
from typing import NamedTuple

import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int, Int8, Num, PRNGKeyArray

from fastjax.parallel import BATCH, local
from pallas_kernels.attention import SegmentRanges, segment_ranges

#: Sums over layers, such as the loads of routers, by name; none: an empty dictionary, which compiles to nothing.
Sums = dict[str, Float[Array, "..."]]


class Slots(NamedTuple):
    """New tokens and those before them, whose states the layers hold (`mixers.LayerState`).

    Pages of P tokens hold what a layer keeps of each token; page 0 is nobody's, and takes what padding writes.

    Attributes:
        tokens: which of the new ones are tokens and no padding, int32 1 or 0.
        rows: the row of each new token among the states' R; R of padding. A row's are in one piece, in their order.
        positions: its position in the row.
        pages: its page, 0 of padding.
        table: the pages of each row, from its first token on; entries behind its last page may be any number.
        lengths: tokens of each row, the new ones included.
        layer: number of the layer among those of its stack and place in the period.
    """

    tokens: Int[Array, "B S"]
    rows: Int[Array, "B S"]
    positions: Int[Array, "B S"]
    pages: Int[Array, "B S"]
    table: Int[Array, "B M"]
    lengths: Int[Array, "B"]
    layer: Int[Array, ""]

    def state_before(self, states: Num[Array, "L R ..."]) -> Num[Array, "B ..."]:
        """The layer's states of the new tokens' rows before them, zeros of rows that begin.

        Args:
            states: of all layers and rows.
        """
        own = states.at[self.layer, self.rows[:, 0]].get(mode="clip")
        return jnp.where(self.positions[:, 0].reshape(-1, *[1] * (own.ndim - 1)) == 0, 0, own)

    def with_state(self, states: Num[Array, "L R ..."], after: Num[Array, "B ..."]) -> Num[Array, "L R ..."]:
        """The states of all layers and rows with the layer's of the new tokens' rows after them.

        Args:
            states: before.
            after: of each row.
        """
        return states.at[self.layer, self.rows[:, 0]].set(after, mode="drop")


class Context(NamedTuple):
    """The inputs of all layers, made once a batch.

    Attributes:
        rotary: cosines and sines of the rotary angles, float32 [B, S, R/2] for the R features of a head that turn, by
            the name of the field of `ModelConfig` that they come from.
        segment_ranges: where the documents of the rows lie; None where every row is one document. With `slots` new
            tokens of several documents, of which none has tokens before.
        key: dropout key of the step; None outside training.
        query_scales: factors of the turned queries, float32 [B, S], by the same names as `rotary`, where there are any.
        mask: which tokens are not padding, bool [B, S]; None: all. Attention does not read it.
        quantizing: whether fake quantisers are in force; None: they are.
        slots: where the new tokens stand among those before them; None: the rows are whole.
        chosen: which rank products each token has, where adapters are joined (`lora.joined`), 1 or 0; None: they are
            not.
    """

    rotary: dict[str, tuple[Float[Array, "B S R/2"], Float[Array, "B S R/2"]]]
    segment_ranges: SegmentRanges | None
    key: PRNGKeyArray | None
    query_scales: Mapping[str, Float[Array, "B S"]] = {}
    mask: Bool[Array, "B S"] | None = None
    quantizing: Bool[Array, ""] | None = None
    slots: Slots | None = None
    chosen: Int8[Array, "B S R"] | None = None


def document_ranges(segment_ids: Int[Array, "B S"]) -> SegmentRanges:
    """Where the documents of the rows lie, for `Context`; made on each device of its own rows.

    Args:
        segment_ids: document of each token, never decreasing along the row but for padding, which is 0.
    """
    return local(segment_ranges, in_specs=(P(BATCH),), out_specs=P(BATCH))(segment_ids)


def added(left: Sums, right: Sums) -> Sums:
    """The sums of both; a name may be missing on either side.

    Args:
        left: of some layers.
        right: of other layers.
    """
    return left | {name: left[name] + value if name in left else value for name, value in right.items()}
