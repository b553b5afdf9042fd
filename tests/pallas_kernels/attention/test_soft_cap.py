"""The assembly of the soft cap, run line by line in NumPy: the card's results up to its roundings of ex2, rcp."""

import re
import struct

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention.call import Options
from pallas_kernels.attention.mosaic_sm90 import soft_cap

OPERATIONS = {
    "mul": lambda a, b: a * b,
    "min": np.minimum,
    "ex2": np.exp2,
    "add": lambda a, b: a + b,
    "rcp": lambda a: np.float32(1) / a,
    "fma": lambda a, b, c: a * b + c,
}


def run(assembly, given):
    """The four results of PTX of `OPERATIONS`, float32, for arrays in $4 to $7."""
    values = {f"${4 + index}": array for index, array in enumerate(given)}

    def value(word):
        if re.fullmatch(r"0f[0-9A-F]{8}", word):
            return np.float32(struct.unpack(">f", bytes.fromhex(word[2:]))[0])
        return values[word]

    for line in assembly.splitlines():
        if line in ("{", "}") or line.startswith(".reg"):
            continue
        operation, target, *operands = re.split(r"[ ,;]+", line.strip(" ;"))
        result = OPERATIONS[operation.split(".")[0]](*map(value, operands))
        values[target] = np.asarray(result, np.float32)
    return [values[f"${index}"] for index in range(4)]


@pytest.mark.parametrize("cap", [1.5, 30.0, 50.0])
def test_the_assembly_is_the_capped_logit(cap):
    rng = np.random.default_rng(0)
    scale = 0.088
    products = [(10.0 ** rng.uniform(-3, 6, 4096) * rng.choice([-1, 1], 4096)).astype(np.float32) for _ in range(4)]
    size = cap * soft_cap.LOG2E
    with np.errstate(over="raise", invalid="raise", divide="raise"):
        found = run(soft_cap._assembly(2 * soft_cap.LOG2E * scale / cap, size), products)
    twin = soft_cap.scaled_tanh(jnp.stack(products), scale / cap, size, interpreted=True)
    for given, ours, theirs in zip(products, found, twin, strict=True):
        exact = size * np.tanh(given.astype(np.float64) * scale / cap)
        # A few roundings of numbers as large as the cap.
        np.testing.assert_allclose(ours, exact, rtol=0, atol=1e-6 * size)
        np.testing.assert_allclose(theirs, exact, rtol=0, atol=1e-6 * size)


def test_which_caps_bound_the_weights():
    """Weights from 2^-cap·log2(e) up, summed over 2^19 keys, are numbers that bfloat16 and float32 have."""
    for cap, dtype, expected in ((50.0, "bfloat16", True), (50.0, "float16", False), (70.0, "bfloat16", False)):
        assert soft_cap.bounded(dtype, Options(1.0, logits_soft_cap=cap)) == expected
    assert not soft_cap.bounded("bfloat16", Options(1.0))
    largest = np.float32(2) ** np.float32(soft_cap._LARGEST_POWER)
    assert np.isfinite(largest * np.float32(2**19) * np.float32(100)) and np.float32(1) / largest > 0
