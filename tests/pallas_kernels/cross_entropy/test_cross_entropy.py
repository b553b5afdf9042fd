"""Chunked = full, in value and in every gradient; operations, residuals, refusals."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from pallas_kernels.cross_entropy import (
    IGNORE_INDEX,
    CrossEntropy,
    chunk_size_for,
    chunked_cross_entropy,
    reference,
    token_log_probs,
    triton,
)
from pallas_kernels.cross_entropy.chunks import REGISTRY
from pallas_kernels.cross_entropy.reference import cross_entropy
from pallas_kernels.cross_entropy.rows import Options, sums_of

B, S, E, V = 2, 12, 16, 37


def project(trainable, frozen, hidden):
    """A head with a frozen weight, a trainable low-rank part and a trainable bias; each may be absent."""
    logits = jnp.zeros((*hidden.shape[:2], V), hidden.dtype)
    if "weight" in frozen:
        logits = logits + jnp.einsum("bse,ev->bsv", hidden, frozen["weight"])
    if "codes" in frozen:
        weight = (frozen["codes"].astype(hidden.dtype) - 8.0) * frozen["step"]
        logits = logits + jnp.einsum("bse,ev->bsv", hidden, weight)
    if "A" in trainable:
        low = jnp.einsum("bse,er->bsr", hidden, trainable["A"].astype(hidden.dtype))
        logits = logits + jnp.einsum("bsr,rv->bsv", low, trainable["B"].astype(hidden.dtype))
    if "bias" in trainable:
        logits = logits + trainable["bias"].astype(hidden.dtype)[None, None, :]
    return logits


def inputs(dtype=jnp.float32, seed=0, batch=B):
    rng = np.random.default_rng(seed)
    hidden = jnp.asarray(rng.standard_normal((batch, S, E)), dtype)
    targets = rng.integers(0, V, (batch, S)).astype(np.int32)
    targets[0, :3] = IGNORE_INDEX
    targets[1, 5] = IGNORE_INDEX
    frozen = {"weight": jnp.asarray(rng.standard_normal((E, V)), dtype)}
    trainable = {
        "A": jnp.asarray(rng.standard_normal((E, 3)), jnp.float32),
        "B": jnp.asarray(rng.standard_normal((3, V)), jnp.float32),
        "bias": jnp.asarray(rng.standard_normal(V), jnp.float32),
    }
    return trainable, frozen, hidden, jnp.asarray(targets)


def capped(trainable, frozen, hidden):
    """`project` with a scale and a soft cap."""
    return 5.0 * jnp.tanh(project(trainable, frozen, hidden) * 0.75 / 5.0)


CAPPED = {"logits_scale": 0.75, "logits_soft_cap": 5.0}


def chunked_loss(chunk_size, head=project, **terms):
    """The mean loss of chunks, as a train step takes it."""

    def loss(trainable, hidden, frozen, targets):
        sums = chunked_cross_entropy(head, trainable, frozen, hidden, targets, chunk_size=chunk_size, **terms)
        return sums.loss_sum / sums.num_targets.astype(sums.loss_sum.dtype), sums

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))


def oracle(trainable, hidden, frozen, targets, head=project, **terms):
    """Whole logits in float64, with gradients."""

    def full_loss(trainable, hidden, frozen, targets):
        sums = cross_entropy(head(trainable, frozen, hidden), targets, **terms)
        return sums.loss_sum / sums.num_targets.astype(sums.loss_sum.dtype), sums

    with jax.enable_x64(True):
        wide = jax.tree.map(lambda a: jnp.asarray(np.asarray(a, np.float64)), (trainable, hidden, frozen))
        results = jax.jit(jax.value_and_grad(full_loss, argnums=(0, 1), has_aux=True))(*wide, targets)
        return jax.tree.map(np.asarray, results)


def assert_close(ours, theirs, tolerance):
    def check(actual, expected):
        expected = np.asarray(expected, np.float64)
        atol = tolerance * np.abs(expected).max()
        np.testing.assert_allclose(np.asarray(actual, np.float64), expected, rtol=tolerance, atol=atol)

    jax.tree.map(check, ours, theirs)


@functools.cache
def default_oracle():
    trainable, frozen, hidden, targets = inputs()
    return oracle(trainable, hidden, frozen, targets)


@pytest.mark.parametrize("chunk_size", [1, 4, 5, 100])  # one, a divisor, one that leaves a rest, more than all
def test_chunks_equal_the_whole_in_value_and_gradient(chunk_size):
    trainable, frozen, hidden, targets = inputs()
    ours = chunked_loss(chunk_size)(trainable, hidden, frozen, targets)
    assert_close(ours, default_oracle(), 2e-6)  # float32


@pytest.mark.parametrize(
    "terms", [{"label_smoothing": 0.1}, {"z_loss": 0.05}, {"label_smoothing": 0.3, "z_loss": 1e-3}]
)
def test_terms_of_the_loss_in_value_and_gradient(terms):
    """Through a soft cap and an adapted head; the cross-entropy and the squares are counted apart."""
    trainable, frozen, hidden, targets = inputs()
    ours = chunked_loss(5, **terms, **CAPPED)(trainable, hidden, frozen, targets)
    expected = oracle(trainable, hidden, frozen, targets, capped, **terms)
    assert_close(ours, expected, 2e-6)  # float32
    (loss, sums), gradients = ours
    (_, plain), plain_gradients = oracle(trainable, hidden, frozen, targets, capped)
    assert_close(sums.cross_entropy_sum, plain.loss_sum, 2e-6)
    assert abs(float(sums.loss_sum) - float(plain.loss_sum)) > 0.01
    assert np.abs(gradients[1] - plain_gradients[1]).max() > 1e-4  # of hidden


def weighted(chunk_size, **options):
    """Σ weight · log p of chunks, with the log-probabilities, as a loss of preferences takes them."""

    def total(trainable, hidden, frozen, targets, weights):
        found = token_log_probs(project, trainable, frozen, hidden, targets, chunk_size=chunk_size, **options)
        return jnp.sum(weights * found), found

    return jax.jit(jax.value_and_grad(total, argnums=(0, 1), has_aux=True))


def weighted_oracle(trainable, hidden, frozen, targets, weights, head=project):
    """`weighted` of whole logits in float64."""

    def total(trainable, hidden):
        found = reference.token_log_probs(head(trainable, wide[2], hidden), targets)
        return jnp.sum(wide[3] * found), found

    with jax.enable_x64(True):
        wide = jax.tree.map(lambda a: jnp.asarray(np.asarray(a, np.float64)), (trainable, hidden, frozen, weights))
        results = jax.jit(jax.value_and_grad(total, argnums=(0, 1), has_aux=True))(*wide[:2])
        return jax.tree.map(np.asarray, results)


@pytest.mark.parametrize("trained", [True, False], ids=["trained", "frozen"])
@pytest.mark.parametrize("dtype, size", [("float32", 1.0), ("bfloat16", 1e-9), ("float16", 1e-9)])
def test_log_probs_of_tokens_with_a_cotangent_each(dtype, size, trained):
    """Through a scale, a soft cap and a chunk that leaves a rest; cotangents of both signs, small ones too."""
    trainable, frozen, hidden, targets = inputs(jnp.dtype(dtype))
    trainable = trainable if trained else {}
    weights = size * np.random.default_rng(3).standard_normal((B, S)).astype(np.float32)
    given = trainable, hidden, frozen, targets, jnp.asarray(weights)
    (_, found), (dtrainable, dhidden) = weighted(5, **CAPPED)(*given)
    (_, expected), (wanted, wanted_hidden) = weighted_oracle(*given, head=capped)
    assert found.dtype == jnp.float32 and dhidden.dtype == hidden.dtype
    assert not np.any(np.asarray(found)[np.asarray(targets) == IGNORE_INDEX])
    if dtype == "float32":
        assert_close((found, dtrainable, dhidden), (expected, wanted, wanted_hidden), 5e-6)
        return
    # logits, their gradient, once more with its factor, and the result in the dtype; its half unit is 2⁻⁹ or 2⁻¹²
    tolerance = 2**-6 if dtype == "bfloat16" else 2**-9
    assert_close((found, dtrainable), (expected, wanted), tolerance)
    if dtype == "bfloat16":  # in float16 the gradient in hidden is below the smallest number, as this loss has no scale
        assert_close(dhidden, wanted_hidden, tolerance)


@pytest.mark.torch
def test_label_smoothing_is_that_of_transformers():
    torch = pytest.importorskip("torch")
    from transformers.trainer_pt_utils import LabelSmoother

    logits, targets = inputs()[2], inputs()[3] % E
    targets = targets.at[0, :3].set(IGNORE_INDEX)
    labels = torch.from_numpy(np.array(targets, np.int64))
    theirs = LabelSmoother(0.2)({"logits": torch.from_numpy(np.array(logits))}, labels)
    ours = cross_entropy(logits, targets, label_smoothing=0.2)
    np.testing.assert_allclose(ours.loss_sum / ours.num_targets.astype(jnp.float32), theirs, rtol=1e-6)


@pytest.mark.exhaustive("37-16-all", "64-16-plain")
@pytest.mark.parametrize("options", [Options(), Options(0.1, 0.01, 0.75, 6.0)], ids=["plain", "all"])
@pytest.mark.parametrize("vocab, columns", [(37, 16), (64, 16), (37, 64)])  # a rest, none, less than a block
def test_rows_of_the_triton_kernel(vocab, columns, options):
    """The kernel in the interpreter, beside float64: numbers and gradient, rows without a target included."""
    rng = np.random.default_rng(2)
    products = (4 * rng.standard_normal((2, 5, vocab))).astype(np.float32)
    products[0, 1] = 3.0  # all equal: the first is the prediction
    if not options.label_smoothing:  # the mean would be infinite
        products[1, 3, :20] = -np.inf  # a block and more
    targets = rng.integers(20, vocab, (2, 5)).astype(np.int32)
    targets[0, :2] = IGNORE_INDEX, 0
    products[0, 2], targets[0, 2] = 3.0, 32  # the first word of its block, and as large as those before
    given = jnp.asarray(products), jnp.asarray(targets), options, columns
    rows, gradient = triton.backward(*given, interpret=True)

    def loss(products):
        logits = options.logits(products)
        sums = cross_entropy(logits, targets, label_smoothing=options.label_smoothing, z_loss=options.z_loss)
        return sums.loss_sum, sums

    with jax.enable_x64(True):
        wide = jnp.asarray(products, jnp.float64)
        (_, expected), wanted = jax.tree.map(np.asarray, jax.value_and_grad(loss, has_aux=True)(wide))
    assert_close(sums_of(rows, jnp.asarray(targets), vocab, options), expected, 1e-6)
    np.testing.assert_allclose(gradient, wanted, rtol=0, atol=1e-6)
    jax.tree.map(np.testing.assert_array_equal, triton.forward(*given, interpret=True), rows)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [Options(), Options(0.1, 1e-3, 0.75), Options(0.1, 1e-3, 0.75, 12.0)], ids=str)
@pytest.mark.parametrize("vocab", [128_256, 50_257])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=str)
def test_rows_of_the_triton_kernel_on_a_card(dtype, vocab, options):
    """Beside XLA's rows of float32 logits on the same card; of scaled bfloat16 ones it rounds the result once more."""
    keys = jax.random.split(jax.random.key(0), 2)
    logits = 4 * jax.random.normal(keys[0], (3, 64, vocab), dtype)
    targets = jax.random.randint(keys[1], (3, 64), 0, vocab, jnp.int32).at[1, 7:30].set(IGNORE_INDEX)
    found, expected = (
        jax.jit(REGISTRY[name].backward, static_argnums=2)(given, targets, options)
        for name, given in (("triton", logits), ("xla", logits.astype(jnp.float32)))
    )
    sums, wanted = (sums_of(rows, targets, vocab, options) for rows, _ in (found, expected))
    assert_close(sums, wanted, 1e-5)  # float32 sums of the vocabulary in another order
    # an exponential of a float32 logit near 20: 20 · 2⁻²⁴, and bfloat16's half unit
    tolerance = 4e-6 if dtype == jnp.float32 else 2**-7
    np.testing.assert_allclose(*(np.asarray(d, np.float32) for d in (found[1], expected[1])), rtol=tolerance, atol=1e-9)


def test_bfloat16_keeps_a_float32_loss():
    trainable, frozen, hidden, targets = inputs(jnp.bfloat16)
    (loss, sums), (dtrainable, dhidden) = chunked_loss(5)(trainable, hidden, frozen, targets)
    assert loss.dtype == sums.loss_sum.dtype == jnp.float32 and dhidden.dtype == jnp.bfloat16
    assert {leaf.dtype for leaf in jax.tree.leaves(dtrainable)} == {jnp.dtype(jnp.float32)}
    (expected, expected_sums), gradients = oracle(trainable, hidden, frozen, targets)
    np.testing.assert_array_equal(sums.num_targets, expected_sums.num_targets)
    np.testing.assert_allclose(loss, expected, rtol=2**-7)  # logits in bfloat16
    assert_close((dtrainable, dhidden), gradients, 2**-6)  # logits, their gradient and the result in bfloat16


def test_gradients_keep_the_dtype_of_their_leaf():
    trainable, frozen, hidden, targets = inputs()
    trainable["bias"] = trainable["bias"].astype(jnp.bfloat16)
    _, (gradients, _) = chunked_loss(4)(trainable, hidden, frozen, targets)
    assert {name: leaf.dtype for name, leaf in gradients.items()} == {
        "A": jnp.float32,
        "B": jnp.float32,
        "bias": jnp.bfloat16,
    }


def test_trainable_gradients_are_summed_in_float32():
    """1,024 chunks of equal gradients in bfloat16: a bfloat16 sum would stop growing at 256 of them."""
    length, width = 1024, 8
    hidden = jnp.ones((1, length, width), jnp.bfloat16)
    targets = jnp.zeros((1, length), jnp.int32)

    def head(trainable, frozen, piece):
        return jnp.einsum("bse,ev->bsv", piece, trainable)

    def loss(trainable):
        return chunked_cross_entropy(head, trainable, (), hidden, targets, chunk_size=1).loss_sum

    gradient = jax.jit(jax.grad(loss))(jnp.zeros((width, 2), jnp.bfloat16))
    np.testing.assert_array_equal(np.asarray(gradient, np.float32), np.tile([-512.0, 512.0], (width, 1)))


def test_a_frozen_quantised_head_without_trainable():
    """Codes in uint8 beside floats; nothing to train in the head; only hidden has a gradient."""
    _, _, hidden, targets = inputs()
    rng = np.random.default_rng(1)
    frozen = {"codes": jnp.asarray(rng.integers(0, 16, (E, V)), jnp.uint8), "step": jnp.float32(0.1)}
    ours = chunked_loss(5)({}, hidden, frozen, targets)
    assert_close(ours, oracle({}, hidden, frozen, targets), 2e-6)


def test_products():
    """A frozen head costs two; without differentiation nothing but the forward pass runs: a head of three products."""
    trainable, *given = inputs()
    frozen, hidden, targets = given
    losses = {
        chunked_loss(4).lower({}, hidden, frozen, targets): 2,
        weighted(5).lower({}, hidden, frozen, targets, jnp.ones((B, S))): 2,
    }
    for operation in (chunked_cross_entropy, token_log_probs):
        plain = jax.jit(functools.partial(operation, project, chunk_size=5))
        losses[plain.lower(trainable, *given)] = 3
        if operation is chunked_cross_entropy:
            assert_close(plain(trainable, *given), default_oracle()[0][1], 2e-6)
    for lowered, products in losses.items():
        assert lowered.as_text().count("dot_general") == products


def test_nothing_is_counted_where_every_target_is_ignored():
    trainable, frozen, hidden, targets = inputs()

    def loss(trainable, hidden):
        nothing = jnp.full_like(targets, IGNORE_INDEX)
        sums = chunked_cross_entropy(project, trainable, frozen, hidden, nothing, chunk_size=5)
        return sums.loss_sum, sums

    (loss_sum, sums), gradients = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(trainable, hidden)
    assert loss_sum == 0 and sums.num_targets == 0 and sums.num_correct == 0
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(gradients))


def test_the_first_of_equal_logits_is_the_prediction():
    logits = jnp.asarray([[[1.0, 3.0, 3.0], [2.0, 2.0, 2.0], [0.0, 0.0, 5.0]]])

    def head(trainable, frozen, piece):
        return piece

    @jax.jit
    def counted(targets):
        sums = chunked_cross_entropy(head, (), (), logits, targets, chunk_size=2)
        return sums.num_correct, cross_entropy(logits, targets).num_correct

    for targets, correct in (([1, 0, 2], 3), ([2, 1, 2], 1), ([1, IGNORE_INDEX, 0], 1)):
        assert counted(jnp.asarray([targets], jnp.int32)) == (correct, correct)


def test_large_logits_stay_finite():
    def head(trainable, frozen, piece):
        return piece * 1e4

    hidden = jnp.asarray(np.random.default_rng(0).standard_normal((1, 4, V)), jnp.float32)
    targets = jnp.asarray([[0, 1, 2, 3]], jnp.int32)

    def loss(hidden):
        return chunked_cross_entropy(head, (), (), hidden, targets, chunk_size=2).loss_sum

    value, gradient = jax.jit(jax.value_and_grad(loss))(hidden)
    expected = cross_entropy(hidden * 1e4, targets).loss_sum
    assert np.isfinite(gradient).all() and np.allclose(value, expected, rtol=1e-6)


@pytest.mark.parametrize("target", [V, -1, -101])
def test_a_target_outside_the_vocabulary_is_not_silent(target):
    trainable, frozen, hidden, targets = inputs()
    given = project, trainable, frozen, hidden, targets.at[1, 2].set(target)
    assert np.isnan(chunked_cross_entropy(*given, chunk_size=4).loss_sum)
    assert np.argwhere(np.isnan(token_log_probs(*given, chunk_size=4))).tolist() == [[1, 2]]


def test_rows_sharded_over_eight_devices():
    """Under jit the batch keeps its sharding; in a shard_map island each device sums its own rows."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, everywhere = PartitionSpec("data"), PartitionSpec()
    trainable, frozen, hidden, targets = inputs(batch=8)
    expected = oracle(trainable, hidden, frozen, targets)
    placed_hidden, placed_targets = jax.device_put((hidden, targets), NamedSharding(mesh, rows))
    copied = jax.device_put((trainable, frozen), NamedSharding(mesh, everywhere))
    function = chunked_loss(5)
    ours = function(copied[0], placed_hidden, copied[1], placed_targets)
    assert_close(ours, expected, 2e-6)
    assert ours[1][1].sharding.is_equivalent_to(NamedSharding(mesh, rows), 3)
    text = function.lower(copied[0], placed_hidden, copied[1], placed_targets).compile().as_text()
    assert "all-gather" not in text and "all-to-all" not in text

    def local(trainable, frozen, hidden, targets):
        sums = chunked_cross_entropy(project, trainable, frozen, hidden, targets, chunk_size=5)
        return CrossEntropy(*(jax.lax.psum(part, "data") for part in sums))  # all are sums

    def loss(trainable, hidden, check):
        specs = (everywhere, everywhere, rows, rows)
        island = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=everywhere, check_vma=check)
        sums = island(trainable, frozen, hidden, targets)
        return sums.loss_sum / sums.num_targets.astype(jnp.float32), sums

    gradients = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True), static_argnums=2)
    assert_close(gradients(trainable, hidden, False), expected, 2e-6)
    assert_close(gradients(trainable, hidden, True), expected, 2e-6)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"targets": jnp.zeros((B, S + 1), jnp.int32)}, r"got \(2, 12, 16\) and \(2, 13\)"),
        ({"chunk_size": 0}, "chunk_size must be at least 1, got 0"),
        ({"logits_soft_cap": 0.0}, "logits_soft_cap must be greater than 0, got 1.0 and 0.0"),
        ({"label_smoothing": 1.0}, r"label_smoothing must be in \[0, 1\) and z_loss at least 0, got 1.0 and 0.0"),
        ({"trainable": {"codes": jnp.zeros((3,), jnp.uint8)}}, r"got uint8 at \['codes'\]; pass it in frozen"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    trainable, frozen, hidden, targets = inputs()
    arguments = {"trainable": trainable, "frozen": frozen, "hidden": hidden, "targets": targets, "chunk_size": 4}
    with pytest.raises(ValueError, match=message):
        chunked_cross_entropy(project, **(arguments | change))


@pytest.mark.parametrize("batch, length", [(1, 1), (1, 8192), (4, 2048), (3, 1000), (64, 512), (4096, 7)])
@pytest.mark.parametrize("vocab", [512, 32_000, 128_256, 262_144])
def test_default_chunks(batch, length, vocab):
    chunk = chunk_size_for(batch, length, vocab)
    assert 1 <= chunk <= length
    tokens = batch * chunk
    assert chunk == 1 or (tokens <= 2048 and 4 * tokens * vocab <= 2**30)
    if batch * length >= 2048 and batch <= 512:
        assert tokens >= (1024 if vocab <= 131_072 else 512)
    padded = -(-length // chunk) * chunk
    assert padded - length < -(-length // chunk)  # fewer padding positions than chunks
