"""Sampling of a token in float64, step by step; tests/fastjax/parity/test_sampling.py holds it against transformers."""

import numpy as np


def log_softmax(logits):
    """Log-probabilities, of the last axis."""
    wide = np.asarray(logits, np.float64)
    wide = wide - wide.max(-1, keepdims=True)
    return wide - np.log(np.sum(np.exp(wide), -1, keepdims=True))


def distribution(logits, option, prompt=(), answer=()):
    """The probabilities of a row's tokens.

    Args:
        logits: of the model, [V].
        option: GenerationOptions.
        prompt: token ids.
        answer: token ids so far.
    """
    wide, bias = np.asarray(logits, np.float64).copy(), dict(option.logit_bias)
    if 100 in bias.values():
        wide[[token for token in range(len(wide)) if bias.get(token) != 100]] = -np.inf
    for token, value in bias.items():
        wide[token] += {100: 0, -100: -np.inf}.get(value, value)
    for token in {*prompt, *answer}:
        wide[token] *= 1 / option.repetition_penalty if wide[token] > 0 else option.repetition_penalty
    for token in set(answer):
        wide[token] -= option.presence_penalty + option.frequency_penalty * answer.count(token)
    if option.temperature == 0:
        return (np.arange(len(wide)) == wide.argmax()).astype(np.float64)
    wide = (wide - wide.max()) / option.temperature
    if 0 < (option.top_k or 0) < len(wide):
        wide[wide < np.sort(wide)[-option.top_k]] = -np.inf
    probability = np.exp(wide) / np.exp(wide).sum()
    if option.top_p is not None and option.top_p < 1:
        above = np.asarray([probability[probability > one].sum() for one in probability])
        probability[above >= max(option.top_p, 1e-30)] = 0
    probability[probability < (option.min_p or 0) * probability.max()] = 0
    return probability / probability.sum()
