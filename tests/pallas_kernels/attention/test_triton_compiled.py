"""The Triton kernels compiled for absent GPUs: a thread's resources at the default block sizes."""

import jax.numpy as jnp
import pytest

from pallas_kernels.attention import triton
from pallas_kernels.attention.call import Cotangents, Mask, Operands, Options
from pallas_kernels.attention.ranges import SegmentRanges
from tests.support import resources
from tests.support.aot import AOT, needs_cuda_plugin

pytestmark = [pytest.mark.aot, needs_cuda_plugin]

B, S, H, K = 2, 4096, 8, 2
PLAIN = Options(0.1)
EVERYTHING = Options(0.1, sliding_window=1024, logits_soft_cap=30.0, dropout_rate=0.1)


def passes(aot, size, options):
    """The forward and the backward pass by name: a function and its arguments."""
    wide, narrow = (aot.spec((B, S, heads, size), jnp.bfloat16) for heads in (H, K))
    rows, everything = aot.spec((B, S), jnp.int32), options == EVERYTHING
    ranges = SegmentRanges(*[rows] * 4, *[aot.spec((B * S // 128,), jnp.int32)] * 2) if everything else None
    mask = Mask(ranges, None, None, aot.spec((1,), jnp.int32))
    sinks, seed = (aot.spec((H,), jnp.float32), aot.spec((2,), jnp.uint32)) if everything else (None, None)
    operands, numbers = Operands(wide, narrow, narrow, mask, sinks, seed), aot.spec((B, H, S), jnp.float32)
    cotangents = Cotangents(numbers, numbers, wide, wide)
    return {
        "forward": (lambda *arguments: triton.forward(*arguments, options), operands),
        "backward": (lambda *arguments: triton.backward(*arguments, options), operands, cotangents),
    }


@pytest.mark.exhaustive("h200-128-everything-forward", "h200-128-everything-backward")
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize(
    "card, size, options",
    [
        ("h200", 128, PLAIN),
        ("b200", 128, PLAIN),
        ("a100-80", 128, PLAIN),
        ("4090", 128, PLAIN),
        ("4090", 256, PLAIN),
        ("h200", 128, EVERYTHING),
        ("4090", 80, EVERYTHING),
    ],
    ids=lambda value: "everything" if value == EVERYTHING else "plain" if value == PLAIN else None,
)
def test_nothing_leaves_the_registers(card, size, options, direction, tmp_path):
    aot = AOT(card)
    used = resources.of_triton(aot, *passes(aot, size, options)[direction], folder=tmp_path)
    if used is not None:
        assert used.spill_bytes == used.stack_bytes == 0
        assert used.registers <= 255
