"""A step on eight fake devices: data parallel, and with the frozen weights split."""

import dataclasses
import functools
import math
import tempfile
from pathlib import Path

import jax
import numpy as np
import pytest

from fastjax.data.batches import Batch
from fastjax.errors import ConfigError
from fastjax.execution import remat
from fastjax.parallel import make_mesh
from fastjax.training.loss import loss_sums
from fastjax.training.optimizers import OptimizerConfig, make_optimizer
from fastjax.training.placement import state_shardings
from fastjax.training.step import init_state, make_eval_step, make_train_step
from tests.support import families, steps, tiny

#: float32: a sum over eight devices is another order of the same terms.
LOSS_TOLERANCE = 1e-6
TOLERANCE = 1e-5
#: Adam divides by the gradient's size: with its usual epsilon, rounding decides the sign of steps along a zero.
OPTIMIZER = OptimizerConfig(learning_rate=1e-2, max_grad_norm=0.5, adam_epsilon=1e-3)

MESHES = {
    "data": {"data": 8},
    "data and fsdp": {"data": 2, "fsdp": 4},
    "experts and fsdp": {"expert": 2, "fsdp": 2, "data": 2},
}
CONFIG = tiny.config(hidden_size=64, intermediate_size=128, tie_word_embeddings=False, attention_dropout=0.2)
#: Experts' rows enough to be split, and a shared expert, in both layers.
MIXTURE = families.MIXTURES["qwen2_moe"] | {
    "hidden_size": 64,
    "moe_intermediate_size": 64,
    "vocab_size": CONFIG["vocab_size"],
    "num_hidden_layers": 2,
    "layer_types": [families.FULL] * 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
#: Latent attention, its projections wide enough to be split.
LATENT = families.MIXTURES["deepseek_v3"] | {
    **{"hidden_size": 64, "moe_intermediate_size": 64, "vocab_size": CONFIG["vocab_size"], "num_hidden_layers": 2},
    **{"q_lora_rank": 32, "kv_lora_rank": 24, "qk_rope_head_dim": 8},
}
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate.weight"]


@functools.cache
def model(kind):
    if kind in ("mixture", "latent"):
        with tempfile.TemporaryDirectory() as folder:
            base = tiny.model(Path(folder), MIXTURE if kind == "mixture" else LATENT)
            return tiny.adapted(base, target_parameters=EXPERTS)
    changed = ("hidden_size", "intermediate_size", "tie_word_embeddings", "attention_dropout")
    folder = tiny.shared_folder(**{name: CONFIG[name] for name in changed})
    loop = "unroll" if kind == "full, unrolled" else "scan"
    base = tiny.model(
        folder, CONFIG, load_in_4bit=kind == "qlora", full_finetuning=kind.startswith("full"), layer_loop=loop
    )
    options = {
        "lora": {"use_dora": True, "lora_dropout": 0.3, "target_modules": ["q_proj", "down_proj", "lm_head"]},
        "qlora": {"modules_to_save": ["lm_head"]},
    }
    return base if kind.startswith("full") else tiny.adapted(base, **options[kind])


@functools.cache
def batch():
    """Two microbatches of eight rows, some of them padding only."""
    lengths = [(17, 20), (9, 4, 25), (38,), (11, 11), (2,), (), (40,), (21, 3)]
    parts = [
        tiny.rows([tiny.documents(CONFIG, row, seed=10 * part + n) for n, row in enumerate(lengths)], 40)
        for part in range(2)
    ]
    return Batch(*(np.stack(arrays) for arrays in zip(*parts, strict=True)))


@functools.cache
def trained(kind, mesh=None):
    """Three steps of one compilation: the metrics of each and the trained arrays."""
    ours, optimizer = model(kind), make_optimizer(OPTIMIZER, 3)
    mesh = None if mesh is None else make_mesh(**MESHES[mesh])
    loss = functools.partial(loss_sums, router_aux_loss_coef=0.5, router_z_loss_coef=0.1)
    step = make_train_step(ours.graphdef, optimizer, ours.trainable_filter, loss=loss, mesh=mesh)
    state, seen = init_state(ours.trainable, optimizer, jax.random.key(1)), []
    for number in range(3):
        with steps.compilations() as compiled:
            state, metrics = step(state, ours.frozen, batch())
        seen.append(jax.device_get(metrics))
        assert bool(compiled) == (number == 0), compiled
    return seen, jax.device_get(state.trainable)


# A mixture's layer on devices by experts is held against one device's in parallel/test_experts.py.
@pytest.mark.exhaustive(
    by="test_evaluation_on_eight_devices_equals_one, "
    "tests/fastjax/training/test_every_mesh.py::test_eight_devices_have_the_loss_and_every_gradient_of_one"
)
@pytest.mark.parametrize(
    ("kind", "mesh"),
    [
        ("lora", "data"),
        ("full", "data and fsdp"),
        ("full, unrolled", "data and fsdp"),  # whose layers are stacked for the optimizer
        ("qlora", "data and fsdp"),
        ("mixture", "experts and fsdp"),
        ("latent", "experts and fsdp"),
    ],
)
def test_eight_devices_equal_one(kind, mesh):
    expected, arrays = trained(kind)
    found, spread = trained(kind, mesh)
    for one, eight in zip(expected, found, strict=True):
        np.testing.assert_allclose(eight["loss"], one["loss"], rtol=LOSS_TOLERANCE)
        np.testing.assert_allclose(eight["grad_norm"], one["grad_norm"], rtol=TOLERANCE)
        for name in (name for name in one if name.startswith("router_")):
            np.testing.assert_allclose(eight[name], one[name], rtol=LOSS_TOLERANCE)
        assert eight["num_targets"] == one["num_targets"] and eight["num_correct"] == one["num_correct"]
    steps.assert_close(spread, arrays, TOLERANCE)


@pytest.mark.parametrize("name", ["adamw", "adamw_8bit", "adafactor", "lion", "muon"])
def test_a_device_holds_its_share_of_weights_and_moments(name):
    ours, optimizer = model("full"), make_optimizer(dataclasses.replace(OPTIMIZER, name=name), 3)
    state = jax.eval_shape(lambda: init_state(ours.trainable, optimizer, jax.random.key(1)))
    places = state_shardings(state, ours.config, make_mesh(data=2, fsdp=4))
    leaves = zip(*map(jax.tree.leaves, (state, places)), strict=True)
    large = {
        (leaf.shape, math.prod(place.shard_shape(leaf.shape)) / leaf.size) for leaf, place in leaves if leaf.size > 999
    }
    # A vocabulary of 101 does not divide; the learning rates are no weight's.
    assert {shape for shape, share in large if share == 1} == {(101, 64), (2**16,)}
    assert {share for shape, share in large if shape[0] != 101 and len(shape) > 1} == {1 / 4}


def test_evaluation_on_eight_devices_equals_one():
    ours, mesh = model("qlora"), make_mesh(data=4, fsdp=2)
    one, eight = (
        make_eval_step(ours.graphdef, ours.trainable_filter, mesh=m)(ours.trainable, ours.frozen, batch())
        for m in (None, mesh)
    )
    np.testing.assert_allclose(eight.loss_sum, one.loss_sum, rtol=LOSS_TOLERANCE)
    assert eight.metrics == one.metrics


def test_rows_that_do_not_divide_over_the_devices_are_refused():
    ours = model("full")
    step = make_eval_step(ours.graphdef, ours.trainable_filter, mesh=make_mesh(data=8))
    seven = jax.tree.map(lambda array: array[:, :7], batch())
    with pytest.raises(ConfigError, match="multiple of 8 rows a microbatch, .*, got 7"):
        step(ours.trainable, ours.frozen, seven)


def test_scans_that_gather_begin_early(monkeypatch):
    asked = []
    monkeypatch.setattr(remat, "compiler_options", lambda graphdef, gathers: asked.append(gathers) or {})
    for kind, axes in (("qlora", {"fsdp": 2}), ("full", {"fsdp": 2}), ("qlora", {"data": 2}), ("qlora", {"tensor": 2})):
        ours, mesh = model(kind), make_mesh(**axes)
        make_train_step(ours.graphdef, steps.RECORDER, ours.trainable_filter, mesh=mesh)
        make_eval_step(ours.graphdef, ours.trainable_filter, mesh=mesh)
    monkeypatch.undo()
    assert asked == [True, True, False, False, False, False, True, True]
    options = remat.compiler_options(model("qlora").graphdef, gathers=True)
    assert options["xla_gpu_enable_latency_hiding_scheduler"] and len(options) == 2
