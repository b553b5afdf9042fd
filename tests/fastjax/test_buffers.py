"""Zeros by one program."""

import logging

import jax
import numpy as np

from fastjax.buffers import zeros


def test_equal_shapes_have_buffers_of_their_own(caplog):
    shape = jax.ShapeDtypeStruct((4, 771), "bfloat16")
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        one, nothing, other = zeros([shape, None, shape])
        zeros([shape, None, shape])
    assert sum("Finished XLA compilation" in record.message for record in caplog.records) == 1
    assert nothing is None and one.unsafe_buffer_pointer() != other.unsafe_buffer_pointer()
    np.testing.assert_array_equal(one, np.zeros((4, 771)))
