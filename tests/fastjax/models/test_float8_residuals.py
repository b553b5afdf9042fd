"""Gate and up kept in float8: the same loss to the bit, rounded gradients, half the bytes."""

import functools

import jax
import numpy as np
import pytest
from flax import nnx
from jax.ad_checkpoint import print_saved_residuals

from fastjax.errors import ConfigError
from fastjax.language_model import FastLanguageModel
from fastjax.parallel import make_mesh
from fastjax.training.loss import loss_sums
from tests.fastjax.training.test_step import batch, packed_rows
from tests.support import steps, tiny
from tests.support.aot import AOT, needs_cuda_plugin

POLICY = "projections_float8"


@functools.cache
def model(layer_loop, remat, dtype="bfloat16"):
    """Adapters before the block of gate and up, in it and behind."""
    folder, options = tiny.shared_folder(tie_word_embeddings=False), {"load_in_4bit": True, "dtype": dtype}
    base = tiny.model(folder, tiny.CONFIG, layer_loop=layer_loop, use_gradient_checkpointing=remat, **options)
    return tiny.adapted(base, target_modules=["q_proj", "gate_proj", "up_proj", "down_proj"])


def cosine(left, right):
    left, right = (np.concatenate([np.ravel(x).astype(np.float64) for x in jax.tree.leaves(t)]) for t in (left, right))
    return left @ right / np.linalg.norm(left) / np.linalg.norm(right)


@pytest.mark.exhaustive("scan")
@pytest.mark.parametrize("layer_loop", ["scan", "unroll"])
def test_the_loss_is_the_same_and_gradients_are_rounded(layer_loop):
    rows = batch(packed_rows())
    metrics, exact = steps.gradients(model(layer_loop, "projections"), rows)
    kept, rounded = steps.gradients(model(layer_loop, POLICY), rows)
    assert kept["loss"] == metrics["loss"] and kept["num_correct"] == metrics["num_correct"]
    # Three bits of mantissa are off by 2.6% of a number on average, at random: of a sum of many terms far less.
    assert 0.995 < cosine(rounded, exact) < 1 - 1e-7
    np.testing.assert_allclose(kept["grad_norm"], metrics["grad_norm"], rtol=0.02)


@pytest.mark.exhaustive(
    by="test_the_loss_is_the_same_and_gradients_are_rounded, "
    "tests/fastjax/models/test_remat.py::test_the_first_layers_have_a_policy_of_their_own"
)
def test_the_first_layers_alone():
    rows = batch(packed_rows())
    _, exact = steps.gradients(model("unroll", "projections:1"), rows)
    _, rounded = steps.gradients(model("unroll", f"{POLICY}:1"), rows)
    # The gradients of the last layer, one by "full" in both, do not pass through the first one.
    same = {name for name, leaf in steps.named(exact).items() if np.array_equal(steps.named(rounded)[name], leaf)}
    assert {name for name in steps.named(exact) if "layers'][1]" in name} <= same
    # Nor does that of down's B in the first one; those of gate and up are made of what was kept.
    assert all(("down_proj" in name and "lora_B" in name) for name in same if "layers'][0]" in name)


def test_several_devices_keep_their_own_rows():
    rows = batch(packed_rows())
    expected, one = steps.gradients(model("scan", POLICY), rows)
    found, spread = steps.gradients(model("scan", POLICY), rows, mesh=make_mesh(data=2, fsdp=2, context=2))
    np.testing.assert_allclose(found["loss"], expected["loss"], rtol=1e-3)  # bfloat16, sums in another order
    assert cosine(spread, one) > 0.999


def loss(ours, trainable):
    rows = jax.tree.map(lambda array: array[0], batch(packed_rows()))
    return loss_sums(nnx.merge(ours.graphdef, trainable, ours.frozen), ours.trainable_filter, rows, key=None).loss_sum


def test_what_is_kept(capsys):
    ours = model("unroll", POLICY)
    print_saved_residuals(functools.partial(loss, ours), ours.trainable)
    text, features = capsys.readouterr().out, 2 * tiny.CONFIG["intermediate_size"]
    assert text.count(f"f8_e4m3fn[8,40,{features}]") == tiny.CONFIG["num_hidden_layers"]
    assert f"bf16[8,40,{features}]" not in text


def test_what_it_is_not_for_is_refused():
    rows = batch(packed_rows())
    with pytest.raises(ConfigError, match="got projections_float8 with dtype float32"):
        steps.gradients(model("scan", POLICY, "float32"), rows)
    dora = tiny.adapted(tiny.model(tiny.shared_folder(), tiny.CONFIG, dtype="bfloat16"), use_dora=True)
    with pytest.raises(ConfigError, match="keeps no gate and up in one piece: DoRA"):
        steps.gradients(dora.with_checkpointing(POLICY), rows)
    chunked = FastLanguageModel.from_config(
        tiny.CONFIG, max_seq_length=40, dtype="bfloat16", mlp_chunk=8, use_gradient_checkpointing=POLICY
    )
    with pytest.raises(ConfigError, match="MLPs by chunks keep nothing"):
        steps.gradients(FastLanguageModel.get_peft_model(chunked, r=4), rows)


@needs_cuda_plugin
@pytest.mark.aot
def test_a_card_without_float8_is_refused_by_name():
    aot = AOT("a100-80")
    ours = model("scan", POLICY)
    with (
        aot.abstract_device(),
        pytest.raises(ConfigError, match="A100.* needs an NVIDIA GPU of compute capability 8.9"),
    ):
        jax.eval_shape(functools.partial(loss, ours), ours.trainable)
