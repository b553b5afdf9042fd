"""Heads and features on several devices: the same step as on one."""

import functools

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from fastjax.data.batches import Batch
from fastjax.errors import ConfigError
from fastjax.execution import tensor_parts
from fastjax.execution.tensor_parts import held_apart, tensor_axes
from fastjax.parallel import make_mesh
from fastjax.quantization import as_weight, dequantize
from fastjax.training.optimizers import OptimizerConfig, make_optimizer
from fastjax.training.step import init_state, make_train_step
from tests.support import steps, tiny

#: float32: sums over devices are another order of the same terms.
LOSS_TOLERANCE = 1e-6
TOLERANCE = 1e-5
OPTIMIZER = OptimizerConfig(learning_rate=1e-2, max_grad_norm=0.5, adam_epsilon=1e-3)
CHANGES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 8,
    "tie_word_embeddings": False,
}
CONFIG = tiny.config(**CHANGES)
#: "pieces": of one row on two devices.
MESHES = {"tensor": {"tensor": 2}, "pieces": {"data": 4, "tensor": 2}, "mixed": {"fsdp": 2, "context": 2, "tensor": 2}}


@functools.cache
def model(kind):
    folder = tiny.shared_folder(**CHANGES)
    base = tiny.model(folder, CONFIG, load_in_4bit=kind == "qlora", full_finetuning=kind == "full")
    return base if kind == "full" else tiny.adapted(base, target_modules="all-linear")


@functools.cache
def batch():
    lengths = [(17, 23), (3, 30), (40,), (5, 5)]
    rows = tiny.rows([tiny.documents(CONFIG, row, seed=number) for number, row in enumerate(lengths)], 40)
    return Batch(*(np.stack([array]) for array in rows))


@functools.cache
def trained(kind, mesh):
    ours, optimizer = model(kind), make_optimizer(OPTIMIZER, 3)
    mesh = None if mesh is None else make_mesh(**MESHES[mesh])
    step = make_train_step(ours.graphdef, optimizer, ours.trainable_filter, mesh=mesh)
    state, seen = init_state(ours.trainable, optimizer, jax.random.key(1)), []
    for _ in range(2):
        state, metrics = step(state, ours.frozen, batch())
        seen.append(jax.device_get(metrics))
    return seen, jax.device_get(state.trainable)


def test_weights_held_apart_have_the_same_values_and_split():
    ours = model("qlora")
    placed = held_apart(ours.frozen, ours.config, 2)
    assert jax.tree.structure(held_apart(placed, ours.config, 2)) == jax.tree.structure(placed)
    decode = jax.jit(jax.vmap(lambda weight: dequantize(weight, np.float32)))
    layers, apart = (tree["layers"][0][0] for tree in (ours.frozen, placed))
    axes = tensor_axes(ours.config)
    assert axes.by_rows == {("self_attn", "qkv"), ("mlp", "gate_up")}
    assert axes.by_columns == {("self_attn", "o"), ("mlp", "down")}
    for block, group in axes.by_rows | axes.by_columns:
        one, other = layers[block][group]["weight"], apart[block][group]["weight"]
        np.testing.assert_array_equal(decode(one), decode(other))
        specs = jax.tree.leaves(as_weight(other).axes("rows", "columns"))
        assert P("rows", "columns") in specs


def test_columns_that_are_no_whole_blocks_are_refused():
    ours = model("qlora")
    with pytest.raises(ConfigError, match=r"parallel.tensor: expected weights .* 128 columns .* on 4 devices, got NF4"):
        held_apart(ours.frozen, ours.config, 4)


@pytest.mark.exhaustive("qlora-mixed")
@pytest.mark.parametrize(("kind", "mesh"), [("lora", "pieces"), ("qlora", "mixed"), ("full", "tensor")])
def test_a_layer_on_several_devices_equals_one(kind, mesh):
    expected, arrays = trained(kind, None)
    found, spread = trained(kind, mesh)
    for one, many in zip(expected, found, strict=True):
        np.testing.assert_allclose(many["loss"], one["loss"], rtol=LOSS_TOLERANCE)
        np.testing.assert_allclose(many["grad_norm"], one["grad_norm"], rtol=TOLERANCE)
        assert many["num_targets"] == one["num_targets"] and many["num_correct"] == one["num_correct"]
    steps.assert_close(spread, arrays, TOLERANCE)


@pytest.mark.exhaustive(by="test_a_layer_on_several_devices_equals_one")
def test_large_adapters_stay_where_they_lie(monkeypatch):
    """They are not copied to every device, and train alike."""
    expected, _ = trained("qlora", None)
    monkeypatch.setattr(tensor_parts, "MIN_ADAPTER", 1)
    found, _ = trained.__wrapped__("qlora", "pieces")
    for one, many in zip(expected, found, strict=True):
        np.testing.assert_allclose(many["loss"], one["loss"], rtol=LOSS_TOLERANCE)
