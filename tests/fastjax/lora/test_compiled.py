"""A gated block compiled for an H200: how often it goes over what is large, and that nothing is computed twice."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from fastjax.bench.lora import LoraSettings, build, forward_and_backward
from fastjax.execution.remat import checkpointed
from fastjax.quantization import NF4Weight
from fastjax.quantization.float8 import in_float8
from tests.support.aot import AOT, needs_cuda_plugin
from tests.support.hlo import kernels

pytestmark = [pytest.mark.aot, needs_cuda_plugin]

CASE = LoraSettings()
TOKENS, WIDTH, FEATURES = CASE.tokens[0] * CASE.tokens[1], *CASE.shape
LARGE = 2 * TOKENS * FEATURES  # bytes of gate, up or h


def weight(kind, rows, columns):
    spec = jax.ShapeDtypeStruct
    if kind not in ("nf4", "nf4 in float8"):
        return spec((rows, columns), kind)
    codes, absmax = spec((rows, columns // 2), jnp.uint8), spec((rows, columns // 64), jnp.float32)
    packed = NF4Weight(codes, absmax, None, None, None, None, (rows, columns), (rows,), "bfloat16")
    return packed if kind == "nf4" else in_float8(packed)


@functools.cache
def block(kind, rank):
    """The block's function of (trained, frozen, x), and the shapes of what is trained and of what is not."""
    shapes = weight(kind, 2 * FEATURES, WIDTH), weight(kind, WIDTH, FEATURES)
    structure = {}

    def make(weights):
        structure["graphdef"], trained, frozen = build(CASE.shape, weights, rank, jax.random.key(0))
        return trained, frozen

    trained, frozen = jax.eval_shape(make, shapes)
    graphdef = structure["graphdef"]
    return lambda trained, frozen, x: nnx.merge(graphdef, trained, frozen)(x, None), trained, frozen


@functools.cache
def compiled(kind, rank):
    aot, (apply, trained, frozen) = AOT(), block(kind, rank)
    specs = [jax.tree.map(lambda leaf: aot.spec(leaf.shape, leaf.dtype), tree) for tree in (trained, frozen)]
    x = aot.spec((*CASE.tokens, WIDTH), jnp.bfloat16)
    # GEMMs as they are without autotuning, which needs the card
    options = {"xla_gpu_enable_triton_gemm": False}
    return aot.compile(forward_and_backward(apply), *specs, x, x, options=options)


@pytest.mark.exhaustive("16-1150000000.0-nf4")
@pytest.mark.parametrize("kind", ["nf4", "bfloat16"])
@pytest.mark.parametrize(("rank", "most"), [(16, 1.15e9), (64, 1.45e9)])
def test_adapters_add_one_pass_over_a_large_array(kind, rank, most):
    """The frozen block moves 5.2 GB on NF4, plain sums of rank 16 beside its projections another 5.1."""
    ours, frozen = (kernels(compiled(kind, r).as_text()) for r in (rank, 0))
    assert sum(kernel.moved for kernel in ours) < sum(kernel.moved for kernel in frozen) + most
    # [dgate | dup]·B reads both once; the rest is where the frozen block has a pass too
    counts = [sum(kernel.moved >= LARGE for kernel in found) for found in (ours, frozen)]
    assert counts[0] == counts[1] + 1
    grown = compiled(kind, rank).memory_analysis().temp_size_in_bytes
    grown -= compiled(kind, 0).memory_analysis().temp_size_in_bytes
    assert grown < 0.5 * LARGE, "partial sums, and no copy of h, gate or up"


@pytest.mark.exhaustive(
    by="tests/fastjax/quantization/test_float8.py::"
    "test_scales_and_rounding_that_are_left_to_the_gated_block_change_no_bit"
)
def test_scales_of_products_in_float8_take_no_pass_of_their_own():
    """The gated block and the sum with the adapter multiply as they read."""
    found = kernels(compiled("nf4 in float8", 16).as_text())
    assert sum("matmul$f8" in kernel.name for kernel in found) == 4
    assert [kernel for kernel in found if kernel.name == "fusion" and kernel.moved >= LARGE] == []
    assert sum(kernel.moved >= LARGE for kernel in found) == 4 + 2 + 2, (
        "products, the block, roundings: of h's tiles to its rows', and of the gradient with B's way back"
    )


@pytest.mark.exhaustive("nf4")
@pytest.mark.parametrize("kind", ["nf4", "bfloat16"])
def test_no_dense_update_is_formed(kind):
    text = compiled(kind, 16).as_text()
    products = [kernel for kernel in kernels(text) if "cublas" in kernel.name]
    shapes = [re.findall(r"\[([\d,]+)\]", kernel.result)[0] for kernel in products]
    forms = {f"{2 * FEATURES},{WIDTH}", f"{WIDTH},{2 * FEATURES}", f"{FEATURES},{WIDTH}", f"{WIDTH},{FEATURES}"}
    assert not forms & set(shapes)
    # four large products, x·A and [dgate|dup]·B; the kernels make the other thin ones
    assert len(products) == 4 + 2


@pytest.mark.exhaustive(
    by="tests/fastjax/lora/test_mlp.py::test_the_policy_by_names_keeps_gate_and_up_and_the_thin_products"
)
@pytest.mark.parametrize("remat", ["projections", "full"])
def test_a_product_that_is_kept_is_computed_once(remat):
    """In the scan over the layers; with "full" its recomputation is the second time."""
    aot, (apply, trained, frozen) = AOT(), block("nf4", 16)

    def layers(trained, frozen, x):
        body = checkpointed(lambda x, state: x + apply(*state, x), remat, scanned=True)
        return jax.lax.scan(lambda x, state: (body(x, state), None), x, (trained, frozen))[0]

    stacked = [jax.tree.map(lambda leaf: aot.spec((4, *leaf.shape), leaf.dtype), tree) for tree in (trained, frozen)]
    x = aot.spec((*CASE.tokens, WIDTH), jnp.bfloat16)
    options = {"xla_gpu_enable_triton_gemm": False}
    text = aot.compile(forward_and_backward(layers), *stacked, x, x, options=options).as_text()
    calls = re.findall(r"= \(?bf16\[(\d+,\d+)\][^=\n]*custom-call\([^\n]*cublas", text)
    assert calls.count(f"{TOKENS},{2 * FEATURES}") == {"projections": 1, "full": 2}[remat]
