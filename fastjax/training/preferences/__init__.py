"""Losses of preferences: DPO, IPO, KTO, ORPO and SimPO over packed documents.

`objectives` are the papers' equations on log-probabilities of answers, `scores` these log-probabilities under the model
and under its reference, `losses` both as losses of the train step. `fastjax.data.preferences` packs the rows.
"""

from fastjax.training.preferences.losses import DPOLoss, IPOLoss, KTOLoss, ORPOLoss, SimPOLoss
from fastjax.training.preferences.scores import Scores, document_scores, reference_log_probs

#: The losses by their names in settings.
LOSSES = {"dpo": DPOLoss, "ipo": IPOLoss, "orpo": ORPOLoss, "kto": KTOLoss, "simpo": SimPOLoss}

__all__ = [
    "LOSSES",
    "DPOLoss",
    "IPOLoss",
    "KTOLoss",
    "ORPOLoss",
    "Scores",
    "SimPOLoss",
    "document_scores",
    "reference_log_probs",
]
