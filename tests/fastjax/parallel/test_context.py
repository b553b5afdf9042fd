"""Rows whose tokens lie on several devices: the same step as on one."""

import functools

import jax
import numpy as np
import pytest

from fastjax.data.batches import Batch
from fastjax.errors import ConfigError
from fastjax.parallel import make_mesh
from fastjax.training.optimizers import OptimizerConfig, make_optimizer
from fastjax.training.step import init_state, make_eval_step, make_train_step
from tests.support import steps, tiny

#: float32: sums over devices and over parts of a row are another order of the same terms.
LOSS_TOLERANCE = 1e-6
TOLERANCE = 1e-5
OPTIMIZER = OptimizerConfig(learning_rate=1e-2, max_grad_norm=0.5, adam_epsilon=1e-3)
CONFIG = tiny.config(hidden_size=64, intermediate_size=128, tie_word_embeddings=False)
#: A windowed layer, documents' lengths in the rotary angles, capped logits: Gemma 2's and Phi 3's, in one tiny model.
MESHES = {"context": {"context": 4}, "mixed": {"data": 2, "fsdp": 2, "context": 2}}


@functools.cache
def model(kind, mlp_chunk=None):
    folder = tiny.shared_folder(hidden_size=64, intermediate_size=128, tie_word_embeddings=False)
    options = {"load_in_4bit": kind == "qlora", "full_finetuning": kind == "full", "mlp_chunk": mlp_chunk}
    base = tiny.model(folder, CONFIG, **options)
    return base if kind == "full" else tiny.adapted(base, target_modules="all-linear")


@functools.cache
def batch(packed):
    """One microbatch of four rows, with documents across the parts, or each row one document."""
    lengths = [(17, 23), (3, 30), (40,), (5, 5)] if packed else [(40,)] * 4
    rows = tiny.rows([tiny.documents(CONFIG, row, seed=number) for number, row in enumerate(lengths)], 40)
    found = Batch(*(np.stack([array]) for array in rows))
    return found if packed else found._replace(segment_ids=None)


@functools.cache
def trained(kind, packed, mesh, mlp_chunk=None):
    ours, optimizer = model(kind, mlp_chunk), make_optimizer(OPTIMIZER, 3)
    mesh = None if mesh is None else make_mesh(**MESHES[mesh])
    step = make_train_step(ours.graphdef, optimizer, ours.trainable_filter, mesh=mesh)
    state, seen = init_state(ours.trainable, optimizer, jax.random.key(1)), []
    for _ in range(2):
        state, metrics = step(state, ours.frozen, batch(packed))
        seen.append(jax.device_get(metrics))
    return seen, jax.device_get(state.trainable)


@pytest.mark.exhaustive("lora-True-context-16", "full-False-context-None")
@pytest.mark.parametrize(
    ("kind", "packed", "mesh", "chunk"),
    [("lora", True, "context", 16), ("qlora", True, "mixed", 8), ("full", False, "context", None)],
)
def test_a_row_on_several_devices_equals_one(kind, packed, mesh, chunk):
    expected, arrays = trained(kind, packed, None)
    found, spread = trained(kind, packed, mesh, chunk)
    for one, many in zip(expected, found, strict=True):
        np.testing.assert_allclose(many["loss"], one["loss"], rtol=LOSS_TOLERANCE)
        np.testing.assert_allclose(many["grad_norm"], one["grad_norm"], rtol=TOLERANCE)
        assert many["num_targets"] == one["num_targets"] and many["num_correct"] == one["num_correct"]
    steps.assert_close(spread, arrays, TOLERANCE)


def test_rows_that_do_not_divide_into_parts_are_refused():
    ours = model("full")
    step = make_eval_step(ours.graphdef, ours.trainable_filter, mesh=make_mesh(context=4))
    short = jax.tree.map(lambda array: array[:, :, :36], batch(True))
    with pytest.raises(ConfigError, match="multiple of 8 tokens, .* got 36"):
        step(ours.trainable, ours.frozen, short)
