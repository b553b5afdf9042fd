"""Refusals of attention and their messages."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention import attention, segment_ranges
from tests.support.attention import PACKED, inputs

IDS = jnp.ones((3, 16), jnp.int32)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"k": jnp.ones((3, 16, 3, 8)), "v": jnp.ones((3, 16, 3, 8))}, r"divides q's heads, got q \(3, 16, 4, 8\), k"),
        ({"v": jnp.ones((3, 15, 2, 8))}, r"v \[batch, keys, key heads, size of a value\].* v \(3, 15, 2, 8\)"),
        ({"k": jnp.ones((3, 16, 2, 4))}, r"k \[batch, keys, key heads, head size\]"),
        ({"q": jnp.ones((16, 4, 8))}, r"q must be \[batch, queries, heads, head size\].* got q \(16, 4, 8\)"),
        ({"q": jnp.ones((3, 0, 4, 8))}, r"nowhere empty.* got q \(3, 0, 4, 8\)"),
        ({"v": jnp.ones((3, 16, 2, 8), jnp.bfloat16)}, "bfloat16, float16 or float32, got float32, float32, bfloat16"),
        ({"sinks": jnp.ones((2,))}, r"sinks must be float32, one for each of 4 heads, got float32\(2,\)"),
        ({"sinks": jnp.ones((4,), jnp.bfloat16)}, r"got bfloat16\(4,\)"),
        ({"segment_ids": jnp.ones((3, 15), jnp.int32)}, r"\[batch, queries\] = \(3, 16\)"),
        ({"segment_ids": jnp.ones((3, 16))}, "segment_ids must be integers, got float32"),
        ({"kv_segment_ids": IDS}, "got None and"),
        ({"query_offset": jnp.zeros((2,), jnp.int32)}, r"one a row \(3\), got 2"),
        ({"sliding_window": 0}, "whole number of at least 1, got 0"),
        ({"sliding_window": 2.5}, "whole number of at least 1, got 2.5"),
        ({"logits_soft_cap": 0.0}, "more than 0, got 0.0"),
        ({"dropout_rate": 1.0, "dropout_key": 0}, "at least 0 and less than 1, got 1.0"),
        ({"dropout_rate": -0.1}, "at least 0 and less than 1, got -0.1"),
        ({"dropout_rate": 0.1}, "dropout_rate 0.1 needs a dropout_key, got None"),
        ({"implementation": "flash"}, "None or one of 'cudnn', 'triton', 'xla', 'mosaic', got 'flash'"),
        ({"implementation": ("xla", "flash")}, r"\(backward\): implementation must be .* got 'flash'"),
        ({"implementation": ("xla", "xla", "xla")}, "a name or a pair of names, .* got .'xla', 'xla', 'xla'."),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    q, k, v, _ = inputs()
    with pytest.raises(ValueError, match=message):
        attention(**({"q": q, "k": k, "v": v} | change))


def test_ranges_of_other_rows_are_refused():
    q, k, v, _ = inputs()
    ranges = jax.eval_shape(segment_ranges, IDS)
    for others, name in (
        (jax.eval_shape(segment_ranges, IDS[:2]), "k_start"),
        (ranges._replace(q_end=IDS[:1]), "q_end"),
    ):
        with pytest.raises(ValueError, match=rf"segment_ranges.{name} must be int32\(3, 16\) for 16 queries"):
            jax.eval_shape(lambda q, ranges: attention(q, k, v, segment_ranges=ranges), q, others)
    with pytest.raises(ValueError, match="expected segment_ids or segment_ranges, .* got both"):
        jax.eval_shape(lambda q, ranges: attention(q, k, v, segment_ranges=ranges, segment_ids=IDS), q, ranges)


@pytest.mark.parametrize(
    "ids, options, message",
    [
        (
            [[1, 2, 1]],
            {},
            "segment_ids: .* in order .* got document 1 after document 2 at row 0, place 2",
        ),
        ([[1, 1, 1], [1, 0, 1]], {}, "got padding within document 1 at row 1, place 1"),
        ([[1, 2, 3]], {"kv_segment_ids": [[2, 1, 1]]}, "kv_segment_ids: expected documents in order"),
        ([[1, 2, 3]], {"kv_segment_ids": [[1], [1]]}, r"got \(1, 3\) and \(2, 1\)"),
    ],
)
def test_documents_that_are_no_ranges_are_refused(ids, options, message):
    options = {name: jnp.asarray(value) for name, value in options.items()}
    with pytest.raises(ValueError, match=message):
        segment_ranges(jnp.asarray(ids), **options)


def test_ids_out_of_order_are_refused_while_tracing_where_they_are_constants():
    constant = np.array([[3, 1]], np.int32)
    with pytest.raises(ValueError, match="document 1 after document 3"):
        jax.eval_shape(lambda: segment_ranges(constant))
    jax.eval_shape(segment_ranges, PACKED)
