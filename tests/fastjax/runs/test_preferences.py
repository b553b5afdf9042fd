"""Runs over preferences: of the command line on two devices, from Python on one and resumed; what is refused."""

import dataclasses
import json
import math
from pathlib import Path

import jax
import numpy as np
import pytest
import yaml
from rich.console import Console

import fastjax
from fastjax import (
    FastLanguageModel,
    OptimizerConfig,
    OutputSection,
    PreferencesSection,
    Trainer,
    TrainerSettings,
    TrainingSection,
)
from fastjax.cli import main
from fastjax.commands.settings import parse_train_config
from fastjax.errors import ConfigError
from fastjax.language_model.rewards import with_score_head
from fastjax.runs.opening import open_shapes
from fastjax.runs.steps import RunShapes, StepRecipe
from fastjax.training.config import DataSection, LoraSection, ModelSection, TrainConfig
from fastjax.training.config.preferences import TAKES, WITH_REFERENCE
from fastjax.training.preferences import LOSSES
from tests.support.runs import metrics

ASSETS = Path(fastjax.__file__).parent / "assets"
OPTIMIZER = {"learning_rate": 3e-3, "warmup_steps": 1}


def pairs(count, first=0, margins=False):
    """The answer to a question, and that to another one; every other pair with a margin."""
    lines = (ASSETS / "tiny-chat" / "train.jsonl").read_text(encoding="utf-8").splitlines()[first : first + count]
    chats = [json.loads(line)["messages"] for line in lines]
    found = [
        {"prompt": chat[:-1], "chosen": chat[-1:], "rejected": other[-1:]}
        for chat, other in zip(chats, chats[1:] + chats[:1], strict=True)
    ]
    return [row | ({"margin": 0.5} if margins and number % 2 else {}) for number, row in enumerate(found)]


@pytest.fixture(scope="module")
def base():
    return FastLanguageModel.from_pretrained(ASSETS / "tiny-llama", max_seq_length=256, load_in_4bit=True)[0].value


@pytest.fixture(scope="module")
def model(base):
    return FastLanguageModel.get_peft_model(base, r=4).value


@pytest.mark.exhaustive(
    by="tests/fastjax/cli/test_import_preferences.py::test_an_imported_run_over_preferences_trains, "
    "tests/fastjax/parity/test_preferences.py::test_ten_steps"
)
@pytest.mark.parametrize(
    ("section", "axes", "shown", "atol"),
    [
        ({"loss": "dpo", "beta": 0.2}, {"data": 2, "fsdp": 1}, "step 1/4: loss 0.6931  margin 0  accuracy 0%", 1e-5),
        (
            {"loss": "reward", "center_rewards_coefficient": 0.01},
            {"data": 1, "fsdp": 2},
            "print(model.rewards([said]))",
            1e-4,
        ),
    ],
    ids=["dpo", "reward"],
)
def test_a_run_of_the_command_line_and_a_resumed_one_from_python(base, tmp_path, capsys, section, axes, shown, atol):
    """Float32, whose sums over two devices have another order."""
    rewards = section["loss"] == "reward"
    rows, held_out = pairs(12, margins=rewards), pairs(4, first=12, margins=rewards)
    for name, found in (("train", rows), ("eval", held_out)):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, found)))
    content = {
        "model": {
            "model_name": str(ASSETS / "tiny-llama"),
            "max_seq_length": 256,
            "use_gradient_checkpointing": "full",
        },
        "data": {"train": str(tmp_path / "train.jsonl"), "eval": str(tmp_path / "eval.jsonl"), "cache_dir": None},
        "lora": {"r": 4},
        "preferences": section,
        "training": {"per_device_train_batch_size": 1, "max_steps": 4, "eval_steps": 2, "logging_steps": 1},
        "optimizer": OPTIMIZER,
        "parallel": axes,
        "output": {"output_dir": str(tmp_path / "command"), "save_steps": 2},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(content))
    command = ["train", "--config", str(tmp_path / "run.yaml")]
    assert main(["preview", *command[1:]]) == 0 and main(command) == 0
    said = capsys.readouterr().out
    assert "document 1 (chosen): " in said and "document 2 (rejected): " in said and shown in said
    assert main([*command, "--resume"]) == 0 and "nothing is left to do" in capsys.readouterr().out
    config = parse_train_config(command[1:])
    shapes = RunShapes(StepRecipe(config, 3, documents_per_row=6), open_shapes(config))
    assert {array.shape for array in shapes.batch.extra.values()} == {(1, 1, 6)}
    shapes.step("full")[0].trace(*shapes.step("full")[1])

    class Stopped(Exception):
        pass

    def stop(event):
        if event.name == "step" and event.step == 3:
            raise Stopped

    settings = TrainerSettings(
        OutputSection(str(tmp_path / "python"), save_steps=2),
        TrainingSection(per_device_train_batch_size=2, max_steps=4, eval_steps=2),
        OptimizerConfig(**OPTIMIZER),
        PreferencesSection(**section),
    )
    data = {"train_dataset": rows, "eval_dataset": held_out, "settings": settings, "console": Console(quiet=True)}
    model = FastLanguageModel.get_peft_model(with_score_head(base) if rewards else base, r=4).value
    with pytest.raises(Stopped):
        Trainer(model, callbacks=[stop], **data).train()
    if not rewards:
        other = dataclasses.replace(settings, preferences=PreferencesSection("ipo"))
        with pytest.raises(ConfigError, match="preferences.loss: expected 'dpo', got 'ipo'"):
            Trainer(model, **data | {"settings": other}).train(resume=True)
    Trainer(model, **data).train(resume=True)
    ours, theirs = metrics(tmp_path / "python"), metrics(tmp_path / "command")
    assert [row["step"] for row in ours] == [row["step"] for row in theirs] == [1, 2, 2, 3, 4, 4]
    assert {"eval_loss", "eval_rewards/accuracies"} <= set(ours[-1]) and "eval_perplexity" not in ours[-1]
    assert rewards or ours[-2]["loss"] < 0.68 and ours[-2]["rewards/margins"] > 0.05
    for one, two in zip(ours, theirs, strict=True):
        names = [name for name in one if name.partition("/")[0].endswith(("loss", "rewards", "logps", "grad_norm"))]
        assert len(names) > 5 and rewards != any("logps" in name for name in names)
        np.testing.assert_allclose([one[name] for name in names], [two[name] for name in names], rtol=1e-3, atol=atol)


def test_the_reference_is_what_training_begins_with(model):
    """The base for a fresh adapter; a copy for one that has been trained, or that has a table beside it."""
    trained = model.replace(trainable=jax.tree.map(lambda leaf: leaf + 1, model.trainable))
    options = {"train_dataset": pairs(2), "console": Console(quiet=True)}
    dpo, orpo = (TrainerSettings(OutputSection("o"), preferences=PreferencesSection(loss)) for loss in ("dpo", "orpo"))
    assert Trainer(model, settings=dpo, **options)._start is None
    assert Trainer(trained, settings=orpo, **options)._start is None
    assert Trainer(trained, settings=dpo, **options)._start is trained.trainable
    made = {"model": ModelSection("m"), "data": DataSection("d"), "output": OutputSection("o")}
    for lora, loss, held in (
        ({}, "dpo", False),
        ({"adapter": "a"}, "simpo", False),
        ({"adapter": "a"}, "kto", True),
        ({"modules_to_save": ["lm_head"]}, "ipo", True),
        ({"init_lora_weights": False}, "dpo", True),
    ):
        assert TrainConfig(**made, lora=LoraSection(**lora), preferences=PreferencesSection(loss)).holds_start == held


@pytest.mark.exhaustive(by="test_the_reference_is_what_training_begins_with")
def test_a_trained_adapter_goes_on_beside_its_start(model, tmp_path):
    """Interrupted, it goes on with the same reference; another trainer needs the adapter as it was."""
    trained = model.replace(trainable=jax.tree.map(lambda leaf: leaf * 0.9 + 0.01, model.trainable))
    settings = TrainerSettings(
        OutputSection(str(tmp_path / "run"), save_steps=1),
        TrainingSection(per_device_train_batch_size=2, max_steps=4),
        OptimizerConfig(**OPTIMIZER),
        PreferencesSection("dpo", beta=0.2),
        packing=False,
    )
    data = {"train_dataset": pairs(8), "console": Console(quiet=True)}
    whole = dataclasses.replace(settings, output=OutputSection(str(tmp_path / "whole")))
    expected = Trainer(trained, settings=whole, **data).train()
    assert "start" not in expected.model.frozen

    def stop(event):
        if event.name == "saved" and event.step == 2:
            raise KeyboardInterrupt

    trainer = Trainer(trained, settings=settings, callbacks=[stop], **data)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    with pytest.raises(ConfigError, match="model: expected the adapter that the run began with, its reference, of"):
        Trainer(expected.model, settings=settings, **data).train(resume=True)
    Trainer(trained, settings=settings, **data).train(resume=True)
    ours, theirs = (metrics(tmp_path / name) for name in ("run", "whole"))
    assert theirs[0]["loss"] == pytest.approx(math.log(2)) and theirs[-1]["rewards/margins"] != 0
    assert [row["loss"] for row in ours] == pytest.approx([row["loss"] for row in theirs], rel=1e-6)


def test_the_keys_are_the_losses_own():
    for name, loss in LOSSES.items():
        assert {field.name for field in dataclasses.fields(loss)} - {"chunk_size"} == set(TAKES[name])
    assert set(TAKES) == set(LOSSES) and set(WITH_REFERENCE) < set(LOSSES)


@pytest.mark.parametrize(
    "section, message",
    [
        ({"beta": 0.1}, "preferences.beta: expected null with preferences.loss: null, got 0.1"),
        ({"loss": "ipo", "gamma": 0.5}, "preferences.gamma: expected null with preferences.loss: ipo, got 0.5"),
        ({"loss": "dpo", "beta": 0.0}, "preferences.beta: expected a number greater than 0 or null, got 0.0"),
        ({"loss": "bco"}, "preferences.loss: expected one of dpo, ipo, orpo, kto, simpo, reward or null, got 'bco'"),
        ({"loss": "orpo", "precompute_ref_log_probs": True}, "expected false with preferences.loss: orpo, got true"),
        (
            {"loss": "reward", "precompute_ref_log_probs": True},
            "expected false with preferences.loss: reward, got true",
        ),
        ({"loss": "reward", "beta": 0.1}, "preferences.beta: expected null with preferences.loss: reward, got 0.1"),
        (
            {"loss": "reward", "center_rewards_coefficient": -0.1},
            "coefficient: expected a number of at least 0 or null, got -0.1",
        ),
        ({"loss": "simpo", "label_smoothing": 0.5}, r"preferences.label_smoothing: expected a number in \[0, 0.5\)"),
    ],
)
def test_wrong_values(section, message):
    with pytest.raises(ConfigError, match=message):
        PreferencesSection(**section)


@pytest.mark.parametrize(
    "loss, others, message",
    [
        ("orpo", {"data": {"loss_on": "all"}}, "data.loss_on: expected responses or last_response with .* got all"),
        ("orpo", {"data": {"too_long": "split"}}, "data.too_long: expected truncate or drop with .* got split"),
        ("orpo", {"training": {"z_loss_coef": 0.1}}, "training.z_loss_coef: expected 0 with preferences.loss: orpo"),
        ("orpo", {"training": {"qat": "nf4"}}, "training.qat: expected null with preferences.loss: orpo, got nf4"),
        (
            "kto",
            {"model": {"full_finetuning": True, "load_in_4bit": False}},
            "model.full_finetuning: expected false with preferences.loss: kto, whose reference is the model as",
        ),
        ("reward", {"training": {"qat": "nf4"}}, "training.qat: expected null with preferences.loss: reward, got nf4"),
        ("reward", {"model": {"full_finetuning": True, "load_in_4bit": False}}, None),
        ("orpo", {"model": {"full_finetuning": True, "load_in_4bit": False}}, None),
    ],
)
def test_settings_that_no_run_can_serve(loss, others, message):
    made = {"model": ModelSection("m"), "data": DataSection("d"), "lora": LoraSection(), "training": TrainingSection()}
    made |= {name: dataclasses.replace(made[name], **changes) for name, changes in others.items()}
    if message is None:
        TrainConfig(**made, output=OutputSection("o"), preferences=PreferencesSection(loss))
        return
    with pytest.raises(ConfigError, match=message):
        TrainConfig(**made, output=OutputSection("o"), preferences=PreferencesSection(loss))
