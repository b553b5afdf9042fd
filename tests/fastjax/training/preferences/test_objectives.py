"""IPO beside TRL's trainer, in value and gradient, whose other losses the parity tests hold; KTO's divergence.

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
PAIRS = 9


def log_probs(seed, size):
    """Below zero, of both orders."""
    return -size * np.random.default_rng(seed).uniform(0.02, 2.0, PAIRS).astype(np.float32)


CHOSEN, REJECTED, BASE_CHOSEN, BASE_REJECTED = (log_probs(seed, 20.0) for seed in range(4))
DESIRABLE = np.arange(PAIRS) % 3 > 0


def test_the_divergence_is_a_constant_not_below_zero():
    marked = jnp.asarray(DESIRABLE)
    found, gradient = jax.value_and_grad(objectives.kto_divergence)(jnp.asarray(CHOSEN), BASE_CHOSEN - 50.0, marked)
    np.testing.assert_allclose(found, np.mean((CHOSEN - BASE_CHOSEN)[DESIRABLE]) + 50.0, rtol=1e-6)
    assert not np.any(gradient)
    assert objectives.kto_divergence(jnp.asarray(CHOSEN), BASE_CHOSEN + 50.0, marked) == 0
    assert np.isnan(objectives.kto_divergence(jnp.asarray(CHOSEN), BASE_CHOSEN, jnp.zeros_like(marked)))


@pytest.mark.filterwarnings("ignore")  # of its imports
def test_ipo_of_trl():
    """The loss of a trainer's batch, for a model that gives these log-probabilities to the answers' first tokens."""
    trl = pytest.importorskip("trl", minversion="1.16")
    log_probs = torch.zeros(2 * PAIRS, 3)
    log_probs[:, 0] = torch.tensor(np.concatenate([CHOSEN, REJECTED]))
    log_probs.requires_grad_()
    completion = torch.ones(2 * PAIRS, 4, dtype=torch.long)
    completion[:, 0], completion[::2, -1] = 0, 0
    batch = {"input_ids": torch.ones_like(completion), "attention_mask": torch.ones_like(completion)}
    batch |= {"completion_mask": completion}
    batch |= {"ref_chosen_logps": torch.tensor(BASE_CHOSEN), "ref_rejected_logps": torch.tensor(BASE_REJECTED)}
    nothing = torch.zeros(log_probs.shape)
    outputs = types.SimpleNamespace(log_probs=log_probs, entropy=nothing, mean_logits=nothing, is_top1=nothing > 0)
    options = {"loss_types": ["ipo"], "loss_weights": [1.0], "f_divergence_type": "reverse_kl", "use_weighting": False}
    stub = types.SimpleNamespace(
        model=types.SimpleNamespace(training=False),
        accelerator=types.SimpleNamespace(device="cpu", gather=lambda x: x, gather_for_metrics=lambda x: x),
        aux_loss_enabled=False,
        precompute_ref_logps=True,
        _total_train_tokens=0,
        _metrics=collections.defaultdict(lambda: collections.defaultdict(list)),
        beta=0.3,
        ld_alpha=None,
        **options,
    )
    loss = trl.DPOTrainer._compute_loss(stub, lambda **_: outputs, batch, False)
    loss.backward()
    assert log_probs.grad is not None
    chosen, rejected = np.split(completion.sum(1).numpy().astype(np.float32), 2)

    def mean(policy):
        log_ratio = (policy[0] / chosen - policy[1] / rejected) - (BASE_CHOSEN / chosen - BASE_REJECTED / rejected)
        return jnp.mean(objectives.ipo(log_ratio, beta=0.3))

    ours, gradients = jax.value_and_grad(mean)(jnp.stack([CHOSEN, REJECTED]))
    np.testing.assert_allclose(ours, loss.item(), rtol=1e-5)
    np.testing.assert_allclose(gradients.ravel(), log_probs.grad.numpy()[:, 0], rtol=1e-5, atol=1e-6)
