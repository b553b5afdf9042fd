"""The section `preferences`: learning from chosen and rejected answers."""

import dataclasses
from typing import Annotated, Any, Literal

from annotated_types import Interval

from fastjax.data.settings import Pairing
from fastjax.errors import ConfigError
from fastjax.options import checked
from fastjax.options.kinds import Count, NotNegative, Positive

#: The keys that each loss takes: arguments of its class in `training.preferences`.
TAKES: dict[str, tuple[str, ...]] = {
    "dpo": ("beta", "label_smoothing"),
    "ipo": ("beta",),
    "orpo": ("beta", "nll_tokens"),
    "kto": ("beta", "desirable_weight", "undesirable_weight"),
    "simpo": ("beta", "gamma", "label_smoothing"),
    "reward": ("center_rewards_coefficient",),
}
#: The keys of every loss.
LENGTHS = ("max_length", "max_prompt_length", "max_completion_length")
#: Those that compare with the model as it was before.
WITH_REFERENCE = ("dpo", "ipo", "kto")


@checked("preferences")
class PreferencesSection:
    """Learning from chosen and rejected answers; a key that the loss has no use for is refused."""

    loss: Literal["dpo", "ipo", "orpo", "kto", "simpo", "reward"] | None = None
    """dpo, ipo, orpo or simpo over rows with prompt, chosen and rejected; kto over rows with prompt, completion and
    label (or chosen and rejected); reward, of a reward model, over rows with prompt, chosen, rejected and perhaps
    margin; null: there are no preferences, and data.train is learnt as it is."""
    beta: Positive | None = None
    """of dpo, ipo and kto the strength of the tie to the reference, the model as training begins: without a fresh
    adapter, or with lora.adapter as it is there; of orpo the factor of the odds ratio's term; of simpo that of the
    log-probabilities; null: 0.1, of simpo 2."""
    label_smoothing: Annotated[float, Interval(ge=0, lt=0.5)] | None = None
    """of dpo and simpo, the probability that a pair's label is wrong; null: 0."""
    gamma: float | None = None
    """of simpo, the margin between the two answers' rewards; null: 1."""
    nll_tokens: Literal["answer", "all"] | None = None
    """of orpo, the tokens of the first term: answer, the mean over those of each chosen answer; or all, as TRL has it,
    the mean over all of a portion's chosen documents, prompts included; null: answer."""
    desirable_weight: Positive | None = None
    """of kto, factor of the losses of desirable answers; null: 1."""
    undesirable_weight: Positive | None = None
    """of kto, factor of the losses of undesirable answers; null: 1."""
    center_rewards_coefficient: NotNegative | None = None
    """of reward, factor of the square of the two scores' sum, which keeps their mean near 0; null: 0."""
    precompute_ref_log_probs: bool = False
    """of dpo, ipo and kto, compute the reference's log-probabilities of all rows once, before the first step, and keep
    them in data.cache_dir; a step then needs one pass less."""
    max_length: Annotated[int, Interval(ge=2)] | None = None
    """tokens of an answer with its prompt, at most; null: as many as a row (model.max_seq_length) has room for beside
    the other one of its pair, of kto beside the prompt with another one's completion."""
    max_prompt_length: Count | None = None
    """tokens of a prompt, at most, of which the end is kept; null: as many as there are."""
    max_completion_length: Count | None = None
    """tokens of an answer, at most, of which the beginning is kept; null: as many as there are."""

    def __post_init__(self) -> None:
        takes = () if self.loss is None else (*TAKES[self.loss], *LENGTHS)
        takes += ("precompute_ref_log_probs",) if self.needs_reference else ()
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name != "loss" and value != field.default and field.name not in takes:
                off = "false" if field.default is False else "null"
                given = "true" if value is True else value
                raise ConfigError(
                    f"preferences.{field.name}: expected {off} with preferences.loss: {self.loss or 'null'}, got "
                    f"{given}"
                )

    @property
    def pairing(self) -> Pairing | None:
        """The kind of the data's rows; None: no preferences."""
        if self.loss is None:
            return None
        return "unpaired" if self.loss == "kto" else "ranked" if self.loss == "reward" else "paired"

    @property
    def lengths(self) -> tuple[int | None, ...]:
        """The values of `LENGTHS`."""
        return tuple(getattr(self, name) for name in LENGTHS)

    @property
    def scores(self) -> bool:
        """Whether the model has a score in the place of logits."""
        return self.loss == "reward"

    @property
    def needs_reference(self) -> bool:
        """Whether the loss compares with the model as training begins."""
        return self.loss in WITH_REFERENCE

    @property
    def reference_in_step(self) -> bool:
        """Whether each step computes what it compares with."""
        return self.needs_reference and not self.precompute_ref_log_probs

    @property
    def options(self) -> dict[str, Any]:
        """The loss's arguments that are set."""
        names = () if self.loss is None else TAKES[self.loss]
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}
