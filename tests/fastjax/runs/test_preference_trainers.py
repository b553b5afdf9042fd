"""TRL's names of trainers of preferences: what their settings become, what is refused with what to use instead."""

from pathlib import Path

import pytest

import fastjax
from fastjax import FastLanguageModel, PreferencesSection
from fastjax.errors import ConfigError

ROWS = [{"prompt": "a", "chosen": "b", "rejected": "c"}]


@pytest.fixture(scope="module")
def base():
    folder = Path(fastjax.__file__).parent / "assets" / "tiny-llama"
    return FastLanguageModel.from_pretrained(folder, max_seq_length=128)[0]


@pytest.fixture(scope="module")
def model(base):
    return FastLanguageModel.get_peft_model(base, r=4, target_modules=["q_proj"])


@pytest.mark.parametrize(
    "kind, given, section",
    [
        (
            "DPO",
            {"max_length": 64, "max_prompt_length": 9, "precompute_ref_log_probs": True},
            PreferencesSection("dpo", 0.1, precompute_ref_log_probs=True, max_length=64, max_prompt_length=9),
        ),
        ("DPO", {"loss_type": ["ipo"], "beta": 0.2, "max_length": None}, PreferencesSection("ipo", 0.2)),
        ("ORPO", {"beta": 0.3}, PreferencesSection("orpo", 0.3, nll_tokens="all", max_length=1024)),
        (
            "KTO",
            {"undesirable_weight": 2.0},
            PreferencesSection("kto", 0.1, desirable_weight=1.0, undesirable_weight=2.0, max_length=1024),
        ),
        (
            "CPO",
            {"loss_type": "simpo", "cpo_alpha": 0.0},
            PreferencesSection("simpo", 0.1, 0.0, 0.5, max_length=1024),
        ),
    ],
)
def test_settings(model, kind, given, section):
    """In the config, or given to the trainer itself as older versions have it."""
    config, trainer = (getattr(fastjax, f"{kind}{name}") for name in ("Config", "Trainer"))
    made = trainer(model, args=config(**given), train_dataset=ROWS, dataset_num_proc=2)._trainer.config
    assert made.preferences == section and made.data.packing is False
    assert (made.optimizer.learning_rate, made.training.per_device_train_batch_size) == (1e-6, 8)
    assert trainer(model, train_dataset=ROWS, **given)._trainer.config == made


@pytest.mark.parametrize(
    "kind, given, message",
    [
        ("DPO", {"loss_type": "hinge"}, "DPOConfig: loss_type: expected one of sigmoid, ipo, got 'hinge'"),
        (
            "DPO",
            {"loss_type": ["sigmoid", "sft"]},
            r"loss_type: expected one of sigmoid, ipo, got \['sigmoid', 'sft'\]",
        ),
        ("DPO", {"label_smoothing": 0.1}, "label_smoothing: expected none, got 0.1; use .* which is cDPO"),
        ("DPO", {"ref_model": object()}, "DPOConfig: ref_model: expected none, .* use the model as training begins"),
        ("DPO", {"peft_config": object()}, "peft_config: expected none, .* use FastLanguageModel.get_peft_model"),
        ("DPO", {"truncation_mode": "keep_end"}, "truncation_mode: expected none or 'keep_start', got 'keep_end'"),
        ("ORPO", {"bogus": 1}, "ORPOConfig: bogus: expected a name of ORPOConfig, got an unknown one"),
        ("KTO", {"loss_type": "apo_zero_unpaired"}, "KTOConfig: loss_type: expected kto, got 'apo_zero_unpaired'"),
        ("ORPO", {"precompute_ref_log_probs": True}, "precompute_ref_log_probs: expected none, .* a loss with a ref"),
        ("CPO", {}, "CPOConfig: loss_type: expected simpo, got 'sigmoid'"),
        ("CPO", {"loss_type": "simpo"}, "CPOConfig: cpo_alpha: expected 0, got 1.0"),
        ("KTO", {"args": fastjax.DPOConfig()}, "KTOTrainer: args: expected a KTOConfig, .* got a DPOConfig"),
    ],
)
def test_names_that_are_not_served(model, kind, given, message):
    with pytest.raises(ConfigError, match=message):
        getattr(fastjax, f"{kind}Trainer")(model, train_dataset=ROWS, **given)


def test_dropout_is_said(base):
    dropped = FastLanguageModel.get_peft_model(base, r=4, target_modules=["q_proj"], lora_dropout=0.1)
    with pytest.raises(ConfigError, match="DPOConfig: disable_dropout: expected false over .* lora_dropout=0.1"):
        fastjax.DPOTrainer(dropped, train_dataset=ROWS)
    fastjax.DPOTrainer(dropped, train_dataset=ROWS, disable_dropout=False)
