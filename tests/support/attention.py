"""Attention's test inputs, its oracle in float64, and the closeness required of an implementation."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.attention import reference

# Three documents (one of length 1) and padding; a row of one document; a row of padding.
PACKED = np.array([[1] * 6 + [2] + [3] * 7 + [0] * 2, [1] * 16, [0] * 16], np.int32)


#: For functions that run once: compiling them takes a third of the time.
QUICK = {"xla_backend_optimization_level": 0}


def once(function, *arguments):
    """The function's results, compiled as a whole (compiling it op by op takes longer)."""
    return jax.jit(function, compiler_options=QUICK)(*arguments)


def inputs(batch=3, length=16, keys=None, heads=4, kv_heads=2, size=8, value_size=None, dtype=jnp.float32, seed=0):
    """q, k, v and a cotangent of the output."""
    rng = np.random.default_rng(seed)
    keys = length if keys is None else keys
    value_size = size if value_size is None else value_size
    shapes = (
        (batch, length, heads, size),
        (batch, keys, kv_heads, size),
        (batch, keys, kv_heads, value_size),
        (batch, length, heads, value_size),
    )
    return tuple(jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes)


def value_and_gradients(function, *arrays):
    """A function's output and the gradients of q, k and v; arrays are q, k, v and the output's cotangent."""

    def both(q, k, v, dout):
        out, vjp = jax.vjp(function, q, k, v)
        return (out, *vjp(dout))

    return once(both, *arrays)


def gradients(function, arguments: dict[str, Any], cotangents) -> dict[str, np.ndarray]:
    """A function's results ("out", "lse") and the gradients of its arguments by name, in float64."""

    def both(arguments, cotangents):
        results, vjp = jax.vjp(lambda arguments: function(**arguments), arguments)
        return results, *vjp(cotangents)

    results, found = once(both, arguments, cotangents)
    named = dict(zip(("out", "lse"), results, strict=True)) | {f"d{name}": leaf for name, leaf in found.items()}
    return {name: np.asarray(leaf, np.float64) for name, leaf in named.items()}


def expected(arguments: dict[str, Any], cotangents, options: dict[str, Any]) -> dict[str, np.ndarray]:
    """The reference's results and gradients by name, computed in float64."""
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), (arguments, cotangents))
        return gradients(lambda **a: reference.attention(**a, **options, return_lse=True), *wide)


def oracle(q, k, v, dout, **options):
    """The reference's output and gradients of q, k and v in float64."""
    with jax.enable_x64(True):
        wide = [jnp.asarray(a, jnp.float64) for a in (q, k, v, dout)]
        results = value_and_gradients(lambda q, k, v: reference.attention(q, k, v, **options), *wide)
        return tuple(np.asarray(a) for a in results)


def assert_close(ours, theirs, tolerance):
    """Every array within the tolerance of the expected one, relative to its element and to its largest element."""
    for actual, expected in zip(ours, theirs, strict=True):
        actual = np.asarray(actual, np.float64)
        assert np.all(np.isfinite(actual))
        np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance * np.abs(expected).max())
