"""Closeness of results by the norm of their difference, and to the bit."""

import numpy as np


def close(found, expected, tolerance):
    """Each array within the tolerance of the expected one's norm; None in the same places."""
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
            assert np.linalg.norm(ours - theirs) < tolerance * np.linalg.norm(theirs)


def assert_bit_equal(actual, expected):
    """One array's dtype, shape and bits are the other's."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    unsigned = f"uint{8 * actual.dtype.itemsize}"
    np.testing.assert_array_equal(actual.view(unsigned), expected.view(unsigned))
