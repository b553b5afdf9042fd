"""Runs that train reward models from Python; what their folders hold, and what is refused."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

import fastjax
from convert.errors import ConvertError
from convert.families import FAMILIES, family_for
from convert.families.mapping import read_config
from convert.gguf import export_gguf
from convert.merge import merge
from convert.quantize import quantize
from convert.weights import open_weights
from fastjax import (
    FastLanguageModel,
    OutputSection,
    PreferencesSection,
    RewardConfig,
    RewardTrainer,
    Trainer,
    TrainerSettings,
)
from fastjax.commands.settings import parse_train_config
from fastjax.errors import ConfigError, DataError
from fastjax.generation.text import answer
from fastjax.language_model.logits import logits
from fastjax.language_model.rewards import rewards, with_score_head
from fastjax.language_model.saving import save_pretrained, save_pretrained_gguf
from fastjax.runs.opening import open_model
from tests.fastjax.runs.test_preferences import pairs
from tests.support.runs import metrics

TINY = Path(fastjax.__file__).parent / "assets" / "tiny-llama"
SHARED = {"max_steps": 3, "per_device_train_batch_size": 2, "eval_steps": 2, "logging_steps": 1}


@pytest.fixture(scope="module")
def base():
    return FastLanguageModel.from_pretrained(TINY, max_seq_length=256, load_in_4bit=True)[0].value


@pytest.fixture(scope="module")
def model(base):
    return FastLanguageModel.get_peft_model(with_score_head(base), r=4).value


@pytest.fixture(scope="module")
def folders(model, base, tmp_path_factory):
    """Adapters on a score and on logits, and a reward model."""
    folder = tmp_path_factory.mktemp("folders")
    save_pretrained(model, folder / "score")
    FastLanguageModel.get_peft_model(base, r=4, target_modules=["q_proj"]).save_pretrained(folder / "logits")
    merge(TINY, folder / "score", folder / "model")
    return folder


@pytest.mark.exhaustive(
    by="tests/fastjax/training/preferences/test_reward.py::test_scores_losses_and_packing, "
    "tests/fastjax/parity/test_preferences.py::test_ten_steps"
)
def test_a_run_from_python(model, tmp_path):
    optimizer = {"learning_rate": 3e-3, "warmup_steps": 1}
    args = RewardConfig(output_dir=str(tmp_path), max_length=None, eval_strategy="steps", **optimizer, **SHARED)
    trainer = RewardTrainer(
        model, args=args, train_dataset=pairs(12, margins=True), eval_dataset=pairs(4, 12, margins=True)
    )
    trainer.train()
    found = metrics(tmp_path)
    assert [row["step"] for row in found] == [1, 2, 2, 3, 3]
    assert {"eval_loss", "eval_rewards/accuracies"} <= set(found[-1]) and "eval_perplexity" not in found[-1]
    assert {"loss", "rewards/margins", "rewards/mean", "grad_norm"} <= set(found[0])
    written = load_file(tmp_path / "adapter" / "adapter_model.safetensors")["base_model.model.score.weight"]
    assert np.abs(written - np.asarray(model.trainable["score"]["weight"])).max() > 1e-3


def test_rewards_do_not_depend_on_their_neighbours(model):
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
    examples = [{"prompt": "Ben has", "completion": " 9 pens." * n} for n in (1, 5)] + [chat, "Ben has 9 pens."]
    together = rewards(model, examples, batch_size=2)
    assert together.dtype == np.float32 and np.ptp(together) > 0.05
    assert together[0] == pytest.approx(together[3], abs=1e-5)  # a text is all of it
    np.testing.assert_allclose(rewards(model, examples[::-1], batch_size=2)[::-1], together, atol=1e-5)
    assert rewards(model, []).shape == (0,)
    for wrong, message in (
        ([chat[:1]], "example 0: expected one that ends with an answer"),
        (["a " * 999], "example 0: expected at most 256 tokens, got "),
        ([3], "example 0: expected an object"),
    ):
        with pytest.raises(DataError, match=message):
            rewards(model, wrong)


def test_models_without_and_with_a_score(model, base, tmp_path):
    settings = TrainerSettings(OutputSection(str(tmp_path)), preferences=PreferencesSection("reward"))
    get_peft_model = FastLanguageModel.get_peft_model
    adapted = get_peft_model(base, r=4, target_modules=["q_proj"])
    orpo = TrainerSettings(OutputSection(str(tmp_path)), preferences=PreferencesSection("orpo"))
    scored = with_score_head(base)
    refused = {
        "model: expected a reward model with preferences.loss: reward": lambda: Trainer(
            adapted, None, [{}], None, settings
        ),
        "model: expected one with logits with preferences.loss: orpo": lambda: Trainer(model, None, [{}], None, orpo),
        "RewardConfig: pad_token: expected none, .* a tokenizer": lambda: RewardConfig(others={"pad_token": "x"}),
        "with_score_head: expected a model without an adapter": adapted.with_score_head,
        "rewards: expected a reward model": lambda: rewards(base, ["a"]),
        "logits: expected a model with logits, got a reward model": lambda: logits(model, [[1]]),
        "generate: expected a model with logits": lambda: answer(model, ["a"]),
        "target_modules: .*'lm_head'.*which none has": lambda: get_peft_model(scored, target_modules=["lm_head"]),
        "modules_to_save: expected some of .*'score'": lambda: get_peft_model(scored, modules_to_save=["lm_head"]),
    }
    for message, attempt in refused.items():
        with pytest.raises(ConfigError, match=message):
            attempt()
    assert with_score_head(model) is model and model.lora.modules_to_save == ["score"]
    made = RewardTrainer(model, train_dataset=[{}], max_length=64)._trainer.config
    assert made.preferences == PreferencesSection("reward", max_length=64) and made.data.too_long == "drop"
    assert (made.optimizer.learning_rate, made.training.per_device_train_batch_size) == (1e-4, 8)


def test_folders(folders, base, tmp_path):
    """What they hold, what is read back, what is refused."""
    weights = open_weights(folders / "model")
    assert weights.checkpoint.config["architectures"] == ["LlamaForSequenceClassification"]
    assert weights.specs["score.weight"].shape == (1, 192) and "lm_head.weight" not in weights.checkpoint.tensors
    config = read_config(weights.checkpoint.config)
    assert config.scored and not config.tie_word_embeddings
    read, _ = FastLanguageModel.from_pretrained(folders / "model", load_in_4bit=False)
    assert read.frozen["score"]["weight"].dtype == np.float32 and "lm_head" not in read.frozen
    again = FastLanguageModel.load_adapter(read, folders / "score")
    assert np.abs(again.trainable["score"]["weight"] - read.frozen["score"]["weight"]).max() < 1e-3
    arrays = load_file(folders / "score" / "adapter_model.safetensors")
    (tmp_path / "headless").mkdir()
    without = {name: array for name, array in arrays.items() if "score" not in name}
    save_file(without, tmp_path / "headless" / "adapter_model.safetensors")
    settings = json.loads((folders / "score" / "adapter_config.json").read_text())
    (tmp_path / "headless" / "adapter_config.json").write_text(json.dumps(settings | {"modules_to_save": None}))
    two = {**weights.checkpoint.config, "id2label": {"0": "a", "1": "b"}}
    refused = {
        "dtype: expected one of .* for a model with a score": lambda: merge(
            TINY, folders / "score", tmp_path / "a", dtype="nf4"
        ),
        "task_type: expected SEQ_CLS, as the base has a score, got 'CAUSAL_LM'": lambda: merge(
            folders / "model", folders / "logits", tmp_path / "b"
        ),
        "modules_to_save: expected score, as the base has none, got None": lambda: merge(
            TINY, tmp_path / "headless", tmp_path / "c"
        ),
        "expected a model with logits, got one with a score": lambda: quantize(folders / "model", tmp_path / "d"),
        "id2label: expected one label, as a reward model has": lambda: read_config(two),
        "model_type: expected one with a class for scores .* got granite": lambda: family_for(
            {"model_type": "granite"}
        ).scored({}),
    }
    for message, attempt in refused.items():
        with pytest.raises(ConvertError, match=message):
            attempt()
    assert FastLanguageModel.load_adapter(base, folders / "score").config.scored
    with pytest.raises(ConfigError, match="task_type: expected SEQ_CLS over a model with a score"):
        FastLanguageModel.load_adapter(read, folders / "logits")


def test_a_gguf_file_is_refused(folders, model, tmp_path):
    pytest.importorskip("gguf")
    with pytest.raises(ConvertError, match="expected a model with logits, got one with a score"):
        export_gguf(folders / "model", tmp_path / "a.gguf")
    with pytest.raises(ConfigError, match="save_pretrained_gguf: expected a model with logits"):
        save_pretrained_gguf(model, tmp_path / "b")


def test_what_a_run_refuses_before_weights_are_read(folders):
    def opened(model, *options):
        named = ["--model.model_name", str(model), "--model.max_seq_length", "64", "--data.train", "a", *options]
        return open_model(parse_train_config([*named, "--output.output_dir", "o"]))

    reward = ("--preferences.loss", "reward")
    with pytest.raises(ConfigError, match="model.model_name: expected a model with logits with preferences.loss: null"):
        opened(folders / "model")
    with pytest.raises(ConfigError, match="task_type: expected SEQ_CLS over a model with a score"):
        opened(TINY, *reward, "--lora.adapter", str(folders / "logits"))
    opened(TINY, *reward, "--lora.adapter", str(folders / "score"))
    opened(folders / "model", *reward)


def test_families_have_transformers_class_for_scores_or_none():
    theirs = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
    for name, family in FAMILIES.items():
        if family.classifier is not None:
            assert family.scored({})["architectures"][0] in theirs.values(), name
        elif family.section is None:  # transformers may have one of a text model beside another
            assert name not in theirs
