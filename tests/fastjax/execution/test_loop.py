"""The layer loop with a block of its own: order, states, sums over the layers and their gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fastjax.execution.loop import StackBlock, added, run_layers, run_steps
from fastjax.execution.stacks import arrange
from fastjax.models.context import Context, Slots
from fastjax.models.layout import LayerStack

PLAN = (LayerStack(0, 1, 1), LayerStack(1, 2, 3), LayerStack(7, 1, 1))
SCALES = np.asarray([0.5, -1.5, 0.75, 1.25, -0.5, 2.0, 0.25, 1.5], np.float32)


def block_of(stack):
    """x becomes sin(x·s) + shared a layer; layers of the long stack have a number "odd", all have a vector "square"."""

    def block(x, scales, _, shared, first):
        sums = {}
        for position, scale in enumerate(scales):
            x = jnp.sin(x * scale) + shared
            sums = added(sums, {"square": jnp.sum(x * x, axis=(0, 1))})
            if stack.count > 1:
                sums = added(sums, {"odd": jnp.sum(x) * (first + position).astype(jnp.float32)})
        return x, sums

    return block


def blocks_of(scales):
    arrays = arrange([scales[n] for n in range(8)], PLAN)
    return [StackBlock(block_of(stack), own) for stack, own in zip(PLAN, arrays, strict=True)]


def looped(scales, x, remat="none"):
    return run_layers(PLAN, blocks_of(scales), x, jnp.float32(0.125), policy_of=lambda _: remat)


def plain(scales, x):
    sums = {"square": jnp.zeros(3), "odd": jnp.float32(0)}
    for n in range(8):
        x = jnp.sin(x * scales[n]) + 0.125
        sums["square"] += jnp.sum(x * x, axis=(0, 1))
        sums["odd"] += jnp.sum(x) * (n if 1 <= n < 7 else 0)
    return x, sums


def _weighted(sums):
    return jnp.sum(sums["square"] * jnp.asarray([1.0, -2.0, 0.5])) - 0.5 * sums["odd"]


@pytest.mark.parametrize("remat", ["full", "projections", "none"])
def test_numbers_are_summed_over_the_layers_and_have_gradients(remat):
    x, scales = jnp.linspace(-1.0, 1.0, 6).reshape(1, 2, 3), jnp.asarray(SCALES)

    def ours(scales):
        y, sums = looped(scales, x, remat)
        return jnp.sum(y) + _weighted(sums)

    def theirs(scales):
        y, sums = plain(scales, x)
        return jnp.sum(y) + _weighted(sums)

    found, expected = jax.value_and_grad(ours)(scales), jax.value_and_grad(theirs)(scales)
    # float32, sums of dozens of terms
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
    np.testing.assert_allclose(found[1], expected[1], rtol=0, atol=1e-5 * np.abs(expected[1]).max())


def test_what_all_layers_read_has_no_gradient():
    """Asked for by somebody, it is an error and not zeros."""
    x, blocks = jnp.ones((1, 2, 3)), blocks_of(jnp.asarray(SCALES))

    def ours(shared):
        return jnp.sum(run_layers(PLAN, blocks, x, shared, policy_of=lambda _: "none")[0])

    with pytest.raises(NotImplementedError, match="no gradient of arrays that all layers read"):
        jax.grad(ours)(jnp.float32(0.125))


def test_each_layer_adds_to_its_place_in_its_stacks_states():
    """The states of a stack are carried whole, one array a layer of the period; `slots.layer` is the place in it."""

    def block(x, scales, _, context, first, states):
        after = []
        for scale, before in zip(scales, states, strict=True):
            x = jnp.sin(x * scale) + 0.125
            after.append(before.at[context.slots.layer].add(x[0, 0]))
        return x, after, {}

    x, number = jnp.ones((1, 1, 2)), jnp.zeros((1, 1), jnp.int32)
    slots = Slots(*(number,) * 5, number[0], jnp.int32(0))
    blocks = [StackBlock(block, each.arrays) for each in blocks_of(jnp.asarray(SCALES))]
    states = [[jnp.full((stack.count, 2), float(stack.start))] * stack.period for stack in PLAN]
    last, found = run_steps(PLAN, blocks, x, Context({}, None, None, slots=slots), states)
    y = x
    for n, (stack, position, repeat) in enumerate([(0, 0, 0), *((1, n % 2, n // 2) for n in range(6)), (2, 0, 0)]):
        y = jnp.sin(y * SCALES[n]) + 0.125
        np.testing.assert_allclose(found[stack][position][repeat], y[0, 0] + PLAN[stack].start, rtol=1e-6)
    np.testing.assert_allclose(last, y, rtol=1e-6)


@pytest.mark.parametrize("stack", PLAN[:2])
def test_a_block_without_sums_has_nothing_else_in_its_program(stack):
    def run(x):
        state = jnp.ones(stack.count) if stack.count > 1 else jnp.float32(1)
        blocks = [StackBlock(lambda x, state, *_: (x * state, {}), state)]
        return run_layers([stack], blocks, x, None, policy_of=lambda _: "none")

    program = jax.make_jaxpr(run)(jnp.ones((1, 2, 3))).jaxpr
    assert len(program.outvars) == 1 and all(len(equation.outvars) == 1 for equation in program.eqns)


@pytest.mark.parametrize("remat", ["full", "none"])
def test_equal_layers_called_one_by_one_are_traced_once(remat):
    traced = []

    def block(x, state, _, shared, first):
        traced.append(first)
        return jnp.sin(x * state) + first.astype(jnp.float32), {}

    plan = [LayerStack(n, 1, 1) for n in range(4)]

    def ours(scales):
        states = [StackBlock(block, scales[n]) for n in range(4)]
        return jnp.sum(run_layers(plan, states, jnp.ones((1, 1, 2)), None, policy_of=lambda _: remat)[0])

    def theirs(scales):
        y = jnp.ones((1, 1, 2))
        for n in range(4):
            y = jnp.sin(y * scales[n]) + n
        return jnp.sum(y)

    scales = jnp.asarray(SCALES[:4])
    found, expected = jax.jit(jax.value_and_grad(ours))(scales), jax.value_and_grad(theirs)(scales)
    assert len(traced) == 1
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-6)
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-5)


def test_another_pass_is_traced_again():
    """Implementations are chosen while a block is traced, by the context of the pass."""
    traced = []

    def block(x, state, _, shared, first):
        traced.append(first)
        return x * state, {}

    blocks = [StackBlock(block, jnp.float32(2))]
    for _ in range(2):
        run_layers([LayerStack(0, 1, 1)], blocks, jnp.ones((1, 1, 2)), None, policy_of=lambda _: "none")
    assert len(traced) == 2
