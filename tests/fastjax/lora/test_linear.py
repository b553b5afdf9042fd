"""Projections of one input as a unit: values and gradients against float64, for every option of adapters."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fastjax.lora import reference
from fastjax.lora.linear import project, split_parts
from fastjax.lora.params import LoraEmbedding, LoraLinear
from fastjax.lora.units import Tokens
from fastjax.quantization.float8 import in_float8
from tests.fastjax.lora.conftest import BATCH, LENGTH, WIDTH, Maker, counted, value_and_gradients

SIZES = (("q_proj", 128), ("k_proj", 64), ("v_proj", 64))
#: name -> ranks of q, k and v (0: no adapter), options
CASES = {
    "all": ((8, 8, 8), {}),
    "a subset": ((8, 0, 8), {}),
    "one": ((0, 4, 0), {}),
    "ranks of their own": ((16, 3, 5), {}),
    "dropout": ((8, 8, 8), {"dropout": 0.3}),
    "dropout of a subset": ((8, 0, 4), {"dropout": 0.3}),
    "DoRA": ((8, 8, 8), {"dora": True}),
    "DoRA on a subset": ((8, 0, 3), {"dora": True}),
    "DoRA with dropout": ((8, 0, 8), {"dora": True, "dropout": 0.3}),
}


def make(maker, ranks, dtype=jnp.float32, **options):
    pairs = zip(ranks, SIZES, strict=True)
    scalings = iter((1.5, 0.25, 2.0))
    return nnx.Dict(
        {
            name: maker.adapter(rank, rows, scaling=next(scalings), dtype=dtype, **options)
            for rank, (name, rows) in pairs
            if rank
        }
    )


def functions(adapters, weight, sizes=SIZES, **options):
    """The unit, plain LoRA, and what they train."""
    graphdef, state = nnx.split(adapters)

    def of(implementation, split):
        def run(trained, x):
            key = jax.random.key(3) if options.get("dropout") else None
            return split(implementation(sizes, weight, nnx.merge(graphdef, trained), x, key), sizes)

        return run

    return of(project, split_parts), of(reference.project, columns), nnx.to_pure_dict(state)


def columns(y, sizes):
    """Plainly, of each part."""
    return tuple(jnp.split(y, np.cumsum([rows for _, rows in sizes])[:-1].tolist(), axis=-1))


@pytest.mark.exhaustive(
    "float32-float32-DoRA with dropout",
    "float32-float32-ranks of their own",
    "bfloat16-bfloat16-a subset",
)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("dtype", "kind"), [(jnp.float32, jnp.float32), (jnp.bfloat16, jnp.bfloat16)])
def test_equals_plain_lora(compare, name, dtype, kind):
    maker, (ranks, options) = Maker(), CASES[name]
    adapters = make(maker, ranks, **options)
    weight = maker.weight(kind, [rows for _, rows in SIZES])
    x = maker.normal(BATCH, LENGTH, WIDTH, dtype=dtype)
    dy = tuple(maker.normal(BATCH, LENGTH, rows, dtype=dtype) for _, rows in SIZES)
    compare(*functions(adapters, weight, **options), x, dy)


@pytest.mark.exhaustive("True-fp8", "False-mixed", "False-nf4")
@pytest.mark.parametrize("kind", [jnp.bfloat16, "nf4", "fp8", "mixed", "float8"])
@pytest.mark.parametrize("added", [True, False])
def test_what_a_fresh_adapter_makes_counts_once(kind, added):
    """A tenth of the last place of bfloat16: of a product that was rounded before, half of it or its double is left."""
    maker = Maker()
    a, b = maker.normal(4, WIDTH, scale=WIDTH**-0.5, dtype=jnp.bfloat16), maker.normal(512, 4, scale=2.0**-13)
    weight = maker.weight("nf4" if kind == "float8" else kind, [256, 256])
    weight = in_float8(weight) if kind == "float8" else weight
    x, residual = maker.normal(2, 256, WIDTH, dtype=jnp.bfloat16), maker.normal(2, 256, 512, dtype=jnp.bfloat16)

    @jax.jit
    def run(lora_B, x):
        adapters = nnx.Dict(o_proj=LoraLinear(a, lora_B, None, scaling=1.0, dropout=0.0))
        return project([("o_proj", 512)], weight, adapters, x, None, None, residual if added else None)

    addend = np.asarray(x @ a.T, np.float64) @ np.asarray(b.astype(jnp.bfloat16), np.float64).T
    assert counted(run, (b, addend), x) == pytest.approx(1, abs=0.05)


@pytest.mark.exhaustive("nf4-DoRA", "mixed-dropout")
@pytest.mark.parametrize("name", ["a subset", "dropout", "DoRA", "DoRA with dropout"])
@pytest.mark.parametrize("kind", ["nf4", "fp8", "mixed"])
def test_equals_plain_lora_on_packed_weights(compare, name, kind):
    maker, (ranks, options) = Maker(1), CASES[name]
    adapters = make(maker, ranks, **options)
    weight = maker.weight(kind, [rows for _, rows in SIZES])
    x = maker.normal(BATCH, LENGTH, WIDTH)
    dy = tuple(maker.normal(BATCH, LENGTH, rows) for _, rows in SIZES)
    compare(*functions(adapters, weight, **options), x, dy)


def test_adapters_in_16_bits_get_gradients_in_16_bits(compare):
    maker = Maker(2)
    adapters = make(maker, (8, 8, 8), jnp.bfloat16)
    weight = maker.weight(jnp.bfloat16, [rows for _, rows in SIZES])
    x = maker.normal(BATCH, LENGTH, WIDTH, dtype=jnp.bfloat16)
    dy = tuple(maker.normal(BATCH, LENGTH, rows, dtype=jnp.bfloat16) for _, rows in SIZES)
    compare(*functions(adapters, weight), x, dy)


@pytest.mark.exhaustive("True")
@pytest.mark.parametrize("dora", [False, True])
def test_an_input_that_is_dropped_before(compare, dora):
    maker = Maker(3)
    adapters = make(maker, (8, 8, 8), dora=dora)
    weight = maker.weight(jnp.float32, [rows for _, rows in SIZES])
    graphdef, state = nnx.split(adapters)

    def of(implementation):
        def run(trained, pair):
            return columns(implementation(SIZES, weight, nnx.merge(graphdef, trained), pair[0], None, pair[1]), SIZES)

        return run

    x, other = maker.normal(2, BATCH, LENGTH, WIDTH)
    dy = tuple(maker.normal(BATCH, LENGTH, rows) for _, rows in SIZES)
    trained = nnx.to_pure_dict(state)
    run = jax.jit(value_and_gradients, static_argnums=0)
    found, expected = (run(of(each), trained, (x, other), dy) for each in (project, reference.project))
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        # float32, sums of up to a few hundred products
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=3e-6 * np.abs(theirs).max())


@pytest.mark.parametrize("kind", [jnp.float32, "mixed"])
def test_a_plain_weight_gets_its_gradient_where_it_is_asked_for(kind):
    maker = Maker(4)
    adapters = make(maker, (4, 0, 4))
    weight = maker.weight(kind, [rows for _, rows in SIZES])
    x = maker.normal(BATCH, LENGTH, WIDTH)
    floats, treedef = jax.tree.flatten(weight)
    chosen = [n for n, leaf in enumerate(floats) if leaf.dtype == jnp.float32 and leaf.shape[-1] == WIDTH]

    def loss(implementation, plain):
        leaves = list(floats)
        for n, leaf in zip(chosen, plain, strict=True):
            leaves[n] = leaf
        return jnp.sum(jnp.sin(implementation(SIZES, jax.tree.unflatten(treedef, leaves), adapters, x, None)))

    plain = [floats[n] for n in chosen]
    found = jax.grad(lambda p: loss(project, p))(plain)
    expected = jax.grad(lambda p: loss(reference.project, p))(plain)
    assert len(found) == (1 if kind == jnp.float32 else 2)
    for ours, theirs in zip(found, expected, strict=True):
        # float32, sums over 64 tokens
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6 * np.abs(theirs).max())


@pytest.mark.parametrize("name", CASES)
def test_nothing_large_is_kept(name):
    """Kept for the backward pass: x, packed codes and thin products; DoRA's also keeps the products it scales."""
    maker, (ranks, options) = Maker(5), CASES[name]
    weight = maker.weight("nf4", [rows for _, rows in SIZES])
    unit, _, trained = functions(make(maker, ranks, **options), weight, **options)
    x = maker.normal(BATCH, LENGTH, WIDTH, dtype=jnp.bfloat16)
    pullback = jax.eval_shape(lambda trained, x: jax.vjp(unit, trained, x)[1], trained, x)
    kept = [leaf for leaf in jax.tree.leaves(pullback) if hasattr(leaf, "ndim")]
    decoded = [leaf for leaf in kept if leaf.ndim == 2 and leaf.shape[-1] == WIDTH and leaf.shape[0] >= 64]
    assert not decoded, [leaf.shape for leaf in decoded]
    inputs = [leaf for leaf in kept if leaf.shape == x.shape]
    # with DoRA and dropout each projection has its own input, of which there is no other copy
    assert len(inputs) <= (1 if not (options.get("dora") and options.get("dropout")) else 4)


@pytest.mark.parametrize("dora", [False, True])
def test_an_embeddings_adapter_equals_the_plain_table(dora):
    """Rows of W + s·(B·A)ᵀ: values and gradients."""
    vocabulary, width, rank, maker = 40, 24, 4, Maker()
    table, a, b = maker.normal(vocabulary, width), maker.normal(rank, vocabulary), maker.normal(width, rank)
    magnitude = 1.0 + jnp.abs(maker.normal(width)) if dora else None
    tokens = jnp.asarray(maker.rng.integers(0, vocabulary, (2, 9)), jnp.int32)
    graphdef, state = nnx.split(LoraEmbedding(a, b, magnitude, scaling=1.5))
    weights = maker.normal(2, 9, width)

    def unit(trained):
        adapter = nnx.merge(graphdef, trained)
        return jnp.sum(weights * adapter(tokens, jnp.take(table, tokens, axis=0), table))

    def plain(trained):
        return jnp.sum(weights * reference.embed(nnx.merge(graphdef, trained), tokens, table, jnp.float32))

    found, expected = (jax.value_and_grad(f)(nnx.to_pure_dict(state)) for f in (unit, plain))
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        # float32, sums of a few dozen products
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=3e-6 * np.abs(theirs).max())


class Recorded(Tokens):
    """One device of a layer that several share, and the dtypes of what it sums."""

    shared = True

    def __init__(self):
        self.sums = []

    def own_sums(self, x, travel=None):
        self.sums.append((x.dtype, travel))
        return x


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_a_product_beside_an_adapter_is_summed_in_float32_and_travels_in_the_computations_dtype(dtype):
    maker, tokens = Maker(0), Recorded()
    adapters = {"o_proj": maker.adapter(8, 128, dtype=dtype)}
    weight, x = maker.normal(128, WIDTH).astype(dtype), maker.normal(BATCH, LENGTH, WIDTH).astype(dtype)
    y = project((("o_proj", 128),), weight, adapters, x, None, tokens=tokens)
    assert tokens.sums == [(dtype, None), (jnp.float32, dtype)]  # the rank products first
    np.testing.assert_array_equal(y, project((("o_proj", 128),), weight, adapters, x, None))
