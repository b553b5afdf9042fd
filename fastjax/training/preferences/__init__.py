"""Losses of preferences: DPO, IPO, KTO, ORPO and SimPO over packed documents.

`objectives` are the papers' equations on log-probabilities of answers, `scores` these log-probabilities under the model
and under its reference, `losses` both as losses of the train step. `fastjax.data.preferences` packs the rows.
"""

from fastjax.training.preferences.losses import DPOLoss, IPOLoss, KTOLoss, ORPOLoss, SimPOLoss
from fastjax.training.preferences.scores import Scores, document_scores, reference_log_probs

__all__ = [
    "DPOLoss",
    "IPOLoss",
    "KTOLoss",
    "ORPOLoss",
    "Scores",
    "SimPOLoss",
    "document_scores",
    "reference_log_probs",
]
