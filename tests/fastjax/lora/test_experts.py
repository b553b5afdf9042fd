"""The experts of a mixture as a unit: values and gradients against every expert on every token in float64."""

import functools

import jax
import jax.numpy as jnp
import pytest

from fastjax.lora import reference
from fastjax.lora.experts import Block, Clamp, Operands, routed_experts, why_not_where_they_lie
from fastjax.lora.rank_products import PartSpec
from fastjax.quantization import NF4Weight, as_weight, concatenate
from fastjax.residuals import SAVED
from tests.fastjax.lora.conftest import Maker, distance, value_and_gradients

TOKENS, WIDTH, FEATURES, EXPERTS, CHOSEN = 48, 64, 128, 4, 2
#: name -> ranks of gate and up and of down (0: no adapter), clamp, biases
CASES = {
    "both": ((8, 4), None, False),
    "gate and up": ((8, 0), None, False),
    "down, clamped": ((0, 8), Clamp(1.0, 1.702), False),
    "no adapter": ((0, 0), None, False),
    "biases": ((4, 4), None, True),
    "clamped with biases": ((4, 4), Clamp(1.0, 1.5), True),
}


def make(maker, name, kind):
    """The description and the operands; the last expert gets no token."""
    (inner, outer), clamp, biased = CASES[name]
    sizes = {"gate_up_proj": (2 * FEATURES, WIDTH, inner, 1.5), "down_proj": (WIDTH, FEATURES, outer, 0.5)}

    def stacked(rows, columns):
        if kind == "nf4":  # gate and up are tensors of their own, of which each expert's decode alike
            parts = maker.normal(2, EXPERTS, rows // 2, columns, scale=columns**-0.5)
            return concatenate([jax.vmap(NF4Weight.quantize)(part) for part in parts])
        return maker.normal(EXPERTS, rows, columns, scale=columns**-0.5, dtype=kind)

    def adapter(rows, columns, rank):
        a = maker.normal(EXPERTS, rank, columns, scale=columns**-0.5)
        return a, maker.normal(EXPERTS, rows, rank)

    parts = [PartSpec(part, rows, rank, scaling) for part, (rows, _, rank, scaling) in sizes.items()]
    weights = [stacked(rows, columns) for rows, columns, _, _ in sizes.values()]
    biases = [maker.normal(EXPERTS, rows) if biased else None for rows, *_ in sizes.values()]
    matrices = {part: adapter(rows, columns, rank) for part, (rows, columns, rank, _) in sizes.items() if rank}
    block = Block(EXPERTS, "silu", clamp, *parts)
    return block, Operands(weights[0], biases[0], weights[1], biases[1], matrices)


@functools.cache
def routing():
    maker = Maker(9)
    scores = maker.normal(TOKENS, EXPERTS).at[:, -1].set(-9.0)
    weights, experts = jax.lax.top_k(jax.nn.sigmoid(scores), CHOSEN)
    return weights, experts.astype(jnp.int32)


def operands(name, kind, dtype):
    """The unit and plain LoRA as functions of what is trained and of x; then these, and the gradient of the output."""
    maker = Maker()
    block, arrays = make(maker, name, kind)
    x, dy = maker.normal(2, TOKENS, WIDTH, dtype=dtype)
    weights, experts = routing()
    frozen = ("gate_up", "down") if kind == "nf4" else ()
    trained = {field: value for field, value in arrays._asdict().items() if value is not None and field not in frozen}

    def of(run):
        def outputs(trained, x):
            own = arrays._replace(**{field: value for field, value in trained.items() if field != "weights"})
            return run(block, x, trained["weights"], experts, own)

        return outputs

    return of(routed_experts), of(reference.routed_experts), trained | {"weights": weights}, x, dy


@pytest.mark.exhaustive("float32-clamped with biases", "nf4-both")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kind", [jnp.float32, "nf4"], ids=["float32", "nf4"])
def test_equals_every_expert_on_every_token(compare, name, kind):
    compare(*operands(name, kind, jnp.float32))


@pytest.mark.parametrize("name, kind", [("both", "nf4"), ("clamped with biases", jnp.float32)])
def test_one_token_reads_its_experts_alone(name, kind):
    """The result is that among many tokens, though the adapters of experts that are not chosen are NaN."""
    maker = Maker()
    block, arrays = make(maker, name, kind)
    x, (weights, experts) = maker.normal(TOKENS, WIDTH), routing()
    every = routed_experts(block, x, weights, experts, arrays)
    for token in (0, 7):
        others = jnp.array([number for number in range(EXPERTS) if number not in experts[token]])
        poisoned = {part: tuple(m.at[others].set(jnp.nan) for m in pair) for part, pair in arrays.matrices.items()}
        one = (value[token : token + 1] for value in (x, weights, experts))
        alone = jax.jit(routed_experts, static_argnums=0)(block, *one, arrays._replace(matrices=poisoned))
        assert max(distance([alone], [every[token : token + 1]])) < 1e-6


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 7, 32, 64])
@pytest.mark.parametrize("biased", [False, True])
def test_a_few_tokens_on_the_card(tokens, biased):
    """The kernels that read experts where they lie, beside every expert on every token in float32."""
    maker, experts, width, features = Maker(tokens), 32, 512, 256
    sizes = {"gate_up_proj": (2 * features, width), "down_proj": (width, features)}
    weights = [
        jax.vmap(NF4Weight.quantize)(maker.normal(experts, *shape, scale=shape[1] ** -0.5)) for shape in sizes.values()
    ]
    matrices = {
        name: (maker.normal(experts, 16, shape[1], scale=shape[1] ** -0.5), maker.normal(experts, shape[0], 16))
        for name, shape in sizes.items()
    }
    biases = [maker.normal(experts, rows) if biased else None for rows, _ in sizes.values()]
    parts = [PartSpec(name, shape[0], 16, 0.5) for name, shape in sizes.items()]
    block, arrays = (
        Block(experts, "silu", None, *parts),
        Operands(weights[0], biases[0], weights[1], biases[1], matrices),
    )
    x = maker.normal(tokens, width, dtype=jnp.bfloat16)
    if reason := why_not_where_they_lie(block, x, arrays):
        pytest.skip(reason)
    scores, chosen = jax.lax.top_k(jax.nn.sigmoid(maker.normal(tokens, experts).at[:, 3].set(5.0)), 8)
    ours = jax.jit(routed_experts, static_argnums=0)(block, x, scores, chosen, arrays)
    plain = reference.routed_experts(block, x.astype(jnp.float32), scores, chosen, arrays)
    # roundings to bfloat16: of NF4's values, of the rank products, of s·B, of each large product and of h
    assert max(distance([ours], [plain])) < 5 * 2**-9


@pytest.mark.exhaustive("biases")
@pytest.mark.parametrize("name", ["both", "biases"])  # in 16 bits a value on the clamp's edge has either derivative
def test_in_16_bits(name):
    unit, plain, trained, x, dy = operands(name, jnp.bfloat16, jnp.bfloat16)
    ours = jax.jit(value_and_gradients, static_argnums=0)(unit, trained, x, dy)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), (trained, x, dy))
        exact = value_and_gradients(plain, *wide)
    # six roundings of at most 2⁻⁹, one after the other: of the product, its sum with the adapter's and with the bias,
    # likewise of the gradient
    assert max(distance(ours, exact)) < 6 * 2**-9


def test_no_gradient_is_scattered():
    maker = Maker(1)
    block, arrays = make(maker, "clamped with biases", jnp.float32)
    weights, experts = routing()

    def loss(x, weights, arrays):
        return routed_experts(block, x, weights, experts, arrays).sum()

    program = jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(maker.normal(TOKENS, WIDTH), weights, arrays)
    scattered = [line for line in str(program).splitlines() if "= scatter" in line]
    assert scattered and all(":i32[" in line for line in scattered)  # the numbers of the inverse permutation alone


@pytest.mark.parametrize(
    "policy, expected",
    [
        (jax.checkpoint_policies.save_only_these_names(*SAVED), [4, 8, 2 * FEATURES]),
        (jax.checkpoint_policies.nothing_saveable, []),
    ],
)
def test_kept_for_each_pair_of_token_and_expert(policy, expected):
    unit, _, trained, x, _ = operands("both", "nf4", jnp.bfloat16)
    kept = jax.checkpoint(unit, policy=policy)
    pullback = jax.eval_shape(lambda trained, x: jax.vjp(kept, trained, x)[1], trained, x)
    shapes = [leaf.shape for leaf in jax.tree.leaves(pullback) if hasattr(leaf, "shape")]
    pairs = sorted(shape for shape in shapes if shape[:1] == (TOKENS * CHOSEN,))
    assert pairs == [(TOKENS * CHOSEN, features) for features in expected]


def test_packed_experts_decode_as_matrices_of_their_own():
    maker = Maker(3)
    whole = maker.normal(EXPERTS, 64, 128)
    packed = jax.vmap(NF4Weight.quantize)(whole)
    alone = jnp.stack([as_weight(NF4Weight.quantize(matrix)).dequantize(jnp.float32) for matrix in whole])
    assert jnp.array_equal(packed.experts(jnp.float32), alone)
