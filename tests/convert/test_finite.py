"""Values that are no finite numbers, in every dtype, wherever they stand."""

import numpy as np
import pytest

from convert.finite import is_finite
from convert.tensor_file import DTYPES


@pytest.mark.parametrize("name", DTYPES)
def test_finite(name):
    dtype = DTYPES[name]
    values = np.array([1, 2, 2, 1]).astype(dtype)
    assert is_finite(values) and is_finite(values[:0])
    if dtype.kind not in "iub" and name not in ("F8_E4M3", "F8_E8M0"):
        assert not is_finite(np.array([0, np.inf, 1]).astype(dtype))
        assert not is_finite(np.array([0, -np.inf, 1]).astype(dtype))
    if dtype.kind not in "iub":
        assert not is_finite(np.array([1, np.nan, 1]).astype(dtype))


@pytest.mark.parametrize("name", [name for name, dtype in DTYPES.items() if dtype.kind not in "iub"])
def test_every_bit_pattern_is_judged_as_by_numpy(name):
    dtype = DTYPES[name]
    patterns = np.arange(256 ** min(dtype.itemsize, 2), dtype=f"u{min(dtype.itemsize, 2)}")
    patterns = patterns.astype(f"u{dtype.itemsize}") << (8 * max(0, dtype.itemsize - 2))
    values = patterns.view(dtype)
    with np.errstate(invalid="ignore"):  # of a signalling NaN
        finite = np.isfinite(values)
    assert not is_finite(values) and is_finite(values[finite])
    assert not any(is_finite(value) for value in values[~finite][:, None])
    assert is_finite(np.broadcast_to(values[finite][:1], (3, 5))[:, ::2])


@pytest.mark.parametrize("place", [0, 2**19 - 1, 2**19, 2**20 + 3, -1])
def test_one_among_many(place):
    values = np.ones(2**20 + 5, np.float16)
    assert is_finite(values)
    values[place] = -np.inf
    assert not is_finite(values)
