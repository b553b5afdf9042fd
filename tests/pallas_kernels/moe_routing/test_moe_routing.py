"""Routers against a token-by-token reference in float64, and the sorted order against dense sums."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import moe_routing
from pallas_kernels.moe_routing import RouterSettings, reference

TOKENS, EXPERTS, WIDTH = 12, 8, 16
#: name -> settings, with a choice bias or not
ROUTERS = {
    "softmax over all": (RouterSettings(3), False),
    "normalised": (RouterSettings(3, normalize=True, scale=2.5), False),
    "softmax over the chosen": (RouterSettings(2, score_after=True), False),
    "sigmoid with a choice bias": (RouterSettings(2, score="sigmoid", scale=0.5), True),
    "groups": (RouterSettings(3, "sigmoid", False, True, 1.8, groups=4, groups_per_token=2), True),
    "every expert": (RouterSettings(EXPERTS), False),
}


def logits_and_bias(biased, seed=0):
    rng = np.random.default_rng(seed)
    bias = rng.standard_normal(EXPERTS).astype(np.float32) if biased else None
    return rng.standard_normal((TOKENS, EXPERTS)).astype(np.float32), bias


def dense(routing):
    """Weights with a column for every expert."""
    found = np.zeros((TOKENS, EXPERTS))
    np.put_along_axis(found, np.asarray(routing.experts), np.asarray(routing.weights), axis=1)
    return found


@pytest.mark.parametrize("name", ROUTERS)
def test_weights_and_their_gradient(name):
    settings, biased = ROUTERS[name]
    logits, bias = logits_and_bias(biased)
    cotangent = np.random.default_rng(1).standard_normal((TOKENS, EXPERTS))

    @jax.jit
    def run(logits):
        routing = moe_routing.route(logits, settings, bias)
        chosen = jnp.take_along_axis(jnp.asarray(cotangent, jnp.float32), routing.experts, axis=1)
        return jnp.sum(routing.weights * chosen), routing

    (_, routing), gradient = jax.value_and_grad(run, has_aux=True)(jnp.asarray(logits))
    # one float32 rounding or two of numbers up to `scale`
    np.testing.assert_allclose(dense(routing), reference.route(logits, settings, bias), atol=5e-7)

    def value(logits):
        return np.sum(reference.route(logits, settings, bias) * cotangent, axis=1)

    step, expected = 1e-5, np.zeros_like(cotangent)
    for expert in range(EXPERTS):  # each token's gradient is its own
        nudge = step * np.eye(EXPERTS)[expert]
        expected[:, expert] = (value(logits + nudge) - value(logits - nudge)) / (2 * step)
    np.testing.assert_allclose(gradient, expected, atol=2e-6)


def test_ties_go_to_the_lower_expert():
    logits = jnp.zeros((TOKENS, EXPERTS)).at[:, 5].set(1.0)
    for settings in (RouterSettings(3), RouterSettings(3, "sigmoid", groups=4, groups_per_token=2)):
        experts = moe_routing.route(logits, settings).experts
        np.testing.assert_array_equal(experts, np.tile([5, 0, 1], (TOKENS, 1)))


@pytest.mark.parametrize("case", ["drawn", "one expert takes all", "empty experts"])
def test_order_and_combination(case):
    rng = np.random.default_rng(2)
    drawn = np.stack([rng.permutation(EXPERTS)[:3] for _ in range(TOKENS)])
    experts = {
        "drawn": drawn,
        "one expert takes all": np.full((TOKENS, 3), 6),
        "empty experts": np.sort(drawn % 3 + 2, axis=1),
    }[case]
    order = jax.jit(moe_routing.sort_by_expert, static_argnums=1)(jnp.asarray(experts, jnp.int32), EXPERTS)
    flat = experts.reshape(-1)
    np.testing.assert_array_equal(order.group_sizes, np.bincount(flat, minlength=EXPERTS))
    np.testing.assert_array_equal(order.order, np.argsort(flat, kind="stable"))
    np.testing.assert_array_equal(order.rows, np.repeat(np.arange(TOKENS), 3)[order.order])
    np.testing.assert_array_equal(np.asarray(order.order)[order.inverse], np.arange(flat.size).reshape(experts.shape))

    y, weights, dout = rng.standard_normal((flat.size, WIDTH)), rng.random(experts.shape), rng.standard_normal((12, 16))
    pairs = np.zeros((TOKENS, flat.size))  # the weight of each sorted row in each token's sum
    pairs[order.rows, np.arange(flat.size)] = weights.reshape(-1)[order.order]

    @jax.jit
    def run(y, weights, dout):
        out, pullback = jax.vjp(lambda y, weights: moe_routing.combine(y, weights, order), y, weights)
        return out, *pullback(dout)

    out, dy, dweights = run(*(jnp.asarray(array, jnp.float32) for array in (y, weights, dout)))
    np.testing.assert_allclose(out, pairs @ y, atol=2e-6)
    np.testing.assert_allclose(dy, pairs.T @ dout, atol=2e-6)
    products = np.sum(y * dout[order.rows], axis=1)  # of each sorted row
    np.testing.assert_allclose(dweights, products[np.asarray(order.inverse)], atol=5e-6)


@pytest.mark.parametrize("share", [0.5, 0.97, 0.0])
def test_absent_pairs_read_few_rows(share):
    """Pairs without an expert have zeros in their rows; the sums are those of the others."""
    rng = np.random.default_rng(3)
    tokens = 100
    present = rng.random((tokens, 3)) >= share
    experts = np.where(present, rng.integers(0, EXPERTS, (tokens, 3)), EXPERTS)
    sort = jax.jit(moe_routing.sort_by_expert, static_argnums=(1, 2))
    plain, order = (sort(jnp.asarray(experts, jnp.int32), EXPERTS, absent) for absent in (False, True))
    for name in ("rows", "order", "group_sizes"):
        np.testing.assert_array_equal(getattr(order, name), getattr(plain, name))
    np.testing.assert_array_equal(order.inverse[present], plain.inverse[present])
    total = present.sum()
    read = np.asarray(order.inverse)[~present]
    assert read.size == 0 or (read.min() == total and read.max() < tokens * 3)
    assert np.unique(read).size == min(read.size, 64)

    y = jnp.asarray(rng.standard_normal((tokens * 3, WIDTH)), jnp.float32).at[total:].set(0)
    weights = jnp.asarray(np.where(present, rng.random((tokens, 3)), 0), jnp.float32)
    combine = jax.jit(moe_routing.combine)
    np.testing.assert_array_equal(combine(y, weights, order), combine(y, weights, plain))


def test_only_numbers_are_scattered():
    """The order of the inverse permutation; gradients are gathered."""

    def loss(logits, y):
        routing = moe_routing.route(logits, RouterSettings(2, groups=2, groups_per_token=1))
        return moe_routing.combine(y, routing.weights, moe_routing.sort_by_expert(routing.experts, EXPERTS)).sum()

    shapes = jnp.zeros((TOKENS, EXPERTS)), jnp.zeros((2 * TOKENS, WIDTH))
    program = str(jax.make_jaxpr(jax.grad(loss, (0, 1)))(*shapes))
    scattered = [line for line in program.splitlines() if "= scatter" in line]
    assert scattered and all(":i32[" in line for line in scattered)


def test_losses_without_padding():
    logits, _ = logits_and_bias(False)
    settings, mask = RouterSettings(2), np.arange(TOKENS) < 7
    chosen = reference.route(logits, settings)

    @jax.jit
    def losses(logits):
        load = moe_routing.measure_load(moe_routing.route(logits, settings), jnp.asarray(mask))
        return moe_routing.load_balancing_loss(load), moe_routing.z_loss(load)

    balance, size = losses(jnp.asarray(logits))
    np.testing.assert_allclose(balance, reference.load_balancing_loss(logits, chosen, mask), rtol=1e-6)
    np.testing.assert_allclose(size, reference.z_loss(logits, mask), rtol=1e-6)
    gradient = jax.grad(lambda logits: sum(losses(logits)))(jnp.asarray(logits))
    assert np.all(np.any(gradient != 0, axis=1) == mask)
    load = moe_routing.measure_load(moe_routing.route(jnp.zeros_like(logits), settings))
    assert moe_routing.load_balancing_loss(load) == 2.0 and float(load.tokens) == TOKENS


@pytest.mark.parametrize(
    "settings, message",
    [
        (RouterSettings(2, score="tanh"), "score: expected 'softmax' or 'sigmoid', got 'tanh'"),
        (RouterSettings(2, groups=3), "expected a divisor of the 8 experts"),
        (RouterSettings(5, groups=4, groups_per_token=2), "experts_per_token: expected 1 to 4"),
    ],
)
def test_settings_that_contradict_the_number_of_experts_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        moe_routing.route(jnp.zeros((TOKENS, EXPERTS)), settings)
