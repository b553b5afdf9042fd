"""Arrays of layers one by one are stacked for an update, and get what each by itself would get."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from fastjax.models.layout import LayerStack
from fastjax.parallel import make_mesh
from fastjax.training.health import squared_norms
from fastjax.training.optimizers import OptimizerConfig, make_optimizer
from fastjax.training.optimizers.stacked_layers import LARGE, StackedLayers
from fastjax.training.placement import state_shardings
from fastjax.training.step import init_state
from tests.support import tiny
from tests.support.aot import AOT, needs_cuda_plugin

LAYERS = 5
PLAN = [LayerStack(number, 1, 1) for number in range(LAYERS)]


def layer(number, make):
    """An adapter's halves, of the last layer with another rank; a norm."""
    rank = 4 if number == LAYERS - 1 else 2
    return {
        "input_layernorm": {"weight": make(96)},
        "self_attn": {"o": {"adapters": {"o_proj": {"lora_A": make(rank, 96), "lora_B": make(64, rank)}}}},
    }


def tree(seed):
    draw = np.random.default_rng(seed)

    def make(*shape):
        return jnp.asarray(draw.normal(size=shape), jnp.float32)

    layers = {number: {0: layer(number, make)} for number in range(LAYERS)}
    return {"layers": layers, "norm": {"weight": make(96)}}


def alone(whole, number):
    return {"layers": {number: whole["layers"][number]}}


def test_which_arrays_are_stacked():
    whole = tree(0)
    stacked = StackedLayers(whole).stacked(whole)
    halves = stacked["layers"][0][0]["self_attn"]["o"]["adapters"]["o_proj"]
    assert jax.tree.map(jnp.shape, halves) == {"lora_A": (4, 2, 96), "lora_B": (4, 64, 2)}
    assert stacked["layers"][0][0]["input_layernorm"]["weight"].shape == (5, 96)
    assert jax.tree.leaves(stacked["layers"][1]) == jax.tree.leaves(stacked["layers"][3]) == []
    assert len(jax.tree.leaves(stacked["layers"][4])) == 2 and stacked["norm"]["weight"] is whole["norm"]["weight"]
    back = StackedLayers(whole).apart(stacked)
    assert jax.tree.structure(back) == jax.tree.structure(whole)
    jax.tree.map(np.testing.assert_array_equal, back, whole)


def test_large_arrays_are_left_alone():
    large = {number: {0: {"mlp": {"down": {"weight": jnp.zeros((LARGE // 64, 64))}}}} for number in range(2)}
    stacked = StackedLayers({"layers": large}).stacked({"layers": large})
    assert all(stacked["layers"][number] is not None for number in range(2))
    assert [leaf.shape for leaf in jax.tree.leaves(stacked)] == 2 * [(LARGE // 64, 64)]


@pytest.mark.parametrize("name", ["adamw", "adamw_8bit", "adafactor", "lion", "muon"])
def test_an_update_is_that_of_each_layer_by_itself(name):
    optimizer = make_optimizer(OptimizerConfig(name=name, weight_decay=0.1, max_grad_norm=0, loraplus_lr_ratio=4.0), 10)
    params = tree(0)
    state, own = optimizer.init(params), [optimizer.init(alone(params, number)) for number in range(LAYERS)]
    for seed in (1, 2, 3):
        gradients = tree(seed)
        updates, state = optimizer.update(gradients, state, params)
        for number in range(LAYERS):
            expected, own[number] = optimizer.update(alone(gradients, number), own[number], alone(params, number))
            jax.tree.map(
                lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-9), alone(updates, number), expected
            )


def test_further_layers_add_no_arithmetic():
    optimizer = make_optimizer(OptimizerConfig(), 10)

    def roots(layers):
        made = {number: {0: layer(0, lambda *shape: jnp.ones(shape))} for number in range(layers)}
        text = jax.jit(optimizer.update).lower({"layers": made}, optimizer.init({"layers": made}), {"layers": made})
        return text.as_text().count("stablehlo.sqrt")

    assert roots(2) == roots(12) > 0


@pytest.mark.aot
@needs_cuda_plugin
def test_gradients_are_joined_once_and_no_layer_has_a_kernel_of_its_own():
    """A kernel at a constant offset would be compiled for each layer, one that joins what it reads for each reader."""
    aot, layers, optimizer = AOT(), 12, make_optimizer(OptimizerConfig(), 10)
    shapes = {"lora_A": (16, 4096), "lora_B": (4096, 16)}
    own = {name: aot.spec(shape, jnp.float32) for name, shape in shapes.items()}
    params = {"layers": {n: {0: {"self_attn": {"o": {"adapters": {"o_proj": own}}}}} for n in range(layers)}}
    state = jax.tree.map(lambda leaf: aot.spec(leaf.shape, leaf.dtype), jax.eval_shape(optimizer.init, params))

    def step(params, state, gradients):
        norms = squared_norms(gradients, [LayerStack(number, 1, 1) for number in range(layers)])
        updates, state = optimizer.update(gradients, state, params)
        return jax.tree.map(jnp.add, params, updates), state, norms

    text = aot.compile(jax.jit(step, donate_argnums=(0, 1)), params, state, params).as_text()
    joined = re.findall(r"= f32\[([\d,]+)\]\S* concatenate\(", text)
    assert sorted(shape for shape in joined if shape.count(",") == 2) == ["12,16,4096", "12,4096,16"]
    assert set(re.findall(r"= f32\[([\d,]+)\]\S* slice\(", text)) <= {"1"}, "but of a scalar"
    entry = text[text.index("\nENTRY") :]
    assert entry.count(" fusion(") < 2 * layers, "fewer than arrays"


def test_norms_are_in_the_order_of_the_arrays():
    whole = tree(4)
    expected = [np.sum(np.square(np.asarray(leaf, np.float64))) for leaf in jax.tree.leaves(whole)]
    np.testing.assert_allclose(squared_norms(whole, PLAN), expected, rtol=1e-6)


def test_stacked_moments_lie_as_the_arrays_do():
    model = tiny.model(
        tiny.shared_folder(tie_word_embeddings=False), tiny.CONFIG, full_finetuning=True, layer_loop="unroll"
    )
    optimizer = make_optimizer(OptimizerConfig(), 10)
    state = jax.eval_shape(lambda trained: init_state(trained, optimizer, jax.random.key(0)), model.trainable)
    places = state_shardings(state, model.config, make_mesh(fsdp=2))
    trained, mu = places.trainable["layers"][0][0], places.opt_state[1].mu["layers"][0][0]
    shape = state.opt_state[1].mu["layers"][0][0]["mlp"]["down"]["weight"].shape
    assert shape == (tiny.CONFIG["num_hidden_layers"], *state.trainable["layers"][0][0]["mlp"]["down"]["weight"].shape)
    assert "fsdp" in trained["mlp"]["down"]["weight"].spec
    assert mu["mlp"]["down"]["weight"].spec == P(None, *trained["mlp"]["down"]["weight"].spec)


@pytest.mark.gpu
def test_updates_on_a_card_are_the_cpus():
    optimizer = make_optimizer(OptimizerConfig(weight_decay=0.1, max_grad_norm=0.5), 10)

    def steps(params):
        state, found = optimizer.init(params), []
        for seed in (1, 2, 3):
            updates, state = jax.jit(optimizer.update)(jax.device_put(tree(seed), device), state, params)
            found.append((updates, squared_norms(updates, PLAN)))
        return jax.device_get(found)

    results = []
    for device in (jax.devices()[0], jax.devices("cpu")[0]):
        with jax.default_device(device):
            results.append(steps(jax.device_put(tree(0), device)))
    # a division on a card is off by an ulp or two, and sums are in another order
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-9), *results)
