"""A gated linear unit between projections with LoRA adapters (arXiv 2106.09685), fused with the adapters' sums.

Of a block down(act(gate) · up) the large products and the rank products x·Aᵀ are made elsewhere; this is the part
between them. gate and up come as W leaves them, and their adapters' B is applied to the rank products x·Aᵀ on the way
in, so that no pass over gate and up is made for it; the rank product of the down projection, h·Aᵀ, is made on the way
out. The backward pass adds the down adapter's part to the gradient of h, and makes the gradients of gate's and
up's B and of down's A while their operands are in registers: h is never stored for it.

Implementations, in order of preference:

- ``triton``: NVIDIA GPUs of compute capability 8.0 or more, 16-bit activations;
- ``xla``: everything else.
"""

from typing import Any, NamedTuple

from jaxtyping import Array, Float

from pallas_kernels.dispatch import HALF, Implementation, Target, triton_or_xla
from pallas_kernels.float8.scaled import Rounded, Scaled, product_of
from pallas_kernels.float8.triton import MOST_JOINED, too_wide
from pallas_kernels.glu.lora import config, triton, xla
from pallas_kernels.glu.reference import ACTIVATIONS
from pallas_kernels.tiles import RANKS
from pallas_kernels.transformations import with_automatic_axes


class Gradients(NamedTuple):
    """Results of the backward pass.

    Attributes:
        gate_up: the gradient of gate and up as their weights and rank products need it, in the dtype of dh.
        h: as `glu_lora_forward` makes it; None: it was not asked for.
        lora_B: the gradient of `Inner.lora_B`, float32, or None.
        down_A: of down's A, float32, or None.
        absmax: the largest magnitude in each row of `gate_up`, float32; None: it was not asked for.
    """

    gate_up: Float[Array, "N 2F"]
    h: Float[Array, "N F"] | None
    lora_B: Float[Array, "2 F R"] | None
    down_A: Float[Array, "R F"] | None
    absmax: Float[Array, " N"] | None


class Inner(NamedTuple):
    """The adapters of gate and up, multiplied with x up to their rank.

    Attributes:
        products: x·Aᵀ of gate, then of up, in the dtype of gate and up; [N, R] where the two share one.
        lora_B: of gate, then of up, with the adapters' scale.
    """

    products: Float[Array, "N 2R"]
    lora_B: Float[Array, "2 F R"]


def glu_lora_forward(
    gate_up: Float[Array, "N 2F"] | Scaled,
    inner: Inner | None,
    down_A: Float[Array, "R F"] | None,
    *,
    activation: str,
    rounded: bool = False,
    implementation: str | None = None,
) -> tuple[Float[Array, "N F"] | Rounded, Float[Array, "N R"] | None]:
    """The gated product h = activation(gate) · up, and h·Aᵀ for the projection that reads it.

    In float32 inside; each is rounded once.

    Args:
        gate_up: gate, then up, without their adapters; of a product in float8 its scales may be left to this.
        inner: their adapters; None: there are none.
        down_A: A of the adapter that reads h; None: there is none.
        activation: one of ``ACTIVATIONS``.
        rounded: whether h is, as `float8.quantize_rows` makes it, for `float8.matmul`; "triton" may round a code twice
            that is less than 2⁻¹⁵ of its row's largest. h·Aᵀ is of h as it was.
        implementation: None, "triton" or "xla".

    Returns:
        h, and h·Aᵀ or None, in the dtype of `gate_up`, or h rounded.

    Raises:
        ValueError: operands that do not fit.
        NotImplementedError: the forced implementation cannot serve this call; the message says why.
    """
    facts = _checked("glu_lora_forward", product_of(gate_up), inner, down_A, activation)
    chosen = REGISTRY.chosen(implementation, **facts, float8=rounded)
    return chosen.forward(gate_up, *(inner or (None, None)), down_A, activation, rounded)


def glu_lora_backward(
    gate_up: Float[Array, "N 2F"] | Scaled,
    inner: Inner | None,
    dh: Float[Array, "N F"] | Scaled,
    down: tuple[Float[Array, "R F"], Float[Array, "N R"]] | None,
    *,
    activation: str,
    with_h: bool = False,
    with_absmax: bool = False,
    implementation: str | None = None,
) -> Gradients:
    """The gradients of gate and up as their weights and rank products need them, and those of B and of down's A.

    Args:
        gate_up: as in `glu_lora_forward`.
        inner: as in `glu_lora_forward`.
        dh: the gradient of h through the down projection's weight; its scales may be left to this.
        down: A of the down projection's adapter and the gradient of h·Aᵀ; None: there is none.
        activation: one of ``ACTIVATIONS``.
        with_h: whether h is returned, for the gradient of a weight that it meets; it may be written over dh.
        with_absmax: whether the rows' largest magnitudes are, for `low_rank.low_rank_round_rows`.
        implementation: None, "triton" or "xla".

    Raises:
        ValueError: operands that do not fit.
        NotImplementedError: the forced implementation cannot serve this call; the message says why.
    """
    down_A, dproducts = (None, None) if down is None else down
    below, wide = product_of(dh), product_of(gate_up)
    facts = _checked("glu_lora_backward", wide, inner, down_A, activation)
    if below.shape != (wide.shape[0], wide.shape[1] // 2) or below.dtype != wide.dtype:
        raise ValueError(f"glu_lora_backward: dh must be {wide.dtype} of half of {list(wide.shape)}, got {below}")
    chosen = REGISTRY.chosen(implementation, **facts)
    gradients = with_automatic_axes(
        lambda *operands: chosen.backward(*operands, activation, with_h, with_absmax),
        *(gate_up, *(inner or (None, None)), dh, down_A, dproducts),
        rows_like=(below, below, None, None, below),
    )
    return Gradients(*gradients)


def _checked(op: str, gate_up, inner: Inner | None, down_A, activation: str) -> dict[str, Any]:
    """The facts of a call whose operands fit; `ranks` are those of gate and up, and of down, 0 for none."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"{op}: activation must be one of {', '.join(sorted(ACTIVATIONS))}, got {activation!r}")
    if gate_up.ndim != 2 or gate_up.shape[1] % 2:
        raise ValueError(f"{op}: gate and up must be one array [N, 2F], got {list(gate_up.shape)}")
    rows, features = gate_up.shape[0], gate_up.shape[1] // 2
    if inner is not None:
        rank = inner.lora_B.shape[-1]
        if inner.lora_B.shape != (2, features, rank) or inner.products.shape not in ((rows, rank), (rows, 2 * rank)):
            raise ValueError(
                f"{op}: for gate and up {list(gate_up.shape)}, lora_B must be [2, {features}, R] and products "
                f"[{rows}, 2R] or [{rows}, R], got {list(inner.lora_B.shape)} and {list(inner.products.shape)}"
            )
    if down_A is not None and (down_A.ndim != 2 or down_A.shape[1] != features):
        raise ValueError(f"{op}: down_A must be [R, {features}], got {list(down_A.shape)}")
    others = [array for array in (*(inner or ()), down_A) if array is not None]
    if any(array.dtype != gate_up.dtype for array in others):
        raise ValueError(f"{op}: all operands must have one dtype, got {[str(a.dtype) for a in (gate_up, *others)]}")
    ranks = (0 if inner is None else inner.lora_B.shape[-1], 0 if down_A is None else down_A.shape[0])
    return {"shape": gate_up.shape, "dtype": gate_up.dtype, "ranks": ranks, "activation": activation}


def _why_not_triton(
    device: Target,
    shape: tuple[int, ...],
    ranks: tuple[int, int],
    activation: str,
    float8: bool = False,
    **facts,
) -> str | None:
    rows, features = shape[0], shape[1] // 2
    if float8 and (reason := device.lacks((8, 9), what="float8") or too_wide(features, MOST_JOINED)):
        return reason
    if activation not in config.ACTIVATIONS:
        return f"Pallas-Triton has no {activation}"
    most = config.largest_rank(device.compute_capability or (8, 0))
    if not {0, *RANKS}.issuperset(ranks) or max(ranks) > most:
        return f"it serves ranks {list(RANKS)} up to {most} on {device}, not {max(ranks)}"
    if rows % config.TILE or features % config.TILE:
        return f"it takes whole tiles of {config.TILE}, not {rows} tokens by {features} features"
    return None


#: forward(gate_up, products, lora_B, down_A, activation, rounded) -> (h, h·Aᵀ or None)
#: backward(gate_up, products, lora_B, dh, down_A, dproducts, activation, with_h, with_absmax)
#:     -> what `Gradients` holds
REGISTRY = triton_or_xla(
    "glu.lora",
    Implementation(triton.forward, triton.backward, dtypes=HALF, why_not=_why_not_triton),
    Implementation(xla.forward, xla.backward),
)
