"""A notebook's model is the trained one after `train()`, for every trainer; a value stays what it was."""

import json
import os
import signal
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

import fastjax
from fastjax import (
    DPOConfig,
    DPOTrainer,
    FastLanguageModel,
    OptimizerConfig,
    SFTConfig,
    SFTTrainer,
    Trainer,
    TrainerSettings,
)
from fastjax.errors import ConfigError, Interrupted
from fastjax.training.config import TrainingSection

ASSETS = Path(fastjax.__file__).parent / "assets"
TEXTS = [{"text": f"Ben bought {number} red pens."} for number in range(16)]
PAIRS = [{"prompt": f"{number} and 1 is", "chosen": f" {number + 1}", "rejected": " 0"} for number in range(16)]
ARGUMENTS = {"max_steps": 2, "learning_rate": 1e-2, "per_device_train_batch_size": 2, "report_to": "none"}


@pytest.fixture(scope="module")
def base():
    return FastLanguageModel.from_pretrained(ASSETS / "tiny-llama", max_seq_length=128)[0].value


def sft(model, folder, **others):
    return SFTTrainer(
        model=model, train_dataset=TEXTS, args=SFTConfig(output_dir=str(folder), max_length=64, **ARGUMENTS), **others
    )


def dpo(model, folder, **others):
    args = DPOConfig(output_dir=str(folder), max_length=64, **ARGUMENTS)
    return DPOTrainer(model=model, train_dataset=PAIRS, args=args, **others)


def plain(model, folder, steps=2, settings=None, **others):
    training = TrainingSection(max_steps=steps, per_device_train_batch_size=2, gradient_accumulation_steps=1)
    return Trainer(model, None, TEXTS, None, TrainerSettings(str(folder), training, **(settings or {})), **others)


def largest(tree):
    """The largest element of every B."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return max(float(np.abs(leaf).max()) for path, leaf in leaves if "lora_B" in jax.tree_util.keystr(path))


@pytest.mark.exhaustive("sft")  # the plain trainer's is that of an interrupted run below
@pytest.mark.parametrize("make", [sft, dpo, plain])
def test_what_the_caller_holds_is_trained(make, base, tmp_path):
    origin = fastjax.ModelHandle(base)
    model = FastLanguageModel.get_peft_model(origin, r=4, target_modules=["q_proj"])
    before = model.value
    assert largest(model.trainable) == 0
    trainer = make(model, tmp_path / "run")
    assert getattr(trainer, "handle", trainer.model) is model
    result = trainer.train()
    assert largest(model.trainable) > 0 and model.max_seq_length == 128
    model.save_pretrained(tmp_path / "saved")
    saved, theirs = (
        load_file(folder / "adapter_model.safetensors") for folder in (tmp_path / "saved", tmp_path / "run" / "adapter")
    )
    assert saved.keys() == theirs.keys()
    assert all(np.array_equal(saved[name], theirs[name]) for name in saved)
    # As with PEFT, the object that the adapter was added to has it too; a value is what it was.
    assert origin.trainable is result.model.trainable and origin.lora == model.lora
    assert largest(before.trainable) == 0 and base.lora is None
    with pytest.raises(ConfigError, match="its value as it was before"):
        FastLanguageModel.load_adapter(origin, tmp_path / "saved")
    asked = ["Ben bought"]
    assert model.generate(asked, chat=False, max_new_tokens=4) == result.model.generate(
        asked, chat=False, max_new_tokens=4
    )


def test_a_run_that_ends_early_leaves_the_model_as_far_as_it_came(base, tmp_path):
    model = FastLanguageModel.get_peft_model(base, r=4, target_modules=["q_proj"])

    def at_first_step(act):
        return lambda event: act() if event.name == "step" and event.step == 1 else None

    def fail():
        raise KeyboardInterrupt

    failing = plain(model, tmp_path / "failed", steps=6, callbacks=[at_first_step(fail)])
    interrupt = at_first_step(lambda: os.kill(os.getpid(), signal.SIGINT))
    still = {"optimizer": OptimizerConfig(learning_rate=1e-20)}
    interrupted = plain(model, tmp_path / "interrupted", steps=6, settings=still, callbacks=[interrupt])
    with pytest.raises(KeyboardInterrupt):
        failing.train()
    assert (failed := largest(model.trainable)) > 0
    with pytest.raises(Interrupted):
        interrupted.train()
    events = [json.loads(line) for line in (tmp_path / "interrupted" / "metrics.jsonl").read_text().splitlines()]
    assert any(row.get("event") == "interrupted" for row in events)
    # A trainer that was made before another one's run goes on from what that has made of the model.
    assert largest(model.trainable) == largest(interrupted.model.trainable) == failed
    assert model.trainable is not failing.model.trainable


def test_a_handle_has_what_its_value_has(base):
    handle = fastjax.ModelHandle(base)
    assert {"value", "become", "trainable", "save_pretrained_gguf"} <= set(dir(handle))
    assert repr(handle) == repr(base) and fastjax.ModelHandle(handle).value is base
    again = handle.with_options(max_seq_length=64)
    assert again.value.max_seq_length == 64 and handle.max_seq_length == 128
    assert isinstance(again, fastjax.ModelHandle) and isinstance(handle.with_score_head(), fastjax.ModelHandle)
    assert isinstance(handle.executed(handle.execution), fastjax.ModelHandle)
    with pytest.raises(AttributeError):
        _ = handle.no_such_name
    with pytest.raises(AttributeError):
        handle.trainable = None
