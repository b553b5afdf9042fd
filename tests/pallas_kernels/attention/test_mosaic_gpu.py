"""The Hopper kernels on a real card, forward and backward: odd shapes, repeatability, rows too long for 32 bits."""

import concurrent.futures
import functools
import multiprocessing

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention import attention, reference, segment_ranges
from tests.support.attention import inputs

pytestmark = pytest.mark.gpu

IMPLEMENTATION = "mosaic"
ARRAYS = ("out", "dq", "dk", "dv")

# Documents of one token, one that ends where a tile does, padding between and behind; a row of padding; a whole row.
PACKED = np.zeros((3, 300), np.int32)
PACKED[0, :250] = np.repeat(np.arange(1, 7), (1, 127, 1, 1, 50, 70))
PACKED[0, 180:190] = 0
PACKED[2] = 1
PACKED[0, 190:250] = 7
SINKS = np.array([0.5, -1.0, 2.0, -30.0], np.float32)

#: shape (and dtype), options
CASES = {
    "length 700": ({"length": 700, "size": 128}, {}),
    "length 300, D=80": ({"length": 300, "size": 80}, {}),
    "length 333, D=192, Dv=128": ({"length": 333, "size": 192, "value_size": 128}, {}),
    "length 257, D=256": ({"length": 257, "size": 256}, {}),
    "length 1": ({"length": 1, "size": 64}, {}),
    "not causal, float16": ({"length": 300, "size": 64, "dtype": jnp.float16}, {"causal": False}),
    "more keys, an offset": ({"length": 200, "keys": 700, "size": 64}, {"query_offset": 333}),
    "an offset a row": ({"length": 200, "keys": 333, "size": 64}, {"query_offset": np.array([0, 99, 140], np.int32)}),
    "documents": ({"length": 300, "size": 128}, {"segment_ids": PACKED}),
    "documents, window, cap, sinks": (
        {"length": 300, "size": 64},
        {"segment_ids": PACKED, "sliding_window": 40, "logits_soft_cap": 2.0, "sinks": SINKS},
    ),
    "dropout": ({"length": 300, "size": 64}, {"dropout_rate": 0.2, "dropout_key": 7}),
}


def arrays_and_options(name):
    shape, options = CASES[name]
    arrays = inputs(**{"batch": 3, "dtype": jnp.bfloat16} | shape)
    options = {k: jnp.asarray(v) if isinstance(v, np.ndarray) else v for k, v in options.items()}
    if "dropout_key" in options:
        options["dropout_key"] = jax.random.key(options["dropout_key"])
    return arrays, options


def both(attend):
    """The output and the gradients of q, k and v."""

    def run(q, k, v, dout):
        out, vjp = jax.vjp(attend, q, k, v)
        return (out, *vjp(dout))

    return run


@functools.cache
def compiled_kernel(name):
    arrays, options = arrays_and_options(name)
    if "segment_ids" in options:
        options["segment_ranges"] = segment_ranges(options.pop("segment_ids"))
    attend = functools.partial(attention, implementation=IMPLEMENTATION, **options)
    return jax.jit(both(attend)).lower(*arrays).compile()


def poison(*arrays):
    """Leave NaN in the memory of results of these shapes: elements that a kernel does not write show."""
    jax.block_until_ready([jnp.full(array.shape, jnp.nan, array.dtype) for array in arrays for _ in range(3)])


def error_of(found, exact):
    """Relative Frobenius error; the root mean square of an array that is 0 but for rounding."""
    found, exact = np.asarray(found, np.float64), np.asarray(exact, np.float64)
    norm = max(np.linalg.norm(exact), 1e-3 * np.sqrt(exact.size))
    return np.linalg.norm(found - exact) / norm


@pytest.mark.parametrize("name", CASES)
def test_output_and_gradients(name):
    run, (arrays, options) = compiled_kernel(name), arrays_and_options(name)
    poison(*arrays)
    found = run(*arrays)
    with jax.enable_x64(True):
        exact = jax.jit(both(functools.partial(reference.attention, **options)))
        wanted = exact(*(jnp.asarray(np.asarray(array, np.float64)) for array in arrays))
    for array, ours, theirs in zip(ARRAYS, found, wanted, strict=True):
        assert np.all(np.isfinite(np.asarray(ours, np.float64))), array
        # inputs of the products, weights and results are each rounded to 16 bits: 2⁻⁹ = 2e-3 for bfloat16
        assert error_of(ours, theirs) < 8e-3, array
        if "segment_ids" in options:
            assert not np.any(np.asarray(ours, np.float64)[PACKED == 0]), array


@pytest.mark.parametrize("name", ["length 700", "documents, window, cap, sinks"])
def test_repetitions_are_equal_to_the_bit(name):
    run = compiled_kernel(name)
    arrays, _ = arrays_and_options(name)
    first = [np.asarray(array).view(np.uint16) for array in run(*arrays)]
    for _ in range(5):
        poison(*arrays)
        for one, again in zip(first, run(*arrays), strict=True):
            np.testing.assert_array_equal(one, np.asarray(again).view(np.uint16))


ROWS = 256


def slices(arrays, first, window):
    """The arrays of ROWS queries from `first` on, and of the keys that these may see through a window."""
    q, k, v, dout = arrays
    low, high = max(0, first - window + 1), first + ROWS
    return q[:, first:high], k[:, low:high], v[:, low:high], dout[:, first:high]


def assert_rows_are_right(arrays, window, found):
    """Rows in the middle and at the end of long ones, against the oracle on the keys that they see."""
    out, dq, dk, dv = found
    length = arrays[0].shape[1]
    attend = jax.jit(both(functools.partial(reference.attention, sliding_window=window)))
    for first in (length // 2 - 100, length - ROWS):
        few = slices(arrays, first, window)
        wanted = attend(*(array.astype(jnp.float32) for array in few))
        for name, ours, theirs in zip(ARRAYS, (out, dq), wanted, strict=False):
            assert error_of(ours[:, first : first + ROWS], theirs) < 8e-3, (name, first)
    for name, ours, theirs in zip(ARRAYS[2:], (dk, dv), wanted[2:], strict=True):  # only the last rows see these keys
        assert error_of(ours[:, -ROWS:], theirs[:, -ROWS:]) < 8e-3, name
    for array in found:
        assert bool(jnp.all(jnp.isfinite(array)))


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def drawn(length, heads, kv_heads, size):
    numbers = (heads, kv_heads, kv_heads, heads)
    keys = jax.random.split(jax.random.key(0), 4)
    return [jax.random.normal(key, (1, length, n, size), jnp.bfloat16) for key, n in zip(keys, numbers, strict=True)]


@pytest.mark.parametrize(
    ("length", "heads", "window"),
    [(2**19 - 1, 2, 1000), (2**19 + 128, 64, 200)],
    ids=["half a million tokens", "more than 2³¹ elements"],
)
def test_long_rows(length, heads, window):
    """In a process of its own, which gives its 30 GiB back."""
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        pool.submit(check_long_rows, length, heads, window).result()


def check_long_rows(length, heads, window):
    arrays = drawn(length, heads, 1, 64)
    attend = functools.partial(attention, sliding_window=window, implementation=IMPLEMENTATION)
    found = jax.jit(both(attend))(*arrays)
    assert_rows_are_right(arrays, window, found)
