"""Losses of preferences over packed rows, beside the papers' formulas on whole logits of the same model.

Float32: sums of some ten log-probabilities of a few nats, in another order.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fastjax import FastLanguageModel
from fastjax.data.batches import batch_of
from fastjax.data.preferences import Answer, Role, pack_preferences, with_reference
from fastjax.errors import ConfigError
from fastjax.language_model.variants import with_start
from fastjax.models.decoder import lm_logits
from fastjax.models.layout import logical_axes
from fastjax.models.leaves import START
from fastjax.parallel import make_mesh
from fastjax.training.evaluation import run_evaluation
from fastjax.training.loss import LossSums, Mean
from fastjax.training.preferences import DPOLoss, IPOLoss, KTOLoss, ORPOLoss, SimPOLoss, reference_log_probs
from fastjax.training.preferences.losses import pairs_of
from fastjax.training.preferences.objectives import odds_ratio
from fastjax.training.preferences.scores import document_scores
from tests.support import steps, tiny

TOLERANCE = 2e-5
CHANGES = {"tie_word_embeddings": False, "num_hidden_layers": 2}
WIDTH, SLOTS = 48, 6
#: Tokens of (prompt, chosen, rejected, mismatched) answers.
LENGTHS = ((5, 7, 3, 4), (2, 9, 8, 3), (6, 1, 4, 2), (3, 5, 6, 7))
LOSSES = {
    "dpo": DPOLoss(beta=0.3, label_smoothing=0.2, chunk_size=7),
    "ipo": IPOLoss(beta=0.4),
    "orpo": ORPOLoss(beta=0.5),
    "orpo, all": ORPOLoss(beta=0.5, nll_tokens="all"),
    "simpo": SimPOLoss(beta=2.5, gamma=0.7, label_smoothing=0.1),
    "kto": KTOLoss(beta=0.3, desirable_weight=1.5, undesirable_weight=0.6),
}
#: How much each counts in the gradients that are compared: they are of like size, and KTO's estimate is a microbatch's.
SHARES = dict(zip(LOSSES, (1.0, 0.05, 1.0, 1.0, 0.5, 5.0), strict=True))
PAIRED = SHARES | {"kto": 0.0, "orpo, all": 0.0}


@functools.cache
def base(**options):
    return tiny.model(tiny.shared_folder(**CHANGES), tiny.config(**CHANGES), **options)


@functools.cache
def model():
    """The head is adapted too."""
    return tiny.adapted(base(), target_modules=["q_proj", "down_proj", "lm_head"])


@functools.cache
def groups():
    rng, found = np.random.default_rng(2), []
    for lengths in LENGTHS:
        prompt, *answers = (rng.integers(0, 100, length).tolist() for length in lengths)
        roles = Role.CHOSEN, Role.REJECTED, Role.MISMATCHED
        found.append([Answer(prompt, answer, role) for answer, role in zip(answers, roles, strict=True)])
    return found


@functools.cache
def packed():
    """Four groups in two rows."""
    rows = pack_preferences(groups(), WIDTH)
    assert (len(rows), rows.documents_per_row) == (2, SLOTS)
    return batch_of(rows, np.asarray([[0, 1]]))


def alone():
    """Batches of the same shape of a group and a row of padding each."""
    for group in groups():
        yield batch_of(pack_preferences([group], WIDTH), np.asarray([[0, -1]]), SLOTS)


@jax.jit
def _run(trainable, frozen, rows, shares):
    def total(trainable):
        decoder = nnx.merge(model().graphdef, trainable, frozen)
        sums = {name: loss(decoder, model().trainable_filter, rows, key=None) for name, loss in LOSSES.items()}
        return sum(shares[name] * sums[name].loss_sum for name in sums), sums

    return jax.grad(total, has_aux=True)(trainable)


def run(batch, shares):
    """(gradients of the shares of all losses, their sums) of a batch's only microbatch."""
    rows = jax.tree.map(lambda array: array[0], batch)
    return jax.device_get(_run(model().trainable, model().frozen, rows, jax.tree.map(np.float32, shares)))


def scores(model, batch, trainable=None):
    """Log-probability of each token of whole logits."""
    decoder = nnx.merge(model.graphdef, model.trainable if trainable is None else trainable, model.frozen)
    logits = lm_logits(decoder.lm_head, decoder(batch.tokens[0], batch.positions[0], batch.segment_ids[0]))
    learnt = batch.targets[0] >= 0
    right = jnp.take_along_axis(jax.nn.log_softmax(logits), np.maximum(batch.targets[0], 0)[..., None], -1)[..., 0]
    return jnp.where(learnt, right, 0.0), learnt


def everything(batch):
    """The batch with every token to predict, those of prompts too."""
    targets = np.array(batch.targets)
    for _, row, place in np.argwhere(targets < 0).tolist():
        segment = batch.segment_ids[0, row, place : place + 2]
        if len(segment) == 2 and segment[0] == segment[1] > 0:
            targets[0, row, place] = batch.tokens[0, row, place + 1]
    return batch._replace(targets=targets)


def formulas(batch, trainable):
    """The losses of a batch by name, from whole logits, document by document."""
    policy, learnt = scores(model(), batch, trainable)
    reference, _ = scores(base(), batch)
    whole, known = scores(model(), everything(batch), trainable)
    pairs, answers, mismatched, chosen_tokens = [], [], [], np.zeros(known.shape, bool)
    for row, slot in np.argwhere(batch.extra["roles"][0] > 0).tolist():
        own = batch.segment_ids[0][row] == slot + 1
        count = float(np.sum(own & learnt[row]))
        document = jnp.sum(policy[row], where=own), jnp.sum(reference[row], where=own), count
        role = batch.extra["roles"][0, row, slot]
        if role == Role.MISMATCHED:
            mismatched.append(document[0] - document[1])
        else:
            chosen_tokens[row] |= own & known[row] & (role == Role.CHOSEN)
            answers.append((*document[:2], role))
            pairs = [*pairs, document] if role == Role.CHOSEN else [*pairs[:-1], (pairs[-1], document)]
    sigma, found = jax.nn.sigmoid, dict.fromkeys(LOSSES, 0.0)
    for (chosen, base_chosen, m), (rejected, base_rejected, n) in pairs:
        h = 0.3 * (chosen - base_chosen - rejected + base_rejected)
        found["dpo"] += -0.8 * jnp.log(sigma(h)) - 0.2 * jnp.log(sigma(-h))
        found["ipo"] += ((chosen - base_chosen) / m - (rejected - base_rejected) / n - 1 / 0.8) ** 2
        p, q = jnp.exp(chosen / m), jnp.exp(rejected / n)
        ratio = -0.5 * jnp.log(sigma(jnp.log(p / (1 - p)) - jnp.log(q / (1 - q))))
        found["orpo"] += -chosen / m + ratio
        found["orpo, all"] += -jnp.sum(whole, where=chosen_tokens) / float(chosen_tokens.sum()) + ratio
        margin = 2.5 * chosen / m - 2.5 * rejected / n - 0.7
        found["simpo"] += -0.9 * jnp.log(sigma(margin)) - 0.1 * jnp.log(sigma(-margin))
    z = jax.lax.stop_gradient(jnp.maximum(0.0, sum(mismatched) / len(mismatched)))
    for log_prob, reference, role in answers:
        r = 0.3 * (log_prob - reference - z)
        found["kto"] += 1.5 * (1 - sigma(r)) if role == Role.CHOSEN else 0.6 * (1 - sigma(-r))
    return found, z


def test_papers_formulas_on_whole_logits():
    def total(trainable):
        losses, z = formulas(packed(), trainable)
        return sum(SHARES[name] * losses[name] for name in losses), (losses, z)

    expected, (losses, z) = jax.device_get(jax.jit(jax.grad(total, has_aux=True))(model().trainable))
    gradients, sums = run(packed(), SHARES)
    for name, loss in losses.items():
        np.testing.assert_allclose(sums[name].loss_sum, loss, rtol=TOLERANCE, err_msg=name)
        assert sums[name].weight == (8 if name == "kto" else 4)
    np.testing.assert_allclose(sums["kto"].metrics["kl"] / 8, z, rtol=TOLERANCE)
    assert z > 0.01
    steps.assert_close(gradients, expected, TOLERANCE)


def test_packed_pairs_are_pairs_one_a_row():
    gradients, sums = run(packed(), PAIRED)
    parts = [run(batch, PAIRED) for batch in alone()]
    steps.assert_close(jax.tree.map(lambda *g: sum(g), *(part[0] for part in parts)), gradients, TOLERANCE)
    for name in set(LOSSES) - {"kto", "orpo, all"}:
        added = jax.tree.map(lambda *values: sum(values), *(part[1][name] for part in parts))
        steps.assert_close(added._asdict(), sums[name]._asdict(), TOLERANCE)


def test_metrics():
    """Means over pairs, and of KTO over answers of each kind."""
    _, sums = run(packed(), SHARES)
    assert {name.split("/")[0] for name in sums["dpo"].metrics} == {"rewards", "logps"}
    dpo, kto = sums["dpo"].metrics, sums["kto"].metrics
    np.testing.assert_allclose(dpo["rewards/margins"], dpo["rewards/chosen"] - dpo["rewards/rejected"], rtol=1e-5)
    for name in ("chosen", "rejected"):
        for kind in ("rewards", "logps"):
            assert kto[f"{kind}/{name}"].weight == 4
            np.testing.assert_allclose(kto[f"{kind}/{name}"].total, dpo[f"{kind}/{name}"], rtol=TOLERANCE)
    assert 0 <= dpo["rewards/accuracies"] <= 4 and dpo["rewards/accuracies"] % 1 == 0


def test_a_reference_that_was_computed_before():
    """Once for the rows; the train step then has one pass, and the same loss and gradient in one portion or two."""
    ours, rows = model(), jax.tree.map(lambda array: array[0], packed())

    @jax.jit
    def reference(trainable, frozen, rows):
        return reference_log_probs(nnx.merge(ours.graphdef, trainable, frozen), ours.trainable_filter, rows)

    known = np.asarray(reference(ours.trainable, ours.frozen, rows))
    gradients, sums = run(packed(), dict.fromkeys(LOSSES, 0.0) | {"dpo": 0.25})
    portions = batch_of(with_reference(pack_preferences(groups(), WIDTH), known), np.asarray([[0], [1]]))
    metrics, found = steps.gradients(ours, portions, loss=LOSSES["dpo"])
    np.testing.assert_allclose(metrics["loss"], sums["dpo"].loss_sum / 4, rtol=1e-6)
    for name, total in sums["dpo"].metrics.items():
        np.testing.assert_allclose(metrics[name], total / 4, rtol=TOLERANCE, err_msg=name)
    steps.assert_close(found, gradients, TOLERANCE)


def test_a_reference_that_training_begins_with():
    """A trained adapter and table: the reference is a constant that stays as they move, laid out as they are."""
    ours = tiny.adapted(base(), target_modules=["q_proj", "down_proj"], modules_to_save=["lm_head"])
    held, rows = with_start(ours, ours.trainable), jax.tree.map(lambda array: array[0], packed())
    start, trained = (jax.tree.leaves(logical_axes(tree, ours.config)) for tree in (held.frozen, ours.trainable))
    assert start[-len(trained) :] == trained and len(set(trained)) > 1  # behind the base's own, by name

    @jax.jit
    def program(trainable, frozen, rows):
        def reference(trainable):
            decoder = nnx.merge(held.graphdef, trainable, frozen)
            found = reference_log_probs(decoder, held.trainable_filter, rows)
            return found.sum(), (found, document_scores(decoder, held.trainable_filter, rows).log_probs)

        return jax.grad(reference, has_aux=True)(trainable)

    gradient, (before, policy) = program(held.trainable, held.frozen, rows)
    np.testing.assert_allclose(before, policy, rtol=1e-6)
    _, (after, moved) = program(jax.tree.map(lambda leaf: leaf + 0.01, held.trainable), held.frozen, rows)
    np.testing.assert_array_equal(after, before)
    assert np.abs(moved - after).max() > 0.01 and not any(map(np.any, jax.tree.leaves(gradient)))
    assert START not in with_start(held, None).frozen and with_start(ours, None) is ours


def test_two_devices():
    """KTO's estimate is of all of a microbatch's rows; its metrics are means over their own answers."""
    gradients, sums = run(packed(), dict.fromkeys(LOSSES, 0.0) | {"kto": 1 / 8})
    metrics, found = steps.gradients(model(), packed(), loss=LOSSES["kto"], mesh=make_mesh(data=2))
    np.testing.assert_allclose(metrics["loss"], sums["kto"].loss_sum / 8, rtol=1e-6)
    for name, total in sums["kto"].metrics.items():
        mean = total.total / total.weight if isinstance(total, Mean) else total / 8
        np.testing.assert_allclose(metrics[name], mean, rtol=TOLERANCE, err_msg=name)
    steps.assert_close(found, gradients, TOLERANCE)


def test_an_evaluation_divides_by_a_metrics_own_weight():
    def sums(_, frozen, number):
        metrics = {
            "one": Mean(jnp.float32(number), jnp.float32(number % 2)),
            "none": Mean(jnp.zeros(()), jnp.zeros(())),
        }
        return LossSums(jnp.float32(6.0), jnp.float32(4.0), metrics | {"plain": jnp.float32(number)})

    found = run_evaluation(sums, None, None, [1, 2, 3], send=lambda number: number)
    assert found.loss == 1.5
    assert (found.extra["eval_one"], found.extra["eval_plain"]) == (3.0, 0.5)
    assert np.isnan(found.extra["eval_none"])


def test_documents_without_a_partner_are_not_silent():
    one = jnp.ones((1, 3))
    for roles, pairs, fits in (
        ([0, 1, 2, 0], 1.0, True),
        ([1, 2, 3, 0], 1.0, True),
        ([3, 0, 0, 0], 0.0, True),
        ([1, 0, 2, 0], 0.0, False),
        ([2, 1, 2, 0], 1.0, False),
    ):
        found = pairs_of(jnp.asarray([roles])).sums(one, one, one)
        assert bool(jnp.isfinite(found.loss_sum)) is fits and found.weight == pairs


def test_places_without_a_pair_have_no_gradient():
    """A document that is not there has a log-probability of zero, and infinite odds."""
    pairs = pairs_of(jnp.asarray([[0, 1, 2, 0]]))
    gradient = jax.grad(lambda values: pairs.total(odds_ratio(*pairs.of(values), beta=0.5)))(
        jnp.asarray([[0.0, -1, -2, 0]])
    )
    assert np.all(np.isfinite(gradient)) and np.array_equal(gradient[0] != 0, [False, True, True, False])


@pytest.mark.parametrize(
    "kind, reason",
    [("full", "of its arrays are trained, such as"), ("whole head", "expected true with modules_to_save, got false")],
)
def test_trained_weights_are_no_reference(kind, reason):
    if kind == "full":
        ours = base(full_finetuning=True)
    else:
        ours = tiny.adapted(base(), target_modules=["q_proj"], modules_to_save=["lm_head"])
    rows = jax.tree.map(lambda array: array[0], packed())

    def shapes(rows):
        loss = functools.partial(DPOLoss(), ours.module(), ours.trainable_filter, key=None)
        return jax.eval_shape(lambda rows: loss(rows), rows)

    with pytest.raises(ConfigError, match=rf"reference_log_probs: expected in the rows' extra fields.*{reason}"):
        shapes(rows)
    known = np.zeros((2, SLOTS), np.float32)
    assert shapes(rows._replace(extra={**rows.extra, "reference_log_probs": known})).loss_sum.shape == ()


@pytest.mark.parametrize(
    "made, message",
    [
        (lambda: DPOLoss(beta=0.0), "^DPOLoss.beta: expected a number greater than 0, got 0.0$"),
        (
            lambda: SimPOLoss(label_smoothing=0.5),
            r"SimPOLoss.label_smoothing: expected a number in \[0, 0.5\), got 0.5",
        ),
        (
            lambda: KTOLoss(undesirable_weight=-1.0),
            "KTOLoss.undesirable_weight: expected a number greater than 0",
        ),
    ],
)
def test_numbers_out_of_range_are_refused(made, message):
    with pytest.raises(ValueError, match=message):
        made()


@pytest.mark.gpu
def test_a_fresh_adapter_is_its_reference_on_a_card():
    """In bfloat16, by the kernels with adapters: with and without them a log-probability would be off by some 0.1."""
    shape = {
        **CHANGES,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    plain = tiny.model(tiny.shared_folder(**shape), tiny.config(**shape), dtype="bfloat16", load_in_4bit=True)
    fresh = FastLanguageModel.get_peft_model(plain, r=16, lora_alpha=16)
    rng = np.random.default_rng(5)
    prompt, chosen, rejected = (rng.integers(0, 100, length).tolist() for length in (40, 50, 38))
    pair = [Answer(prompt, chosen, Role.CHOSEN), Answer(prompt, rejected, Role.REJECTED)]
    rows = jax.tree.map(lambda array: array[0], batch_of(pack_preferences([pair] * 4, 256), np.asarray([[0, 1, 2, 3]])))

    @jax.jit
    def run(trainable):
        def loss(trainable):
            sums = DPOLoss(beta=1.0)(
                nnx.merge(fresh.graphdef, trainable, fresh.frozen), fresh.trainable_filter, rows, key=None
            )
            return sums.loss_sum / sums.weight, sums.metrics["rewards/margins"]

        return jax.value_and_grad(loss, has_aux=True)(trainable)

    (loss, margin), gradient = run(fresh.trainable)
    assert float(margin) == 0.0 and abs(float(loss) - np.log(2.0)) < 1e-6
    assert any(float(jnp.abs(leaf).max()) > 0 for leaf in jax.tree.leaves(gradient))
