"""The objectives beside TRL's trainers, in value and gradient.

Float32: log-probabilities of some tens, exponentials of their differences.
"""

import collections
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fastjax.training.preferences import objectives

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")
F = torch.nn.functional
PAIRS = 9
#: Those of its imports and of its experimental trainers.
TRLS_WARNINGS = pytest.mark.filterwarnings("ignore")


def log_probs(seed, size):
    """Below zero, of both orders."""
    return -size * np.random.default_rng(seed).uniform(0.02, 2.0, PAIRS).astype(np.float32)


CHOSEN, REJECTED, BASE_CHOSEN, BASE_REJECTED = (log_probs(seed, 20.0) for seed in range(4))
#: Means over tokens.
MEANS = tuple(log_probs(seed, 1.0) for seed in range(4, 8))
DESIRABLE = np.arange(PAIRS) % 3 > 0


def ours(objective, policies, **options):
    """The losses, and the gradient of their mean."""

    def mean(policies):
        losses = objective(*policies, **options)
        return jnp.mean(losses), losses

    gradients, losses = jax.grad(mean, has_aux=True)(tuple(map(jnp.asarray, policies)))
    return [*map(np.asarray, (losses, *gradients))]


def against(objective, base_chosen, base_rejected, **options):
    """An objective of (chosen, rejected) beside the reference's log-probabilities."""
    return lambda chosen, rejected: objective((chosen - rejected) - (base_chosen - base_rejected), **options)


def theirs(objective, policies):
    """Losses and gradients with torch, in float64."""
    inputs = [torch.tensor(values, dtype=torch.float64, requires_grad=True) for values in policies]
    losses = objective(*inputs)
    losses.mean().backward()
    return [losses.detach().numpy(), *(values.grad.numpy() for values in inputs)]


def assert_equal(found, expected):
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_the_divergence_is_a_constant_not_below_zero():
    marked = jnp.asarray(DESIRABLE)
    found, gradient = jax.value_and_grad(objectives.kto_divergence)(jnp.asarray(CHOSEN), BASE_CHOSEN - 50.0, marked)
    np.testing.assert_allclose(found, np.mean((CHOSEN - BASE_CHOSEN)[DESIRABLE]) + 50.0, rtol=1e-6)
    assert not np.any(gradient)
    assert objectives.kto_divergence(jnp.asarray(CHOSEN), BASE_CHOSEN + 50.0, marked) == 0
    assert np.isnan(objectives.kto_divergence(jnp.asarray(CHOSEN), BASE_CHOSEN, jnp.zeros_like(marked)))


@pytest.fixture(scope="module")
def trl():
    return pytest.importorskip("trl", minversion="1.16")


def in_trl(trainer, log_probs, inputs, **attributes):
    """The loss of a trainer's batch, for a model that gives these log-probabilities of tokens."""

    def model(input_ids, labels, **_):
        found = log_probs if input_ids.shape == inputs["input_ids"].shape else attributes["mismatched"]
        nothing = torch.zeros(found.shape)
        return types.SimpleNamespace(log_probs=found, entropy=nothing, mean_logits=nothing, is_top1=nothing > 0)

    accelerator = types.SimpleNamespace(device="cpu", gather=lambda x: x, gather_for_metrics=lambda x: x)
    stub = types.SimpleNamespace(
        model=types.SimpleNamespace(training=False),
        accelerator=accelerator,
        aux_loss_enabled=False,
        precompute_ref_logps=True,
        _total_train_tokens=0,
        _metrics=collections.defaultdict(lambda: collections.defaultdict(list)),
        **attributes,
    )
    if hasattr(trainer, "_compute_kl_logps"):
        stub._compute_kl_logps = lambda model, batch: trainer._compute_kl_logps(stub, model, batch)
    loss = trainer._compute_loss(stub, model, inputs, False)
    loss.backward()
    return loss.item(), log_probs.grad.numpy()[:, 0], stub._metrics["eval"]


def tokens_of(answers, tokens=3):
    """(log-probabilities [answers, tokens] of which the answer's sum is the first, a batch of TRL)."""
    log_probs = torch.zeros(len(answers), tokens)
    log_probs[:, 0] = torch.tensor(answers)
    completion = torch.ones(len(answers), tokens + 1, dtype=torch.long)
    completion[:, 0] = 0
    completion[::2, -1] = 0
    batch = {"input_ids": torch.ones_like(completion), "attention_mask": torch.ones_like(completion)}
    return log_probs.requires_grad_(), {**batch, "completion_mask": completion}


@TRLS_WARNINGS
@pytest.mark.parametrize("kind", ["sigmoid", "ipo"])
def test_dpo_of_trl(trl, kind):
    log_probs, batch = tokens_of(np.concatenate([CHOSEN, REJECTED]))
    batch |= {"ref_chosen_logps": torch.tensor(BASE_CHOSEN), "ref_rejected_logps": torch.tensor(BASE_REJECTED)}
    options = {"loss_types": [kind], "loss_weights": [1.0], "f_divergence_type": "reverse_kl", "use_weighting": False}
    loss, gradient, _ = in_trl(trl.DPOTrainer, log_probs, batch, beta=0.3, ld_alpha=None, **options)
    lengths = np.split(batch["completion_mask"].sum(1).numpy().astype(np.float32), 2)
    chosen, rejected = lengths if kind == "ipo" else np.ones((2, PAIRS), np.float32)
    objective = objectives.ipo if kind == "ipo" else objectives.dpo
    beside = against(objective, BASE_CHOSEN / chosen, BASE_REJECTED / rejected, beta=0.3)
    losses, *gradients = ours(beside, (CHOSEN / chosen, REJECTED / rejected))
    gradients = np.concatenate([gradients[0] / chosen, gradients[1] / rejected])
    assert_equal((losses.mean(), gradients), (loss, gradient))


@TRLS_WARNINGS
def test_kto_of_trl(trl):
    log_probs, batch = tokens_of(CHOSEN)
    mismatched, ids = torch.tensor(REJECTED)[:, None].repeat(1, 2) / 2, torch.ones(PAIRS, 3, dtype=torch.long)
    batch |= {"label": torch.tensor(DESIRABLE), "ref_logps": torch.tensor(BASE_CHOSEN)}
    batch |= {"KL_input_ids": ids, "KL_attention_mask": ids, "KL_completion_mask": ids}
    batch |= {"ref_KL_logps": torch.tensor(BASE_REJECTED - 9)}
    weights = {"desirable_weight": 1.5, "undesirable_weight": 0.6}
    options = {"loss_type": "kto", "calculate_KL": True, "mismatched": mismatched, **weights}
    loss, gradient, metrics = in_trl(trl.KTOTrainer, log_probs, batch, beta=0.3, **options)
    everywhere = jnp.ones(PAIRS, bool)
    divergence = objectives.kto_divergence(jnp.asarray(REJECTED), jnp.asarray(BASE_REJECTED - 9), everywhere)
    assert divergence > 1
    np.testing.assert_allclose(divergence, metrics["kl"], rtol=1e-6)
    marks = {"reference": BASE_CHOSEN, "desirable": DESIRABLE, "divergence": divergence, "beta": 0.3}
    losses, found = ours(objectives.kto, (CHOSEN,), **marks, **weights)
    assert_equal((losses.mean(), found), (loss, gradient))


@TRLS_WARNINGS
def test_orpo_simpo_and_cdpo_of_trl(trl):
    from trl.experimental.cpo import CPOTrainer
    from trl.experimental.orpo import ORPOTrainer

    accelerator = types.SimpleNamespace(device="cpu")

    def odds_ratio(chosen, rejected):
        stub = types.SimpleNamespace(beta=0.3, accelerator=accelerator)
        return -ORPOTrainer.odds_ratio_loss(stub, chosen, rejected)[0]

    assert_equal(ours(objectives.odds_ratio, MEANS[:2], beta=0.3), theirs(odds_ratio, MEANS[:2]))

    def cpo(kind):
        options = {"alpha": 0.0, "simpo_gamma": 0.7, "label_smoothing": 0.2, "loss_type": kind, "beta": 2.5}
        stub = types.SimpleNamespace(accelerator=accelerator, **options)
        return lambda chosen, rejected: CPOTrainer.cpo_loss(stub, chosen, rejected)[0]

    options = {"beta": 2.5, "label_smoothing": 0.2}
    assert_equal(ours(objectives.simpo, MEANS[:2], gamma=0.7, **options), theirs(cpo("simpo"), MEANS[:2]))
    assert_equal(ours(against(objectives.dpo, 0.0, 0.0, **options), MEANS[:2]), theirs(cpo("sigmoid"), MEANS[:2]))
