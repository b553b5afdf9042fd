"""A gated block compiled for an H200: how often it goes over what is large, that nothing is computed twice."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from fastjax.bench.lora import LoraSettings, build, forward_and_backward
from fastjax.lora import experts as experts_unit
from fastjax.lora.expert_choice import choose_experts
from fastjax.lora.rank_products import PartSpec
from fastjax.quantization import NF4Weight
from pallas_kernels.moe_routing import RouterSettings
from tests.support.aot import AOT, needs_cuda_plugin
from tests.support.hlo import kernels

pytestmark = [pytest.mark.aot, needs_cuda_plugin]

CASE = LoraSettings()
TOKENS, WIDTH, FEATURES = CASE.tokens[0] * CASE.tokens[1], *CASE.shape
LARGE = 2 * TOKENS * FEATURES  # bytes of gate, up or h


def weight(kind, rows, columns):
    spec = jax.ShapeDtypeStruct
    if kind != "nf4":
        return spec((rows, columns), kind)
    codes, absmax = spec((rows, columns // 2), jnp.uint8), spec((rows, columns // 64), jnp.float32)
    return NF4Weight(codes, absmax, None, None, None, None, (rows, columns), (rows,), "bfloat16")


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
    """The frozen block moves 5.2 GB on NF4, plain sums of rank 16 beside its projections another 5.1.

    Beside that, down's product is written and read in float32, two bytes more a number each time.
    """
    ours, frozen = (kernels(compiled(kind, r).as_text()) for r in (rank, 0))
    moved, without = (sum(kernel.moved for kernel in found) for found in (ours, frozen))
    assert moved < without + most + 2 * 2 * TOKENS * WIDTH
    # [dgate | dup]·B reads both once; the rest is where the frozen block has a pass too
    counts = [sum(kernel.moved >= LARGE for kernel in found) for found in (ours, frozen)]
    assert counts[0] == counts[1] + 1
    grown = compiled(kind, rank).memory_analysis().temp_size_in_bytes
    grown -= compiled(kind, 0).memory_analysis().temp_size_in_bytes
    assert grown < 4 * TOKENS * WIDTH + 1e6, "down's product in float32, and no copy of h, gate or up"


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


@pytest.mark.exhaustive("32")
@pytest.mark.parametrize("rows", [1, 32])
def test_a_few_rows_take_five_kernels(rows):
    aot, (apply, trained, frozen) = AOT(), block("nf4", 16)
    specs = [jax.tree.map(lambda leaf: aot.spec(leaf.shape, leaf.dtype), tree) for tree in (trained, frozen)]
    text = aot.compile(apply, *specs, aot.spec((rows, 1, WIDTH), jnp.bfloat16)).as_text()
    assert launched(text) == ["few_rows_products", "nf4_matvec", "few_rows_gate", "nf4_matvec", "few_rows_add"]


def launched(text):
    """Names of the kernels of a compiled program, in order."""
    entry = text[text.index("ENTRY ") :]
    names = re.findall(r" = \S.* (?:fusion|custom-call|dot|copy|sort)\(.*?op_name=\"([^\"]+)\"", entry)
    return [re.search(r"few_\w+|nf4_\w+|[^/]+$", name)[0] for name in names]


def test_few_tokens_choose_their_experts_in_one_kernel_unless_they_are_differentiated():
    settings, logits = RouterSettings(4, normalize=True), jnp.zeros((3, 32))

    @jax.jit
    def choose(logits):
        (weights, experts, _), items = choose_experts(settings, logits, None)
        return weights.sum(), (experts, items)

    with AOT().tracing():
        plain, gradient = jax.make_jaxpr(choose)(logits), jax.make_jaxpr(jax.grad(choose, has_aux=True))(logits)
    assert "few_experts_route" in str(plain) and " sort" not in str(plain)
    assert "few_experts_route" not in str(gradient) and gradient.out_avals[0].shape == (3, 32)


@pytest.mark.exhaustive("32")
@pytest.mark.parametrize("tokens", [1, 32])
def test_a_few_tokens_experts_take_six_kernels(tokens):
    """None of them sorts, gathers or pads: experts and their adapters are read where they lie."""
    aot, experts, width, features, rank = AOT(), 128, 2048, 768, 16
    parts = PartSpec("gate_up_proj", 2 * features, rank), PartSpec("down_proj", width, rank)
    shapes = dict(zip((part.name for part in parts), ((2 * features, width), (width, features)), strict=True))

    def stacked(leaf):
        return aot.spec((experts, *leaf.shape), leaf.dtype)

    weights = [jax.tree.map(stacked, weight("nf4", *shape)) for shape in shapes.values()]
    matrices = {
        name: (aot.spec((experts, rank, columns), jnp.float32), aot.spec((experts, rows, rank), jnp.float32))
        for name, (rows, columns) in shapes.items()
    }
    arrays = experts_unit.Operands(weights[0], None, weights[1], None, matrices)
    block = experts_unit.Block(experts, "silu", None, *parts)
    routing = aot.spec((tokens, 8), jnp.float32), aot.spec((tokens, 8), jnp.int32)
    function = functools.partial(experts_unit.routed_experts, block)
    text = aot.compile(function, aot.spec((tokens, width), jnp.bfloat16), *routing, arrays).as_text()
    products = ["few_experts_products", "nf4_matvec_items", "few_experts_gate", "nf4_matvec_items"]
    assert launched(text) in (
        ["few_experts_items", *products, "few_experts_combine"],
        ["few_experts_items", products[1], products[0], *products[2:], "few_experts_combine"],
    )
