"""Random projections with adapters, and the comparison of a unit with plain LoRA in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fastjax.lora.params import LoraLinear
from fastjax.quantization import FP8Weight, NF4Weight, concatenate

BATCH, LENGTH, WIDTH = 2, 32, 64


class Maker:
    """Arrays of one seed, one after another."""

    def __init__(self, seed=0):
        self.rng = np.random.default_rng(seed)

    def normal(self, *shape, scale=1.0, dtype=jnp.float32):
        return jnp.asarray(scale * self.rng.standard_normal(shape), dtype)

    def weight(self, kind, rows, columns=WIDTH):
        """[rows, columns] by its kind: a dtype, "nf4", "fp8" or "mixed" of several rows."""
        scale = columns**-0.5
        if kind == "nf4":
            pieces = [NF4Weight.quantize(self.normal(r, columns, scale=scale)) for r in rows]
        elif kind == "fp8":
            scales = jnp.abs(self.normal(sum(rows) // 16, columns // 32, scale=scale))
            codes = self.normal(sum(rows), columns, dtype=jnp.float8_e4m3fn)
            return FP8Weight(codes, scales, (16, 32), codes.shape, "float32")
        elif kind == "mixed":
            pieces = [self.normal(r, columns, scale=scale) for r in rows]
            pieces[0] = NF4Weight.quantize(pieces[0])
        else:
            pieces = [self.normal(r, columns, scale=scale, dtype=kind) for r in rows]
        return concatenate(pieces)

    def adapter(self, rank, rows, columns=WIDTH, *, scaling=1.5, dropout=0.0, dora=False, dtype=jnp.float32):
        a, b = self.normal(rank, columns, scale=columns**-0.5, dtype=dtype), self.normal(rows, rank, dtype=dtype)
        magnitude = 1.0 + 0.2 * jnp.abs(self.normal(rows, dtype=dtype)) if dora else None
        return LoraLinear(a, b, magnitude, scaling=scaling, dropout=dropout)


def value_and_gradients(function, trained, x, dy):
    """The outputs, then the gradients of what is trained and of x."""
    y, pullback = jax.vjp(function, trained, x)
    return (y, *pullback(dy))


def distance(found, expected):
    """‖found - expected‖ / ‖expected‖ of every leaf."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    return [
        float(np.linalg.norm(np.asarray(f, np.float64) - np.asarray(e)) / np.linalg.norm(np.asarray(e, np.float64)))
        for f, e in pairs
    ]


def counted(function, small, x):
    """How many times the output of an adapter that makes little of x is found in a function's output.

    The difference that it makes to rounded sums, projected on it; 1 where each is rounded once.

    Args:
        function: (B, x) -> output.
        small: B, and the addend that it makes of x in float64.
        x: the input.
    """
    lora_B, addend = small
    found, without = (np.asarray(function(B, x), np.float64) for B in (lora_B, jnp.zeros_like(lora_B)))
    return np.sum((found - without) * addend) / np.sum(addend**2)


@pytest.fixture
def compare():
    """Hold a unit and plain LoRA in its dtype against plain LoRA in float64."""

    def check(unit, plain, trained, x, dy):
        ours = jax.jit(value_and_gradients, static_argnums=0)(unit, trained, x, dy)
        unfused = jax.jit(value_and_gradients, static_argnums=0)(plain, trained, x, dy)
        with jax.enable_x64(True):
            # trained arrays stay as they are: their gradients are compared, not their dtype
            wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), (trained, x, dy))
            exact = jax.jit(value_and_gradients, static_argnums=0)(plain, *wide)
        errors, reference = distance(ours, exact), distance(unfused, exact)
        assert jax.tree.structure(ours) == jax.tree.structure(exact)
        assert [leaf.dtype for leaf in jax.tree.leaves(ours)] == [leaf.dtype for leaf in jax.tree.leaves(unfused)]
        for error, other in zip(errors, reference, strict=True):
            # no worse than without the unit, but for the noise of which roundings happen; float32: or what sums of a
            # few hundred products take
            assert error < max(1e-6, 1.15 * other), (errors, reference)

    return check
