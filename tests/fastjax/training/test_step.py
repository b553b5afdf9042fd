"""The train step: packed = unpacked, accumulation invariant, pure, unharmed by what is not finite."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from fastjax.data.batches import Batch
from fastjax.language_model import FastLanguageModel
from fastjax.parallel import make_mesh
from fastjax.training.loss import LossSums
from fastjax.training.optimizers import OptimizerConfig, make_optimizer
from fastjax.training.step import init_state, make_eval_step, make_train_step
from tests.support import steps, tiny

#: float32: two orders of summing a hundred terms of like size differ by a few units in the last place (6e-8) of the
#: largest; elements that cancel are measured against the largest of their array.
TOLERANCE = 5e-6

LENGTHS = [(17, 9, 12), (30, 5), (2, 1, 33)]
WIDTH = 40


ADAPTERS = {
    "qlora": {},
    "lora": {"use_dora": True, "target_modules": ["k_proj", "down_proj", "embed_tokens", "lm_head"]},
    "mixed ranks": {"rank_pattern": {r"layers\.1\..*": 2}, "modules_to_save": ["embed_tokens", "lm_head"]},
    "tied": {"modules_to_save": ["lm_head"], "ensure_weight_tying": True},
}


@functools.cache
def model(kind, layer_loop="scan", remat="full", dtype="float32", mlp_chunk=None):
    """Every trained array is random: none of its gradients is zero because another starts at zero."""
    options = {"layer_loop": layer_loop, "use_gradient_checkpointing": remat, "full_finetuning": kind == "full"}
    options |= {"dtype": dtype, "mlp_chunk": mlp_chunk}
    folder = tiny.shared_folder(tie_word_embeddings=kind in ("full", "tied"))
    base = tiny.model(folder, tiny.CONFIG, load_in_4bit=kind == "qlora", **options)
    return base if kind == "full" else tiny.adapted(base, **ADAPTERS[kind])


def packed_rows():
    """Three rows, and empty ones up to the number of documents."""
    documents = packed_documents() + [()] * 5
    return tiny.rows(documents, WIDTH, learnt=lambda row, document, place: (place + row) % 4 > 0)


def packed_documents():
    return [tiny.documents(tiny.CONFIG, row, seed=number) for number, row in enumerate(LENGTHS)]


def unpacked_rows():
    documents = packed_documents()
    alone = [[document] for row in documents for document in row]
    origin = [(row, number) for row, inside in enumerate(documents) for number in range(len(inside))]
    return tiny.rows(alone, WIDTH, learnt=lambda row, document, place: (place + origin[row][0]) % 4 > 0)


def batch(arrays, accumulation=1):
    return Batch(*(array.reshape(accumulation, -1, array.shape[-1]) for array in arrays))


@pytest.mark.exhaustive("qlora")
@pytest.mark.parametrize("kind", ["full", "lora", "qlora", "mixed ranks", "tied"])
def test_packed_equals_unpacked_in_loss_and_every_gradient(kind):
    metrics, grads = steps.gradients(model(kind), batch(packed_rows()))
    alone_metrics, alone_grads = steps.gradients(model(kind), batch(unpacked_rows()))
    assert metrics["num_targets"] == alone_metrics["num_targets"] > 50
    assert metrics["num_correct"] == alone_metrics["num_correct"]
    np.testing.assert_allclose(metrics["loss"], alone_metrics["loss"], rtol=1e-6)
    steps.assert_close(grads, alone_grads, TOLERANCE)
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(grads))


def test_a_row_without_padding_needs_no_segments():
    rows = tiny.rows([[document] for document in tiny.documents(tiny.CONFIG, (WIDTH,) * 8)], WIDTH)
    metrics, grads = steps.gradients(model("lora"), batch(rows))
    plain_metrics, plain_grads = steps.gradients(model("lora"), batch(rows)._replace(segment_ids=None))
    np.testing.assert_allclose(metrics["loss"], plain_metrics["loss"], rtol=1e-6)
    steps.assert_close(grads, plain_grads, TOLERANCE)


def test_what_lies_in_the_padding_does_not_matter():
    rows = packed_rows()
    tokens, targets, segments, positions = (array.copy() for array in rows)
    metrics, grads = steps.gradients(model("lora"), batch(rows))
    tokens[segments == 0], positions[segments == 0] = 7, 11
    other_metrics, other = steps.gradients(model("lora"), batch((tokens, targets, segments, positions)))
    assert metrics["loss"] == other_metrics["loss"]
    steps.assert_same(other, grads)


def test_evaluation_draws_no_dropout():
    rows, base, found = unpacked_rows(), tiny.model(tiny.shared_folder(), tiny.CONFIG), []
    for rate, accumulation in ((0.5, 4), (0.0, 1)):
        ours = tiny.adapted(base, use_dora=True, lora_dropout=rate, target_modules=["q_proj", "lm_head"])
        evaluate = make_eval_step(ours.graphdef, ours.trainable_filter)
        found.append(jax.device_get(evaluate(ours.trainable, ours.frozen, batch(rows, accumulation))))
    drops, keeps = found
    np.testing.assert_allclose(drops.loss_sum, keeps.loss_sum, rtol=1e-6)
    assert drops.metrics == keeps.metrics


@pytest.mark.exhaustive(
    "qlora-scan-projections-None",
    "full-unroll-none-48",
)
@pytest.mark.parametrize(
    ("kind", "layer_loop", "remat", "chunk"),
    [
        ("qlora", "unroll", "full", None),
        ("qlora", "scan", "projections", None),
        ("full", "unroll", "none", 48),
        ("mixed ranks", "scan", "none", None),
        ("qlora", "scan", "offload_attention", 48),
        ("full", "scan", "attention", None),
    ],
)
def test_neither_loop_nor_rematerialisation_nor_chunks_change_the_gradients(kind, layer_loop, remat, chunk):
    rows = packed_rows()
    reference, other = model(kind), model(kind, layer_loop, remat, mlp_chunk=chunk)
    expected, grads = steps.gradients(reference, batch(rows))
    metrics, found = steps.gradients(other, batch(rows))
    np.testing.assert_allclose(metrics["loss"], expected["loss"], rtol=1e-6)
    steps.assert_close(tiny.by_layer(found, other.plan), tiny.by_layer(grads, reference.plan), TOLERANCE)


@pytest.mark.exhaustive("lora-bfloat16")
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("full", "bfloat16"), ("lora", "bfloat16"), ("tied", "bfloat16"), ("qlora", "float16")],
)
def test_computing_in_16_bits_trains_float32_arrays(kind, dtype):
    """Gradients point where float32's do; the trained arrays and their gradients are float32 all the while."""
    rows = batch(packed_rows())
    exact, grads = steps.gradients(model(kind), rows)
    metrics, found = steps.gradients(model(kind, dtype=dtype), rows)
    assert metrics["finite"] and metrics["loss"].dtype == np.float32
    np.testing.assert_allclose(metrics["loss"], exact["loss"], rtol=2e-2)  # bfloat16 has 8 bits
    for name, leaf in steps.named(found).items():
        expected = steps.named(grads)[name]
        assert leaf.dtype == np.float32
        cosine = (leaf * expected).sum() / np.linalg.norm(leaf) / np.linalg.norm(expected)
        assert cosine > 0.98, name


def test_the_same_input_gives_the_same_bits():
    """Dropout included: its key is part of the state, and every step and microbatch draws its own masks."""
    ours = tiny.adapted(
        tiny.model(tiny.shared_folder(), tiny.CONFIG), lora_dropout=0.5, target_modules=["up_proj", "lm_head"]
    )
    rows = batch(unpacked_rows(), 2)
    step = make_train_step(ours.graphdef, optax.adamw(1e-2), ours.trainable_filter, donate=False)
    state = init_state(ours.trainable, optax.adamw(1e-2), jax.random.key(5))
    first, metrics = step(state, ours.frozen, rows)
    again, metrics_again = step(state, ours.frozen, rows)
    steps.assert_same(data(again), data(first))
    steps.assert_same(metrics_again, metrics)
    other_key, other = step(state._replace(key=jax.random.key(6)), ours.frozen, rows)
    assert other["loss"] != metrics["loss"]
    _, later = step(state._replace(step=jnp.int32(1)), ours.frozen, rows)
    assert later["loss"] != metrics["loss"]
    assert jax.random.key_data(first.key).tolist() == jax.random.key_data(state.key).tolist()
    assert int(first.step) == 1


def test_a_donated_state_is_gone_and_what_it_was_made_from_is_not():
    ours = model("lora")
    state = init_state(ours.trainable, steps.RECORDER, jax.random.key(5))
    steps.recording_step(ours.graphdef, ours.trainable_filter)(state, ours.frozen, batch(packed_rows()))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.trainable))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((ours.trainable, ours.frozen)))


POISON = 99


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_loss_that_is_not_finite_leaves_the_state_as_it_was(value):
    """One bad token in the last of two microbatches, between two good steps."""
    ours, optimizer = model("qlora"), optax.adamw(1e-2)
    table = ours.frozen["embed_tokens"]["weight"].at[POISON].set(value)
    frozen = {**ours.frozen, "embed_tokens": {"weight": table}}
    good = batch(packed_rows(), 2)
    good = good._replace(tokens=np.where(good.tokens == POISON, 0, good.tokens))
    bad = good._replace(tokens=good.tokens.copy())
    bad.tokens[0, 2, 3] = POISON
    step = steps.adam_step(ours)
    state, metrics = step(init_state(ours.trainable, optimizer, jax.random.key(5)), frozen, good)
    assert metrics["finite"] and np.isfinite(metrics["loss"])
    halted, metrics = step(state, frozen, bad)
    assert not metrics["finite"] and halted.halted
    steps.assert_same(data(halted), data(state._replace(halted=True)))
    after, metrics = step(halted, frozen, good)
    assert not metrics["finite"]
    steps.assert_same(data(after), data(halted))
    after, metrics = step(state, frozen, good)
    assert metrics["finite"] and int(after.step) == 2


def test_a_gradient_that_is_not_finite_leaves_the_state_as_it_was():
    """With A zero and B huge the loss is finite, and A's gradient beyond float32."""
    ours = model("qlora")
    trainable = jax.tree_util.tree_map_with_path(
        lambda path, leaf: (
            jnp.full_like(leaf, 1e37) if "lora_B" in jax.tree_util.keystr(path) else jnp.zeros_like(leaf)
        ),
        ours.trainable,
    )
    state = init_state(trainable, optax.adamw(1e-2), jax.random.key(5))
    after, metrics = steps.adam_step(ours)(state, ours.frozen, batch(packed_rows(), 2))
    assert np.isfinite(metrics["loss"]) and not metrics["finite"]
    steps.assert_same(data(after), data(state._replace(halted=True)))


def test_a_forward_pass_that_overflows_halts_at_any_loss_scale():
    """A smaller one would mend a gradient alone."""
    ours, optimizer = model("qlora"), optax.adamw(1e-2)
    table = ours.frozen["embed_tokens"]["weight"].at[POISON].set(np.inf)
    bad = batch(packed_rows())
    bad = bad._replace(tokens=np.where(bad.tokens == bad.tokens[0, 2, 3], POISON, bad.tokens))
    state = init_state(ours.trainable, optimizer, jax.random.key(5), initial_loss_scale=1024.0)
    halted, metrics = steps.adam_step(ours)(state, {**ours.frozen, "embed_tokens": {"weight": table}}, bad)
    assert not np.isfinite(metrics["loss"]) and halted.halted


def data(state):
    """The state with its key as numbers."""
    return state._replace(key=jax.random.key_data(state.key))


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"use_dora": True}, id="dora"),
        pytest.param({"target_modules": ["embed_tokens", "lm_head", "o_proj"]}, id="embeddings"),
    ],
)
def test_everything_trained_has_a_gradient_by_the_second_step(options):
    """B starts at zero (an embedding's A does), so its partner's gradient is zero in the first step only."""
    base = tiny.model(tiny.shared_folder(), tiny.CONFIG)
    ours = FastLanguageModel.get_peft_model(base, r=4, **options)
    optimizer = optax.chain(steps.RECORDED, optax.adamw(1e-2))
    step = make_train_step(ours.graphdef, optimizer, ours.trainable_filter)
    state = init_state(ours.trainable, optimizer, jax.random.key(5))
    seen = []
    for _ in range(2):
        state, _ = step(state, ours.frozen, batch(packed_rows()))
        seen.append({name: np.abs(leaf).max() for name, leaf in steps.named(state.opt_state[0]).items()})
    assert all(size > 0 for size in seen[1].values())
    idle = {name for name, size in seen[0].items() if size == 0}
    assert idle == {name for name in seen[0] if "lora_A" in name or "lora_embedding_B" in name}


def test_a_batch_without_targets_changes_nothing_but_the_counters():
    ours, rows = model("qlora"), batch(packed_rows(), 2)
    rows = rows._replace(targets=np.full_like(rows.targets, -100))
    state = init_state(ours.trainable, optax.adamw(1e-2), jax.random.key(5))
    state, metrics = steps.adam_step(ours)(state, ours.frozen, rows)
    assert metrics["loss"] == 0 and metrics["num_targets"] == 0 and metrics["finite"]
    steps.assert_same(state.trainable, ours.trainable)


def weighted(model, trainable_filter, rows, *, key):
    """A toy loss with a weight of its own: the squared hidden states, rows weighed by an extra field."""
    hidden = model(rows.tokens, rows.positions, rows.segment_ids, key=key)
    real = (rows.segment_ids > 0)[..., None]
    squares = jnp.where(real, jnp.square(hidden.astype(jnp.float32)), 0).sum((1, 2))
    metrics = {"squares": squares.sum()}
    return LossSums((squares * rows.extra["weights"]).sum(), rows.extra["weights"].sum(), metrics)


def test_a_loss_of_ones_own_has_its_own_weight_and_its_own_fields():
    """The denominator is the sum of all weights, however the rows are divided into microbatches and devices."""
    weights = np.asarray([2.0, 0.0, 0.5, 3.0, 0.0, 0.25, 0.0, 1.0], np.float32)
    rows = batch(packed_rows())._replace(extra={"weights": weights[None]})
    ours = model("lora")
    metrics, grads = steps.gradients(ours, rows, loss=weighted)
    evaluate = make_eval_step(ours.graphdef, ours.trainable_filter, loss=weighted)
    sums = jax.device_get(evaluate(ours.trainable, ours.frozen, rows))
    assert sums.weight == weights.sum() == 6.75
    np.testing.assert_allclose(metrics["loss"], sums.loss_sum / 6.75, rtol=1e-6)
    np.testing.assert_allclose(metrics["squares"], sums.metrics["squares"] / 6.75, rtol=1e-6)
    assert "num_targets" not in metrics

    def loss_of(trainable):
        module = nnx.merge(ours.graphdef, trainable, ours.frozen)
        one = jax.tree.map(lambda array: jnp.asarray(array[0]), rows)
        return weighted(module, ours.trainable_filter, one, key=None).loss_sum / 6.75

    steps.assert_close(grads, jax.jit(jax.grad(loss_of))(ours.trainable), TOLERANCE)
    split = jax.tree.map(lambda array: array.reshape(4, 2, *array.shape[2:]), rows)
    split_metrics, split_grads = steps.gradients(ours, split, loss=weighted, mesh=make_mesh(data=2))
    np.testing.assert_allclose(split_metrics["loss"], metrics["loss"], rtol=1e-6)
    steps.assert_close(split_grads, grads, TOLERANCE)


def test_rows_that_weigh_nothing_change_nothing():
    ours = model("lora")
    rows = batch(packed_rows())._replace(extra={"weights": np.zeros((1, 8), np.float32)})
    metrics, grads = steps.gradients(ours, rows, loss=weighted)
    assert metrics["loss"] == 0 and metrics["finite"]
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(grads))


def test_other_learning_rates_are_the_same_program():
    """Its text is the key of the compilation cache."""
    ours = model("lora")
    settings = [
        (OptimizerConfig(learning_rate=1e-3, warmup_steps=2, embedding_learning_rate=1e-4), 9),
        (OptimizerConfig(learning_rate=2e-4, lr_scheduler_type="wsd", loraplus_lr_ratio=4.0, min_lr_ratio=0.1), 5000),
    ]
    texts = []
    for config, total in settings:
        optimizer = make_optimizer(config, total)
        step = make_train_step(ours.graphdef, optimizer, ours.trainable_filter)
        state = init_state(ours.trainable, optimizer, jax.random.key(0))
        texts.append(step.lower(state, ours.frozen, batch(packed_rows())).as_text())
    assert texts[0] == texts[1]
