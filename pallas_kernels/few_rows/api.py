"""The passes between the large products of a layer with LoRA adapters (arXiv 2106.09685), for a few rows.

    n = norm(x)        p = n·Aᵀ                       `normed_products`; without the norm `rank_products`
    y = base + p·(s·B)ᵀ + residual                    `add`
    [q | k | v] = turn(base + p·(s·B)ᵀ)               `heads`
    h = act(gate) · up,  [gate | up] = base + p·(s·B)ᵀ,  p' = h·Cᵀ        `gate`

With a few rows each pass moves little, and its launch is what it costs: one kernel each, for all parts of a projection.
A and B are read as they are trained, in their own dtype, without being stacked or scaled first. Sums over features are
shared out among thread blocks. Their shares come as *addends*, [C, N, …], that the next pass adds up as it reads them:
rank products in float32, and a large product as `nf4.addends` gives it. Of adapters that rows choose a row's own rank
products alone are kept (`Adapters.kept`): all of them would be zeros mostly, and cost eight adapters a third of a
token. No backward pass: `low_rank`, `split_rope.lora` and `glu.lora` have one. In Pallas-Triton, for NVIDIA GPUs of
compute capability 8.0 or more.
"""

import jax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.dispatch import HALF, lacks_dtype, target
from pallas_kernels.few_rows import triton
from pallas_kernels.few_rows.adapters import Adapters
from pallas_kernels.tiles import RANKS

MOST_ROWS = 64
"""Rows for which passes of one tile of rows each are faster than those for many."""
_GRAIN = 32
"""Features, heads apart, come in multiples of it."""


def why_not(rows: int, dtype: DTypeLike, adapters: Adapters, *features: int) -> str | None:
    """Why these passes do not serve a call on the target, as a clause; None: they do.

    Args:
        rows: N.
        dtype: of x.
        adapters: of the projection.
        features: numbers of features that are read or written, of parts too.
    """
    device, mesh = target(), jax.sharding.get_abstract_mesh()
    if not mesh.empty and mesh.size > 1:
        return "it takes rows on one device, and there are several"
    if reason := device.lacks((8, 0)) or lacks_dtype(dtype, HALF):
        return reason
    if not 0 < rows <= MOST_ROWS:
        return f"it serves 1 to {MOST_ROWS} rows, not {rows}"
    if adapters.rank > RANKS[-1]:
        return f"it serves ranks up to {RANKS[-1]}, not {adapters.rank}"
    if any(count % _GRAIN for count in features):
        return f"it takes features in multiples of {_GRAIN}, not {features}"
    return None


def normed_products(
    x: Float[Array, "N E"], weight: Float[Array, " E"], adapters: Adapters, *, eps: float, offset: float
) -> tuple[Float[Array, "N E"], Float[Array, "C N PK"]]:
    """The normalised rows as `rms_norm` rounds them, and addends of their rank products.

    Args:
        x: bfloat16 or float16.
        weight: the norm's.
        adapters: of the projection that reads the rows.
        eps: added to the mean square.
        offset: added to the weight.
    """
    return triton.normed_products(x, weight, adapters, eps=eps, offset=offset)


def rank_products(x: Float[Array, "N E"], adapters: Adapters) -> Float[Array, "C N PK"]:
    """Addends of the rank products of x; arguments as in `normed_products`."""
    return triton.normed_products(x, None, adapters, eps=0.0, offset=0.0)[1]


def add(
    base: Float[Array, "C N F"],
    products: Float[Array, "C N PK"] | None,
    adapters: Adapters,
    residual: Float[Array, "N F"] | None,
    *,
    dtype: DTypeLike,
) -> Float[Array, "N F"]:
    """The parts' outputs side by side, and a residual stream added to them.

    Args:
        base: addends of the large product.
        products: addends of the rank products; None where no part has an adapter.
        adapters: of the projection.
        residual: one more addend, or None.
        dtype: of the result.
    """
    return triton.add(base, products, adapters, residual, dtype=dtype)


def heads(
    base: Float[Array, "C N F"],
    products: Float[Array, "C N PK"],
    adapters: Adapters,
    cos: Float[Array, "N D/2"],
    sin: Float[Array, "N D/2"],
    *,
    counts: tuple[int, int],
    dtype: DTypeLike,
) -> tuple[Float[Array, "N HD"], Float[Array, "N KD"], Float[Array, "N KD"]]:
    """Queries and keys, turned as by `pallas_kernels.rope`, and values.

    Args:
        base: as in `add`.
        products: as there.
        adapters: of queries, keys and values, or one of all three.
        cos: cosines of the rotary angles; D is a power of two.
        sin: sines of the same.
        counts: query heads and key heads.
        dtype: of the results.
    """
    return triton.heads(base, products, adapters, cos, sin, counts=counts, dtype=dtype)


def gate(
    base: Float[Array, "C N 2F"],
    products: Float[Array, "C N PK"] | None,
    adapters: Adapters,
    down: Adapters,
    *,
    activation: str,
    dtype: DTypeLike,
) -> tuple[Float[Array, "N F"], Float[Array, "C N K"] | None]:
    """The gated product, and addends of its rank products for the projection that reads it, if that has an adapter.

    Args:
        base: addends of gate and up.
        products: as in `add`.
        adapters: of gate and up, or one of both.
        down: of the projection that reads the result.
        activation: Hugging Face's name of act.
        dtype: of the result.
    """
    return triton.gate(base, products, adapters, down, activation=activation, dtype=dtype)
