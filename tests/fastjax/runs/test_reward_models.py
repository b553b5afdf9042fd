"""Runs that train reward models: of the command line on two devices, from Python and resumed; what is refused."""

import json
from pathlib import Path

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file, save_file

import fastjax
from convert.errors import ConvertError
from convert.families import FAMILIES, family_for
from convert.families.mapping import config_to_hf, read_config
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
from fastjax.cli import main
from fastjax.commands.settings import parse_train_config
from fastjax.errors import ConfigError, DataError
from fastjax.generation.text import answer
from fastjax.language_model.logits import logits
from fastjax.language_model.rewards import rewards, with_score_head
from fastjax.language_model.saving import save_pretrained, save_pretrained_gguf
from fastjax.runs.opening import open_model, open_shapes
from fastjax.runs.steps import RunShapes, StepRecipe
from tests.support.runs import metrics

TINY = Path(fastjax.__file__).parent / "assets" / "tiny-llama"
ANSWERS = TINY.parent / "tiny-chat" / "train.jsonl"
SHARED = {"max_steps": 3, "per_device_train_batch_size": 2, "eval_steps": 2, "logging_steps": 1}


def ranked(count, first=0):
    """The answer to a question, and that to another one; every other pair with a margin."""
    lines = ANSWERS.read_text(encoding="utf-8").splitlines()[first : first + count]
    chats = [json.loads(line)["messages"] for line in lines]
    found = [
        {"prompt": chat[:-1], "chosen": chat[-1:], "rejected": other[-1:]}
        for chat, other in zip(chats, chats[1:] + chats[:1], strict=True)
    ]
    return [{**row, "margin": 0.5} if number % 2 else row for number, row in enumerate(found)]


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


def test_a_run_from_python(model, tmp_path):
    optimizer = {"learning_rate": 3e-3, "warmup_steps": 1}
    args = RewardConfig(output_dir=str(tmp_path), max_length=None, eval_strategy="steps", **optimizer, **SHARED)
    trainer = RewardTrainer(model, args=args, train_dataset=ranked(12), eval_dataset=ranked(4, first=12))
    trainer.train()
    found = metrics(tmp_path)
    assert [row["step"] for row in found] == [1, 2, 2, 3, 3]
    assert {"eval_loss", "eval_rewards/accuracies"} <= set(found[-1]) and "eval_perplexity" not in found[-1]
    assert {"loss", "rewards/margins", "rewards/mean", "grad_norm"} <= set(found[0])
    written = load_file(tmp_path / "adapter" / "adapter_model.safetensors")["base_model.model.score.weight"]
    assert np.abs(written - np.asarray(model.trainable["score"]["weight"])).max() > 1e-3


@pytest.mark.exhaustive(by="test_a_run_from_python")
def test_a_run_of_the_command_line_and_a_resumed_one_from_python(model, tmp_path, capsys):
    """Float32, whose sums over two devices have another order."""
    rows, held_out = ranked(12), ranked(4, first=12)
    for name, found in (("train", rows), ("eval", held_out)):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, found)))
    content = {
        "model": {"model_name": str(TINY), "max_seq_length": 256, "use_gradient_checkpointing": "full"},
        "data": {"train": str(tmp_path / "train.jsonl"), "eval": str(tmp_path / "eval.jsonl"), "cache_dir": None},
        "lora": {"r": 4},
        "preferences": {"loss": "reward", "center_rewards_coefficient": 0.01},
        "training": {**SHARED, "per_device_train_batch_size": 1, "seed": 42},
        "optimizer": {"learning_rate": 3e-3, "warmup_steps": 1},
        "parallel": {"data": 1, "fsdp": 2},
        "output": {"output_dir": str(tmp_path / "command"), "save_steps": 2},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(content))
    command = ["train", "--config", str(tmp_path / "run.yaml")]
    assert main(["preview", str(tmp_path / "run.yaml")]) == 0 and main(command) == 0
    said = capsys.readouterr().out
    assert "document 1 (chosen): " in said and "step 3/3: loss " in said and "print(model.rewards([said]))" in said
    assert main([*command, "--resume"]) == 0 and "nothing is left to do" in capsys.readouterr().out
    config = parse_train_config(["--config", str(tmp_path / "run.yaml")])
    shapes = RunShapes(StepRecipe(config, 3, documents_per_row=6), open_shapes(config))
    assert shapes.batch.extra["margins"].shape == shapes.batch.extra["roles"].shape == (1, 1, 6)
    shapes.step("full")[0].trace(*shapes.step("full")[1])

    class Stopped(Exception):
        pass

    def stop(event):
        if event.name == "step" and event.step == 3:
            raise Stopped

    args = RewardConfig(
        output_dir=str(tmp_path / "python"),
        max_length=None,
        learning_rate=3e-3,
        warmup_steps=1,
        center_rewards_coefficient=0.01,
        packing=True,
        eval_strategy="steps",
        save_steps=2,
        **SHARED,
    )
    data = {"args": args, "train_dataset": rows, "eval_dataset": held_out}
    with pytest.raises(Stopped):
        RewardTrainer(model, callbacks=[stop], **data).train()
    trainer = RewardTrainer(model, **data)
    trainer.train(resume_from_checkpoint=True)
    ours, theirs = (metrics(tmp_path / name) for name in ("python", "command"))
    assert [row["step"] for row in ours] == [row["step"] for row in theirs] == [1, 2, 2, 3, 3]
    assert {"eval_loss", "eval_rewards/accuracies"} <= set(ours[-1]) and "eval_perplexity" not in ours[-1]
    for one, two in zip(ours, theirs, strict=True):
        names = [name for name in one if name.partition("/")[0].endswith(("loss", "rewards", "grad_norm"))]
        assert len(names) > 5 and not any(name.startswith("logps") for name in names)
        np.testing.assert_allclose([one[name] for name in names], [two[name] for name in names], rtol=1e-3, atol=1e-4)
    written = load_file(tmp_path / "command" / "adapter" / "adapter_model.safetensors")["base_model.model.score.weight"]
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
    assert config.scored and not config.tie_word_embeddings and read_config(config_to_hf(config)).scored
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


def test_families_have_a_class_for_scores_or_none():
    having = {name: family for name, family in FAMILIES.items() if family.classifier is not None}
    named = {name: family.scored({})["architectures"][0] for name, family in having.items()}
    assert named["qwen3"] == "Qwen3ForSequenceClassification" and named["gemma3_text"].startswith("Gemma3Text")
    assert set(FAMILIES) - set(named) == {"granite", "cohere", "olmoe", "glm4_moe", "gemma3"}
