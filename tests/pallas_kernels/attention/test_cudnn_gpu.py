"""cuDNN's attention on a real card, forward and backward, against a float64 oracle.

The bound is that of FlashAttention's own tests: a kernel may be off by at most twice (gradients: three times) what the
plain formula in the same 16-bit inputs, with its probabilities rounded to 16 bits, is off. Besides, the root mean
square of the error stays under 1% of the result's for bfloat16 (three roundings of 2⁻⁹ each) and 0.2% for float16.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention import SAVEABLE_NAMES, attention, reference, segment_ranges

pytestmark = pytest.mark.gpu

BATCH, LENGTH = 2, 512
#: Query heads, key heads and their size, of Llama 3 8B and 2 7B, Llama 3.2 1B and Gemma 2 2B.
HEADS = {
    "llama-3-8b": (32, 8, 128),
    "llama-2-7b": (32, 32, 128),
    "llama-3.2-1b": (32, 8, 64),
    "gemma-2-2b": (8, 4, 256),
}
RMS = {jnp.bfloat16: 0.01, jnp.float16: 0.002}


def inputs(model, dtype):
    rng = np.random.default_rng(0)
    heads, kv_heads, size = HEADS[model]
    q_shape, k_shape = (BATCH, LENGTH, heads, size), (BATCH, LENGTH, kv_heads, size)
    return tuple(jnp.asarray(rng.standard_normal(s), dtype) for s in (q_shape, k_shape, k_shape, q_shape))


def packed_rows():
    """A row of six documents (one of length 1) with padding behind them, and one of two documents."""
    rows = np.zeros((BATCH, LENGTH), np.int32)
    for row, lengths in enumerate(((100, 1, 37, 128, 64, 150), (300, 212))):
        rows[row, : sum(lengths)] = np.repeat(np.arange(1, len(lengths) + 1), lengths)
    return rows


def value_and_gradients(function, *arrays):
    @jax.jit
    def both(q, k, v, dout):
        out, vjp = jax.vjp(function, q, k, v)
        return (out, *vjp(dout))

    return [np.asarray(a, np.float64) for a in both(*arrays)]


def assert_as_good_as_16_bits_allow(arrays, dtype, implementation="cudnn", **options):
    def using(implementation):
        return lambda q, k, v: attention(q, k, v, implementation=implementation, **options)

    ours, plain = (value_and_gradients(using(name), *arrays) for name in (implementation, "xla"))
    with jax.enable_x64(True):
        wide = [jnp.asarray(a, jnp.float64) for a in arrays]
        exact = value_and_gradients(lambda q, k, v: reference.attention(q, k, v, **options), *wide)
    for name, actual, rounded, expected in zip(("out", "dq", "dk", "dv"), ours, plain, exact, strict=True):
        error, allowed = np.abs(actual - expected), np.abs(rounded - expected).max()
        assert error.max() <= (2 if name == "out" else 3) * allowed + 1e-5, name
        # Where a query sees itself alone, dq and dk are zero: what is left of p · (dp − delta) is float32's rounding.
        assert np.sqrt(np.mean(error**2)) <= RMS[dtype] * np.sqrt(np.mean(expected**2)) + 1e-6, name
    return ours


SEGMENTS = packed_rows()
PADDING = np.stack([np.ones(LENGTH, np.int32), np.zeros(LENGTH, np.int32)])
EVERY_HEAD = [(heads, dtype) for heads in HEADS for dtype in (jnp.bfloat16, jnp.float16)]
CASES = [
    *[(*head, {}) for head in EVERY_HEAD],
    *[(*head, {"ids": SEGMENTS, "causal": causal}) for head in EVERY_HEAD for causal in (True, False)],
    *[("llama-3-8b", jnp.bfloat16, {"sliding_window": window}) for window in (1, 100, LENGTH)],
    *[("llama-3-8b", jnp.bfloat16, {"sliding_window": window, "ids": SEGMENTS}) for window in (1, 100, LENGTH)],
    ("llama-3-8b", jnp.bfloat16, {"causal": False, "scale": 0.05}),
    ("llama-3-8b", jnp.bfloat16, {"ids": PADDING}),
    ("llama-3-8b", jnp.bfloat16, {"ids": SEGMENTS, "implementation": ("cudnn", "xla")}),
    ("llama-3-8b", jnp.bfloat16, {"ids": SEGMENTS, "implementation": ("xla", "cudnn")}),
]  # fmt: skip


@pytest.mark.parametrize(("heads", "dtype", "options"), CASES)
def test_output_and_gradients(heads, dtype, options):
    """As ids and, where each pass may be cuDNN's alone, as ranges; nothing for padding."""
    options = dict(options)
    ids = options.pop("ids", None)
    documents = {} if ids is None else {"segment_ids": jnp.asarray(ids)}
    if "implementation" in options:
        documents = {"segment_ranges": segment_ranges(jnp.asarray(ids))}
    for array in assert_as_good_as_16_bits_allow(inputs(heads, dtype), dtype, **options, **documents):
        assert np.all(np.isfinite(array)) and (ids is None or not np.any(array[ids == 0]))


def test_log_sum_exp():
    q, k, v, _ = inputs("llama-3-8b", jnp.bfloat16)
    segments = jnp.asarray(packed_rows())
    for documents in ({}, {"segment_ids": segments}, {"segment_ranges": segment_ranges(segments)}):
        (_, ours), (_, plain) = (
            attention(q, k, v, return_lse=True, implementation=(name, "xla"), **documents) for name in ("cudnn", "xla")
        )
        np.testing.assert_allclose(ours, plain, rtol=1e-4, atol=1e-4)  # float32 exponentials by the card's own function


def test_packed_equals_unpacked():
    """Each document of even length alone equals itself in the packed row."""
    arrays, segments = inputs("llama-3-8b", jnp.bfloat16), packed_rows()

    def packed(q, k, v):
        return attention(q, k, v, segment_ids=jnp.asarray(segments), implementation="cudnn")

    together = value_and_gradients(packed, *arrays)
    for document in np.unique(segments[0][segments[0] > 0]):
        (where,) = np.nonzero(segments[0] == document)
        if where.size % 2:
            continue
        alone = [a[:1, where[0] : where[-1] + 1] for a in arrays]
        single = value_and_gradients(lambda q, k, v: attention(q, k, v, implementation="cudnn"), *alone)
        for ours, theirs in zip(together, single, strict=True):
            theirs_scale = np.abs(theirs).max()
            # two kernels (with a bias and without) round the same sums in another order: two units of bfloat16
            np.testing.assert_allclose(ours[:1, where[0] : where[-1] + 1], theirs, atol=2**-7 * theirs_scale)


def test_saved_residuals_give_the_same_gradients_with_one_forward_kernel():
    q, k, v, _ = inputs("llama-3-8b", jnp.bfloat16)

    def loss(q, k, v):
        return jnp.sum(jnp.sin(attention(q, k, v, implementation="cudnn").astype(jnp.float32)))

    policy = jax.checkpoint_policies.save_only_these_names(*SAVEABLE_NAMES)
    kept = jax.jit(jax.grad(jax.checkpoint(loss, policy=policy), argnums=(0, 1, 2)))
    again = jax.jit(jax.grad(jax.checkpoint(loss), argnums=(0, 1, 2)))
    for one, two in zip(kept(q, k, v), again(q, k, v), strict=True):
        np.testing.assert_allclose(np.asarray(one, np.float32), np.asarray(two, np.float32), rtol=0.02, atol=1e-3)
    text = kept.lower(q, k, v).compile().as_text()
    assert text.count('custom_call_target="__cudnn$fmhaSoftmax"') == 1
    assert text.count('custom_call_target="__cudnn$fmhaSoftmaxBackward"') == 1
