"""Rows' tokens, and layers' heads and features, on several devices: the same steps as on one."""

import contextlib
import functools

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from fastjax.data.batches import Batch
from fastjax.errors import ConfigError
from fastjax.execution import tensor_parts
from fastjax.execution.tensor_parts import held_apart, tensor_axes
from fastjax.parallel import all_tokens, local, make_mesh, own_sums
from fastjax.parallel.islands import islands_on
from fastjax.quantization import as_weight, dequantize
from fastjax.training.step import make_eval_step
from pallas_kernels import token_exchange
from tests.support import steps, tiny

CHANGES = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 8, "tie_word_embeddings": False}
CONFIG = tiny.config(**CHANGES)
MESHES = {
    "context": {"context": 4},
    "shards and context": {"data": 2, "fsdp": 2, "context": 2},
    "tensor": {"tensor": 2},
    "pieces": {"data": 4, "tensor": 2},  # of one row on two devices
    "shards, context and tensor": {"fsdp": 2, "context": 2, "tensor": 2},
}


@functools.cache
def model(kind, mlp_chunk=None):
    options = {"load_in_4bit": kind == "qlora", "full_finetuning": kind == "full", "mlp_chunk": mlp_chunk}
    base = tiny.model(tiny.shared_folder(**CHANGES), CONFIG, **options)
    # Of 4 bits one of each group by rows and by columns; lora has them all.
    modules = ["v_proj", "o_proj", "up_proj", "down_proj"] if kind == "qlora" else "all-linear"
    return base if kind == "full" else tiny.adapted(base, target_modules=modules)


@functools.cache
def batch(packed=True):
    """One microbatch of four rows, with documents across the parts, or each row one document."""
    lengths = [(17, 23), (3, 30), (40,), (5, 5)] if packed else [(40,)] * 4
    rows = tiny.rows([tiny.documents(CONFIG, row, seed=number) for number, row in enumerate(lengths)], 40)
    found = Batch(*(np.stack([array]) for array in rows))
    return found if packed else found._replace(segment_ids=None)


@functools.cache
def trained(kind, packed=True, mesh=None, mlp_chunk=None):
    mesh = None if mesh is None else make_mesh(**MESHES[mesh])
    return steps.trained(model(kind, mlp_chunk), batch(packed), mesh=mesh)


@pytest.mark.exhaustive("one document a row", "three axes")
@pytest.mark.parametrize(
    ("kind", "packed", "mesh", "chunk"),
    [
        pytest.param("lora", True, "context", 16, id="chunks"),
        pytest.param("qlora", True, "shards and context", 8, id="shards"),
        pytest.param("full", False, "context", None, id="one document a row"),
        pytest.param("lora", True, "pieces", None, id="pieces"),
        pytest.param("qlora", True, "shards, context and tensor", None, id="three axes"),
        pytest.param("full", True, "tensor", None, id="tensor"),
    ],
)
def test_several_devices_equal_one(kind, packed, mesh, chunk):
    steps.assert_trained_alike(trained(kind, packed, mesh, chunk), trained(kind, packed))


def test_rows_that_do_not_divide_into_parts_are_refused():
    ours = model("full")
    step = make_eval_step(ours.graphdef, ours.trainable_filter, mesh=make_mesh(context=4))
    short = jax.tree.map(lambda array: array[:, :, :36], batch())
    with pytest.raises(ConfigError, match="multiple of 8 tokens, .* got 36"):
        step(ours.trainable, ours.frozen, short)


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


@pytest.mark.exhaustive(by="test_several_devices_equal_one")
def test_large_adapters_stay_where_they_lie(monkeypatch):
    """They are not copied to every device, and train alike."""
    monkeypatch.setattr(tensor_parts, "MIN_ADAPTER", 1)
    steps.assert_trained_alike(trained.__wrapped__("qlora", True, "pieces"), trained("qlora"))


@pytest.mark.parametrize(
    ("numbers", "implementation"), [((0, 1), None), ((1, 0), "xla"), ((2, 3), "xla"), (None, "xla")]
)
def test_tokens_are_read_where_devices_are_known_in_order(monkeypatch, numbers, implementation):
    """Mosaic takes them by number alone; of an ambient mesh the program may be lowered without it."""
    asked = []
    for name in ("all_tokens", "own_sums"):
        monkeypatch.setattr(token_exchange, name, lambda x, axis_name, axis, forced, *_: asked.append(forced) or x)
    mesh = make_mesh(tensor=2, devices=[jax.devices()[number] for number in numbers or (0, 1)])
    known = contextlib.nullcontext() if numbers is None else islands_on(mesh)

    def both(x):
        return own_sums(all_tokens(x, 0), 0)

    with jax.set_mesh(mesh), known:
        jax.eval_shape(
            local(both, in_specs=(P("tensor"),), out_specs=P("tensor")), jax.ShapeDtypeStruct((4,), "float32")
        )
    assert asked == [implementation] * 2
