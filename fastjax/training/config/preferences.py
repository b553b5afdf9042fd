"""The section `preferences`: learning from chosen and rejected answers."""

import dataclasses
from typing import Any, Literal

from fastjax.data.settings import Pairing
from fastjax.errors import ConfigError
from fastjax.training.config.checks import check_section, expect

#: The keys that each loss takes: arguments of its class in `training.preferences`.
TAKES: dict[str, tuple[str, ...]] = {
    "dpo": ("beta", "label_smoothing"),
    "ipo": ("beta",),
    "orpo": ("beta", "nll_tokens"),
    "kto": ("beta", "desirable_weight", "undesirable_weight"),
    "simpo": ("beta", "gamma", "label_smoothing"),
    "reward": ("center_rewards_coefficient",),
}
#: Those that compare with the model as it was before.
WITH_REFERENCE = ("dpo", "ipo", "kto")


@dataclasses.dataclass(frozen=True)
class PreferencesSection:
    """Learning from chosen and rejected answers; a key that the loss has no use for is refused.

    Attributes:
        loss: dpo, ipo, orpo or simpo over rows with prompt, chosen and rejected; kto over rows with prompt, completion
            and label (or chosen and rejected); reward, of a reward model, over rows with prompt, chosen, rejected and
            perhaps margin; null: there are no preferences, and data.train is learnt as it is.
        beta: of dpo, ipo and kto the strength of the tie to the reference, the model as training begins: without a
            fresh adapter, or with lora.adapter as it is there; of orpo the factor of the odds ratio's term; of simpo
            that of the log-probabilities; null: 0.1, of simpo 2.
        label_smoothing: of dpo and simpo, the probability that a pair's label is wrong; null: 0.
        gamma: of simpo, the margin between the two answers' rewards; null: 1.
        nll_tokens: of orpo, the tokens of the first term: answer, the mean over those of each chosen answer; or all, as
            TRL has it, the mean over all of a portion's chosen documents, prompts included; null: answer.
        desirable_weight: of kto, factor of the losses of desirable answers; null: 1.
        undesirable_weight: likewise of undesirable ones; null: 1.
        center_rewards_coefficient: of reward, factor of the square of the two scores' sum, which keeps their mean near
            0; null: 0.
        precompute_ref_log_probs: of dpo, ipo and kto, compute the reference's log-probabilities of all rows once,
            before the first step, and keep them in data.cache_dir; a step then needs one pass less.
        max_length: tokens of an answer with its prompt, at most; null: as many as a row (model.max_seq_length) has room
            for beside the other one of its pair, of kto beside the prompt with another one's completion.
    """

    loss: Literal["dpo", "ipo", "orpo", "kto", "simpo", "reward"] | None = None
    beta: float | None = None
    label_smoothing: float | None = None
    gamma: float | None = None
    nll_tokens: Literal["answer", "all"] | None = None
    desirable_weight: float | None = None
    undesirable_weight: float | None = None
    center_rewards_coefficient: float | None = None
    precompute_ref_log_probs: bool = False
    max_length: int | None = None

    def __post_init__(self) -> None:
        check_section("preferences", self)
        takes = () if self.loss is None else (*TAKES[self.loss], "max_length")
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
        for name in ("beta", "desirable_weight", "undesirable_weight"):
            value = getattr(self, name)
            expect(f"preferences.{name}", value, value is None or value > 0, "greater than 0")
        centring = self.center_rewards_coefficient
        expect("preferences.center_rewards_coefficient", centring, centring is None or centring >= 0, "of 0 or more")
        smoothing = self.label_smoothing
        expect("preferences.label_smoothing", smoothing, smoothing is None or 0 <= smoothing < 0.5, "in [0, 0.5)")
        length = self.max_length
        expect("preferences.max_length", length, length is None or length >= 2, "at least 2")

    @property
    def pairing(self) -> Pairing | None:
        """What the rows of data hold; None: no preferences."""
        if self.loss is None:
            return None
        return "unpaired" if self.loss == "kto" else "ranked" if self.loss == "reward" else "paired"

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


def check_preferences(preferences: PreferencesSection, model: Any, data: Any, training: Any) -> None:
    """Refuse settings of other sections that no run with preferences can serve.

    Args:
        preferences: the section.
        model: the section `model`.
        data: likewise.
        training: likewise.

    Raises:
        ConfigError: one of them, by name.
    """
    loss = preferences.loss
    if loss is None:
        return
    beside = f"with preferences.loss: {loss}"
    if data.loss_on not in ("responses", "last_response"):
        raise ConfigError(f"data.loss_on: expected responses or last_response {beside}, got {data.loss_on}")
    if training.group_by_length:
        raise ConfigError(f"training.group_by_length: expected false {beside}, got true")
    if data.too_long == "split":
        raise ConfigError(f"data.too_long: expected truncate or drop {beside}, got split")
    if any(source.streaming for source in data.sources("train")):
        raise ConfigError(f"data.train: streaming: expected false {beside}, got true; its data are read whole")
    for name in ("label_smoothing_factor", "z_loss_coef", "router_aux_loss_coef", "router_z_loss_coef"):
        if value := getattr(training, name):
            raise ConfigError(f"training.{name}: expected 0 {beside}, got {value}")
    for name in ("neftune_noise_alpha", "qat"):
        if (value := getattr(training, name)) is not None:
            raise ConfigError(f"training.{name}: expected null {beside}, got {value}")
    if preferences.needs_reference and model.full_finetuning:
        raise ConfigError(
            f"model.full_finetuning: expected false {beside}, whose reference is the model as training begins, got "
            "true; orpo and simpo need none"
        )
