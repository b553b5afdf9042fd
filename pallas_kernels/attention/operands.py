"""Arguments of the implementations of attention, forward and backward."""

from typing import NamedTuple

from jaxtyping import Array, Float, UInt32

from pallas_kernels.attention.mask import Mask


class Operands(NamedTuple):
    """The arrays of a call.

    Attributes:
        q: queries.
        k: keys.
        v: values.
        mask: what each query sees; documents as ranges for implementations in `NEEDS_RANGES`.
        sinks: a logit for each query head that joins the denominator alone, or None.
        seed: two numbers where there is dropout.
    """

    q: Float[Array, "B S H D"]
    k: Float[Array, "B T K D"]
    v: Float[Array, "B T K Dv"]
    mask: Mask
    sinks: Float[Array, " H"] | None
    seed: UInt32[Array, "2"] | None


class Cotangents(NamedTuple):
    """Inputs of the backward pass beside the operands, whose sinks are already in the log-sum-exp.

    Attributes:
        lse: the log-sum-exp of each query's logits, float32; +inf for a query that sees nothing.
        delta: rowsum(dout ∘ out) − dlse, float32.
        dout: the output's gradient.
        out: the output, from which cuDNN computes delta; the others do not read it.
    """

    lse: Float[Array, "B H S"]
    delta: Float[Array, "B H S"]
    dout: Float[Array, "B S H Dv"]
    out: Float[Array, "B S H Dv"]
