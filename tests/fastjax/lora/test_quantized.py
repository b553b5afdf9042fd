"""The unit of merged and quantised projections: autodiff of the dense formula, its switch, its rounding."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fastjax.lora.linear import project
from fastjax.lora.params import LoraLinear
from fastjax.lora.quantized import Quantizer, project_quantized
from fastjax.quantization.fake import ACTIVATIONS, WEIGHTS, fake_quantize
from fastjax.quantization.weights import dequantize
from pallas_kernels.rounding import round_through
from tests.fastjax.lora.conftest import BATCH, LENGTH, WIDTH, Maker, value_and_gradients

#: With scales in float32 the most negative value of a group lies on the bound between two codes, within rounding.
DTYPE = "bfloat16"
SIZES = [("q_proj", 64), ("k_proj", 32), ("v_proj", 32)]
ROWS = [rows for _, rows in SIZES]


def rounded(values):
    """In the values of DTYPE; gradients pass as they are."""
    return values + jax.lax.stop_gradient(round_through(values, DTYPE) - values)


def dense(weights, activations, weight, trained, x):
    """x through its format times the merged matrices through theirs, each with one scale of its own or none."""
    base, start, found = dequantize(weight, jnp.float32), 0, []
    for name, rows in SIZES:
        own = base[start : start + rows]
        start += rows
        if name in trained:
            own = own + 1.5 * jnp.matmul(trained[name][1], trained[name][0], precision="highest")
        if name in trained or isinstance(weight, jax.Array):
            own = rounded(fake_quantize(rounded(own), weights, DTYPE))
        found.append(own)
    if activations is not None:
        x = fake_quantize(x.reshape(-1, WIDTH), activations).reshape(x.shape)
    return jnp.einsum("bsi,oi->bso", x, jnp.concatenate(found), precision="highest")


@pytest.mark.exhaustive("int4-32-int8-float32", "nf4-None-nf4")
@pytest.mark.parametrize(
    ("weights", "activations", "kind"),
    [("int4-32", "int8", "float32"), ("mxfp4", None, "float32"), ("nf4", None, "nf4"), ("fp8-block", "fp8", "float32")],
)
def test_product_and_gradients_are_those_of_the_merged_weight(weights, activations, kind):
    make = Maker()
    weight = make.weight(kind, ROWS)
    adapters = {name: make.adapter(8, rows) for name, rows in SIZES if name != "k_proj"}
    trained = {name: (adapter.lora_A[...], adapter.lora_B[...]) for name, adapter in adapters.items()}
    x, dy = make.normal(BATCH, LENGTH, WIDTH), make.normal(BATCH, LENGTH, sum(ROWS))
    quantizer = Quantizer(WEIGHTS[weights], ACTIVATIONS.get(activations or ""), DTYPE, copies=kind == "nf4")

    def unit(trained, x):
        own = {name: LoraLinear(*pair, None, scaling=1.5, dropout=0.0) for name, pair in trained.items()}
        return project_quantized(quantizer, SIZES, weight, own, x)

    expected = functools.partial(dense, quantizer.weights, quantizer.activations, weight)
    found = jax.jit(value_and_gradients, static_argnums=0)(unit, trained, x, dy)
    wanted = jax.jit(value_and_gradients, static_argnums=0)(expected, trained, x, dy)
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        # sums of a hundred float32 products in another order
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4 * np.abs(theirs).max())


@pytest.mark.parametrize("trained", [True, False])
def test_until_it_is_in_force_it_is_the_plain_projection(trained):
    make = Maker(1)
    weight = make.weight("float32", ROWS)
    pairs = {} if trained else {"q_proj": tuple(a[...] for a in jax.tree.leaves(make.adapter(8, 64)))}
    x, dy = make.normal(BATCH, LENGTH, WIDTH), make.normal(BATCH, LENGTH, sum(ROWS))
    quantizer = Quantizer(WEIGHTS["int4-32"], None, "float32", trained)

    def own(pairs):
        return {name: LoraLinear(*pair, None, scaling=1.5, dropout=0.0) for name, pair in pairs.items()}

    def unit(state, on, x):
        weight, pairs = state
        return project_quantized(quantizer, SIZES, weight, own(pairs), x, quantizing=on)

    def switched(state, on, x, dy):
        return value_and_gradients(lambda state, x: unit(state, on, x), state, x, dy)

    def without(state, x, dy):
        return value_and_gradients(lambda s, x: project(SIZES, s[0], own(s[1]), x, None), state, x, dy)

    state = (weight, pairs)
    run = jax.jit(switched)
    before, after = run(state, jnp.bool_(False), x, dy), run(state, jnp.bool_(True), x, dy)
    always = jax.jit(lambda s, x, dy: value_and_gradients(lambda s, x: unit(s, None, x), s, x, dy))(state, x, dy)
    plain = jax.jit(without)(state, x, dy)
    assert run._cache_size() == 1
    for found, wanted in ((before, plain), (after, always)):
        if not trained:  # the gradient of a frozen weight is not made
            found, wanted = ((f[0], f[1][1], f[2]) for f in (found, wanted))
        for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-6 * np.abs(theirs).max())
    assert np.abs(before[0] - after[0]).max() > 0.05
