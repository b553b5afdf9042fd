"""Compiled for cards that are not there: kernels beside low-rank products keep what they hold in registers."""

import functools
from typing import Any

import jax.numpy as jnp
import pytest

from pallas_kernels import low_rank
from pallas_kernels.float8 import Scaled
from pallas_kernels.glu import lora as glu
from pallas_kernels.low_rank.config import LARGEST_OUTPUT_RANK
from pallas_kernels.rms_norm import lora as norm
from pallas_kernels.split_rope import lora as turn
from pallas_kernels.tiles import RANKS
from tests.support.aot import AOT, needs_cuda_plugin
from tests.support.resources import of_triton

N, E, F = 8192, 4096, 14336
FORCED: dict[str, Any] = {"implementation": "triton"}


def behind_B(rank, base, products, b, dy, residual):
    parts, chosen = {"parts": (E,)}, None if rank > LARGEST_OUTPUT_RANK else "triton"
    total = low_rank.low_rank_add(base, products, b, residual=residual, **parts, **FORCED)
    return total, low_rank.low_rank_output_gradients(dy, products, b, **parts, implementation=chosen)


def behind_B_in_float8(rank, dy, products, b, absmax):
    options = {"parts": (E, 1024, 1024), "absmax": absmax, **FORCED}
    return low_rank.low_rank_output_gradients(dy, products, b, **options)


def behind_A(rank, dx, x, dproducts, a):
    return low_rank.low_rank_input_gradients(dx, x, dproducts, a, **FORCED)


def rounded_rows(rank, dy, absmax, b):
    return low_rank.low_rank_round_rows(dy, absmax, b, parts=(F, F), **FORCED)


def scaled_sum(rank, base, rows, columns, products, b, residual):
    options = {"parts": (E,), "residual": residual, **FORCED}
    return low_rank.low_rank_add(Scaled(base, rows, columns), products, b, **options)


def gated(rank, gate_up, products, b, dh, a, dproducts):
    inner, options = glu.Inner(products, b), {"activation": "silu", **FORCED}
    return glu.glu_lora_forward(gate_up, inner, a, **options), glu.glu_lora_backward(
        gate_up, inner, dh, (a, dproducts), **options
    )


def gated_in_float8(rank, gate_up, products, b, dh, a, dproducts, rows, wide, narrow):
    """Products whose scales are left to the kernels, and h in float8."""
    inner, options = glu.Inner(products, b), {"activation": "silu", **FORCED}
    gate_up, dh = Scaled(gate_up, rows, wide), Scaled(dh, rows, narrow)
    h, _ = glu.glu_lora_forward(gate_up, inner, a, rounded=True, **options)
    return h, glu.glu_lora_backward(gate_up, inner, dh, (a, dproducts), with_absmax=True, **options)


def norm_backward(rank, x, weight, rstd, products, a, *gradients):
    normed = norm.Normed(x, weight, rstd, products)
    return norm.rms_norm_lora_backward(normed, a, norm.Gradients(*gradients), **FORCED)


def norm_rounded(rank, x, weight, a):
    return norm.rms_norm_lora_round(x, weight, a, eps=1e-3, **FORCED)


def turned(rank, base, products, b, cos, sin, *gradients):
    found = turn.split_rope_lora_forward(base, products, b, cos, sin, heads=(32, 8), **FORCED)
    return found, turn.split_rope_lora_backward(gradients, products, b, cos, sin, heads=(32, 8))


def scaled_turn(rank, base, rows, columns, *others):
    return turn.split_rope_lora_forward(Scaled(base, rows, columns), *others, heads=(32, 8), **FORCED)


UNIT = ((N, 2 * F), (N, "2R"), (2, F, "R"), (N, F), ("R", F), (N, "R"))
ANGLES = ((N, 64, jnp.float32),) * 2
#: A function of the rank and arrays, and their shapes; bfloat16 unless they end in another dtype.
KERNELS = {
    "behind B": (behind_B, ((N, E), (N, "R"), (E, "R"), (N, E), (N, E))),
    "behind B in float8": (behind_B_in_float8, ((N, 6144), (N, "3R"), (6144, "R"), (N, jnp.float32))),
    "behind A": (behind_A, ((N, E), (N, E), (N, "R"), ("R", E))),
    "rounded rows": (rounded_rows, ((N, 2 * F), (N, jnp.float32), (2 * F, "R"))),
    "scaled sum": (scaled_sum, ((N, E), (N, jnp.float32), (E, jnp.float32), (N, "R"), (E, "R"), (N, E))),
    "gated": (gated, UNIT),
    "gated in float8": (gated_in_float8, (*UNIT, (N, jnp.float32), (2 * F, jnp.float32), (F, jnp.float32))),
    "norm": (norm_backward, ((N, E), (E,), (N, jnp.float32), (N, "R"), ("R", E), (N, E), (N, E), (N, "R"))),
    "norm rounded": (norm_rounded, ((N, E), (E,), ("R", E))),
    "wide norm rounded": (norm_rounded, ((N, 4 * E), (4 * E,), ("R", 4 * E))),
    "scaled turn": (
        scaled_turn,
        ((N, 6144), (N, jnp.float32), (6144, jnp.float32), (N, "3R"), (6144, "R"), *ANGLES),
    ),
    "turned": (turned, ((N, 6144), (N, "3R"), (6144, "R"), *ANGLES, (N, E), (N, 1024), (N, 1024))),
}
COMPILED = [
    *[(name, rank, "h200") for name in ("behind B", "behind A", "turned") for rank in RANKS[1:]],
    *[(name, rank, "a100-80") for name in ("behind B", "behind A", "turned") for rank in RANKS[1:]],
    ("behind B in float8", LARGEST_OUTPUT_RANK, "h200"),
    *[("rounded rows", rank, "h200") for rank in RANKS],
    *[(name, 16, "h200") for name in ("scaled sum", "scaled turn")],
    *[("gated", rank, card) for rank in RANKS for card in ("h200", "a100-80", "4090") if rank <= 64 or card == "h200"],
    *[("gated in float8", rank, card) for rank, card in ((16, "h200"), (128, "h200"), (16, "4090"))],
    *[("norm", rank, "h200") for rank in RANKS[1:]],
    *[("norm", rank, "a100-80") for rank in (RANKS[1], RANKS[-1])],
    *[(name, rank, "h200") for name in ("norm rounded", "wide norm rounded") for rank in (RANKS[0], RANKS[-1])],
]  # fmt: skip


@pytest.mark.aot
@needs_cuda_plugin
@pytest.mark.exhaustive(
    "behind B-32-h200",
    "behind A-32-h200",
    "behind B in float8-32-h200",
    "rounded rows-128-h200",
    "scaled sum-16-h200",
    "scaled turn-16-h200",
    "gated in float8-128-h200",
    "norm-32-h200",
    "wide norm rounded-128-h200",
    "turned-32-h200",
)
@pytest.mark.parametrize(("name", "rank", "card"), COMPILED)
def test_nothing_spills(name, rank, card, tmp_path):
    aot, (function, shapes) = AOT(card), KERNELS[name]

    def spec(shape):
        *sizes, last = shape
        sizes, dtype = (shape, jnp.bfloat16) if isinstance(last, int | str) else (sizes, last)
        of_rank = {"R": rank, "2R": 2 * rank, "3R": 3 * rank}
        return aot.spec(tuple(of_rank.get(size, size) for size in sizes), dtype)

    found = of_triton(aot, functools.partial(function, rank), *map(spec, shapes), folder=tmp_path)
    assert found is None or found.spill_bytes == 0
