"""Routing token by token in NumPy's float64: the oracle. Arguments as in ``api``.

A token's weights are a row of X numbers, zero for the experts that it does not choose.
"""

import numpy as np

from pallas_kernels.moe_routing.api import RouterSettings


def route(logits: np.ndarray, settings: RouterSettings, choice_bias: np.ndarray | None = None) -> np.ndarray:
    """The weights of all experts, float64 [N, X]."""
    logits = np.asarray(logits, np.float64)
    dense = np.zeros(logits.shape)
    for token, row in enumerate(logits):
        scores = row if settings.score_after else _score(row, settings.score)
        choice = scores if choice_bias is None else scores + np.asarray(choice_bias, np.float64)
        chosen = _best(_within_groups(choice, settings), settings.experts_per_token)
        weights = _score(row[chosen], settings.score) if settings.score_after else scores[chosen]
        if settings.normalize:
            weights = weights / weights.sum()
        dense[token, chosen] = weights * settings.scale
    return dense


def load_balancing_loss(logits: np.ndarray, dense: np.ndarray, mask: np.ndarray) -> float:
    """X·Σₓ fₓ·Pₓ over the tokens of the mask; `dense` as `route` gives it."""
    probabilities = np.stack([_score(row, "softmax") for row in np.asarray(logits, np.float64)[mask]])
    return logits.shape[1] * float(np.sum((dense[mask] != 0).mean(0) * probabilities.mean(0)))


def z_loss(logits: np.ndarray, mask: np.ndarray) -> float:
    """The mean of log(Σ exp(logits))² over the tokens of the mask."""
    return float(np.mean(np.log(np.exp(np.asarray(logits, np.float64)[mask]).sum(1)) ** 2))


def _score(row: np.ndarray, score: str) -> np.ndarray:
    return 1 / (1 + np.exp(-row)) if score == "sigmoid" else np.exp(row) / np.exp(row).sum()


def _best(values: np.ndarray, count: int) -> np.ndarray:
    """Indices of the largest values; of equal ones the lower index."""
    return np.argsort(-values, kind="stable")[:count]


def _within_groups(choice: np.ndarray, settings: RouterSettings) -> np.ndarray:
    """The choice with -inf outside the best groups."""
    groups = choice.reshape(settings.groups, -1)
    best = _best(np.sort(groups, axis=1)[:, -2:].sum(1), settings.groups_per_token)
    allowed = np.isin(np.arange(settings.groups), best)
    return np.where(allowed[:, None], groups, -np.inf).reshape(-1)
