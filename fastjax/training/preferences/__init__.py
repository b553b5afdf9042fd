"""Losses of preferences: DPO, IPO, KTO, ORPO, SimPO and that of a reward model, over packed documents.

`objectives` are the papers' equations on log-probabilities of answers, `scores` these log-probabilities under the model
and under its reference, `losses` both as losses of the train step. `fastjax.data.preferences` packs the rows.
"""

from fastjax.training.preferences.losses import DPOLoss, IPOLoss, KTOLoss, ORPOLoss, RewardLoss, SimPOLoss
from fastjax.training.preferences.scores import Scores, document_rewards, document_scores, reference_log_probs

#: The losses by their names in settings.
LOSSES = {
    "dpo": DPOLoss,
    "ipo": IPOLoss,
    "orpo": ORPOLoss,
    "kto": KTOLoss,
    "simpo": SimPOLoss,
    "reward": RewardLoss,
}

__all__ = [
    "LOSSES",
    "DPOLoss",
    "IPOLoss",
    "KTOLoss",
    "ORPOLoss",
    "RewardLoss",
    "Scores",
    "SimPOLoss",
    "document_rewards",
    "document_scores",
    "reference_log_probs",
]
