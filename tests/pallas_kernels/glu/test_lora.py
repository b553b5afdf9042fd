"""The gated product between adapters: XLA against float64 by differentiation, Triton in the interpreter against XLA."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dispatch
from pallas_kernels.glu.lora import (
    REGISTRY,
    Case,
    Inner,
    config,
    glu_lora_backward,
    glu_lora_forward,
    reference,
    triton,
)
from pallas_kernels.tiles import RANKS, padded_rank
from tests.support.aot import AOT, needs_cuda_plugin
from tests.support.resources import of_triton

ROWS, FEATURES = 128, 192
#: rank of gate and up, whether they share a rank product, rank of down; 0: no adapter
CASES = [(16, False, 32), (32, True, 16), (16, False, 0), (0, False, 16), (0, False, 0)]


def operands(rank, shared, down, dtype, rows=ROWS, features=FEATURES, make=None):
    """gate_up, products, B, dh, A, dproducts; None where there is no adapter."""
    rng = np.random.default_rng(0)
    make = make or (lambda shape, scale: jnp.asarray(scale * rng.standard_normal(shape), dtype))
    return (
        make((rows, 2 * features), 1.0),
        make((rows, rank if shared else 2 * rank), 1.0) if rank else None,
        make((2, features, rank), 0.3) if rank else None,
        make((rows, features), 1.0),
        make((down, features), 0.3) if down else None,
        make((rows, down), 0.3) if down else None,
    )


def exact(arrays, activation):
    """The same as `results`, in float64 by differentiation."""
    with jax.enable_x64(True):
        gate_up, products, b, dh, a, dproducts = (None if v is None else v.astype(jnp.float64) for v in arrays)
        (h, down_products), pullback = jax.vjp(
            lambda *args: reference.glu_lora(*args, activation=activation), gate_up, products, b, a
        )
        dgate_up, _, db, da = pullback((dh, dproducts))
    return h, down_products, dgate_up, None if rank_of(arrays) else h, db, da


def rank_of(arrays):
    """The largest rank; 0: there is no adapter."""
    return max(0 if arrays[place] is None else arrays[place].shape[axis] for place, axis in ((2, 2), (4, 0)))


def results(gate_up, products, b, dh, a, dproducts, activation, implementation=None):
    inner = None if products is None else Inner(products, b)
    forward = glu_lora_forward(gate_up, inner, a, activation=activation, implementation=implementation)
    down = None if a is None else (a, dproducts)
    options = {"activation": activation, "with_h": inner is None and a is None, "implementation": implementation}
    backward = glu_lora_backward(gate_up, inner, dh, down, **options)
    return *forward, *backward


def why_not_triton(*case):
    return REGISTRY.reasons(Case(dispatch.target(), *case))["triton"]


def close(found, expected, tolerance):
    """By the norm of the difference; None in the same places."""
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
            assert np.linalg.norm(ours - theirs) < tolerance * np.linalg.norm(theirs)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_xla_matches_float64(case, activation):
    arrays = operands(*case, jnp.float32)
    found = jax.jit(results, static_argnums=(6,))(*arrays, activation)
    # float32, sums of up to 192 products
    close(found, exact(arrays, activation), 1e-6)


@pytest.mark.both_worlds(
    "capability1-silu-case0", "capability1-silu-case1", "capability1-silu-case3", "capability0-relu-case2"
)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("activation", config.ACTIVATIONS[:1] + config.ACTIVATIONS[3:4] + config.ACTIVATIONS[-1:])
@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
def test_triton_in_the_interpreter_matches_float64(case, activation, capability):
    gate_up, products, b, dh, a, dproducts = arrays = operands(*case, jnp.bfloat16)
    rank = rank_of(arrays)
    tiles = config.forward_config(capability, rank), config.backward_config(capability, rank)
    forward = triton.forward(gate_up, products, b, a, activation, tiles[0], True)
    backward = triton.backward(gate_up, products, b, dh, a, dproducts, activation, tiles[1], not rank, True)
    # two roundings to bfloat16, each of at most 2^-9: of the terms summed over features or tokens, and of the result
    close((*forward, *backward), exact(arrays, activation), 2**-8.5)


def test_a_run_of_several_tiles_is_added_up():
    """More tiles than a program goes over, in numbers that the loop does not divide."""
    arrays = gate_up, products, b, dh, a, dproducts = operands(
        16, False, 16, jnp.bfloat16, rows=5 * 64, features=3 * 64
    )
    tiles = config.Tiles(64, 64, 2, 4, 1)
    forward = triton.forward(gate_up, products, b, a, "silu", tiles, True)
    backward = triton.backward(gate_up, products, b, dh, a, dproducts, "silu", tiles, False, True)
    close((*forward, *backward), exact(arrays, "silu"), 2**-8.5)


@pytest.mark.aot
@needs_cuda_plugin
@pytest.mark.both_worlds("16-h200", others="newer_world")
@pytest.mark.parametrize("card", ["h200", "a100-80", "4090"])
@pytest.mark.parametrize("rank", RANKS)
def test_nothing_spills(card, rank, tmp_path):
    aot = AOT(card)
    if rank > config.largest_rank(aot.card.capability):
        with aot.abstract_device():
            assert "ranks" in why_not_triton((8192, 28672), jnp.bfloat16, (rank, rank), "silu")
        return
    make = lambda shape, scale: aot.spec(shape, jnp.bfloat16)  # noqa: E731
    specs = operands(rank, False, rank, jnp.bfloat16, 8192, 14336, make)
    found = of_triton(aot, lambda *arrays: results(*arrays, "silu", "triton"), *specs, folder=tmp_path)
    assert found is None or found.spill_bytes == 0


def test_what_triton_leaves_to_xla_and_why():
    aot = AOT("h200") if needs_cuda_plugin.args[0] is False else None
    if aot is None:
        assert "compute capability 8.0" in why_not_triton((64, 128), jnp.bfloat16, (16, 16), "silu")
        return
    with aot.abstract_device():
        assert why_not_triton((8192, 256), jnp.bfloat16, (16, 64), "silu") is None
        assert "float32" in why_not_triton((8192, 256), jnp.float32, (16, 16), "silu")
        assert "no gelu" in why_not_triton((8192, 256), jnp.bfloat16, (16, 16), "gelu")
        assert "not 130" in why_not_triton((8192, 256), jnp.bfloat16, (16, 130), "silu")
        assert "whole tiles of 64" in why_not_triton((8190, 256), jnp.bfloat16, (16, 16), "silu")


def test_ranks_are_padded_to_what_kernels_serve():
    assert [padded_rank(rank) for rank in (1, 16, 17, 64, 65, 128, 130)] == [16, 16, 32, 64, 128, 128, 130]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"activation": "mish"}, "activation must be one of"),
        ({"gate_up": jnp.ones((8, 7))}, "gate and up must be one array"),
        ({"inner": Inner(jnp.ones((8, 3)), jnp.ones((2, 4, 2)))}, r"products \[8, 2R\] or \[8, R\]"),
        ({"down_A": jnp.ones((2, 5))}, r"down_A must be \[R, 4\]"),
        ({"down_A": jnp.ones((2, 4), jnp.bfloat16)}, "one dtype"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    arguments = {"gate_up": jnp.ones((8, 8)), "inner": None, "down_A": None, "activation": "silu", **change}
    with pytest.raises(ValueError, match=message):
        glu_lora_forward(**arguments)
