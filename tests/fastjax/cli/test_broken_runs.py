"""Runs that are stopped, broken or wrong from the start, from files to files: what they say and what they leave.

What a run does around its steps does not depend on the loss: most of these runs have one without the model. A run that
was stopped, a weight without gradient, a row that breaks a step, and the best state have the cross-entropy.
"""

import dataclasses
import datetime
import functools
import io
import itertools
import json
import os
import re
import shutil
import signal
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from rich.console import Console

from convert import tensor_file
from convert.checkpoint import open_checkpoint
from fastjax.errors import ConfigError, Interrupted, TrainingError
from fastjax.runs.fine_tune import fine_tune
from fastjax.training.config import OutputSection, TrainingSection
from fastjax.training.loss import LossSums, loss_sums
from fastjax.training.step import IGNORED
from tests.support import runs, steps
from tests.support.chat import TEMPLATE
from tests.support.folders import write_checkpoint
from tests.support.runs import contents, events, figures, rows

pytestmark = pytest.mark.usefixtures("no_report")


@pytest.fixture
def no_report(monkeypatch):
    """A third of the time of so short a run; nothing here looks at it."""
    monkeypatch.setattr("fastjax.runs.reporting.write_report", lambda *args, **kwargs: None)


def without_the_model(model, trainable, rows, *, key):
    """How far the trained arrays, in the model's dtype, are from a number made of the rows and the key.

    It compiles in a tenth of the cross-entropy's time, and still every state depends on the arrays, the rows and their
    order, the key, and in float16 on the loss scale, which overflows above 2**21.
    """
    learnt = rows.targets != IGNORED
    goal = jnp.sum(jnp.where(learnt, rows.targets, 0)).astype(jnp.float32) / 1e4
    if key is not None:
        goal = goal + 0.1 * jax.random.normal(key)
    trained = nnx.to_pure_dict(nnx.split(model, trainable, ...)[1])
    arrays = [leaf.astype(model.precision.dtype).astype(jnp.float32) for leaf in jax.tree.leaves(trained)]
    distance = sum(jnp.sum(jnp.abs(array - goal)) for array in arrays) / 64
    count = jnp.sum(learnt)
    return LossSums(distance * count.astype(jnp.float32), None, {"num_targets": count, "num_correct": count})


light_tune = functools.partial(fine_tune, loss=without_the_model)


@pytest.fixture
def config(chat_folder, chats, tmp_path):
    """A run of six steps with dropout, noise and a state in eight bits, after changes to its sections."""

    def make(**changes):
        sections = {
            "model": {"model_name": str(chat_folder), "max_seq_length": 48, "dtype": "float32"},
            "data": {"train": str(chats), "eval": str(chats), "cache_dir": None},
            "output": {"output_dir": str(tmp_path / "run"), "save_steps": 2},
            "lora": {"r": 4, "lora_dropout": 0.2, "target_modules": ["q_proj", "down_proj"]},
            "optimizer": {"learning_rate": 0.01, "warmup_steps": 2},
            "training": {"max_steps": 6, "eval_steps": 3, "neftune_noise_alpha": 5.0},
        }
        made = {name: given | changes.get(name, {}) for name, given in sections.items()}
        if made["model"].get("full_finetuning"):
            del made["lora"]
        return runs.config(**made)

    return make


def result(folder):
    return (folder / "adapter" / "adapter_model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("number", "dtype", "tune"), [(signal.SIGTERM, "float32", fine_tune), (signal.SIGINT, "float16", light_tune)]
)
def test_a_run_that_was_stopped_goes_on_as_if_it_had_not_been(config, tmp_path, number, dtype, tune):
    """Dropout, noise, warm-up, the order of the rows, the best score and float16's loss scale go on bit for bit."""

    def settings(name, **training):
        return config(
            output={"output_dir": str(tmp_path / name)},
            model={"dtype": dtype},
            training={"initial_loss_scale": 2.0**24},
        )

    tune(settings("whole"))
    looked = []

    def stop(model):
        looked.append(1)
        if len(looked) == 1:
            os.kill(os.getpid(), number)
        return {}

    with pytest.raises(
        Interrupted, match=rf"interrupted by {number.name} after step 4 of 6; its state is saved"
    ) as error:
        tune(settings("stopped"), evaluate=stop)
    assert error.value.signal_number == number
    assert not (tmp_path / "stopped" / "adapter").exists()
    assert sorted(path.name for path in (tmp_path / "stopped" / "checkpoints").iterdir()) == ["2", "4"]
    tune(settings("stopped"), resume=True)
    assert result(tmp_path / "stopped") == result(tmp_path / "whole")
    assert figures(tmp_path / "stopped") == figures(tmp_path / "whole")
    if dtype == "float16":
        assert max(row.get("skipped_steps", 0) for row in rows(tmp_path / "whole")) > 0


@pytest.mark.parametrize("full", [False, True], ids=["adapter", "whole model"])
def test_resuming_a_finished_run_reads_its_result_back(config, tmp_path, full):
    """There was no checkpoint: it began at the beginning, and what is finished is not begun again."""
    changes = {
        "output": {"save_steps": None},
        "training": {"max_steps": 2, "eval_steps": None},
        "model": {"full_finetuning": full, "load_in_4bit": not full, "new_tokens": ["<new>"]},
    }
    settings = config(**changes)
    console = Console(file=io.StringIO(), width=300)
    first = light_tune(settings, resume=True)
    assert events(tmp_path / "run") == [
        "no checkpoint to go on from: started from the beginning",
        "finished after step 2",
    ]
    before = contents(tmp_path / "run")
    again = light_tune(settings, console, resume=True)
    assert f"the run in {tmp_path / 'run'} is finished: nothing is left to do" in console.file.getvalue()
    assert contents(tmp_path / "run") == before
    assert again.folder == first.folder and again.evaluation == first.evaluation is not None
    assert again.model.hf_config == first.model.hf_config
    steps.assert_same(again.model.trainable, first.model.trainable)
    other = dataclasses.replace(settings, training=dataclasses.replace(settings.training, seed=1))
    with pytest.raises(ConfigError, match="finished and has no .* with others: training.seed: expected 3407, got 1"):
        light_tune(other, resume=True)
    with pytest.raises(ConfigError, match="expected a folder without an earlier run"):
        light_tune(settings)
    if not full:
        shutil.copytree(settings.model.model_name, tmp_path / "base")
        base = open_checkpoint(tmp_path / "base")
        write_checkpoint(tmp_path / "base", [(name, -base.read(name)) for name in base.names], base.config)
        changes["model"] |= {"model_name": str(tmp_path / "base")}
        with pytest.raises(ConfigError, match="expected the base model of .*/adapter, got one whose weights have"):
            light_tune(config(**changes), resume=True)
    assert contents(tmp_path / "run") == before
    next(first.folder.glob("*.safetensors")).write_bytes(b"")
    with pytest.raises(TrainingError, match=f"^{first.folder} is damaged: .* is not as it was written; there is no"):
        light_tune(settings, resume=True)


def test_a_result_that_is_gone_is_made_from_the_last_checkpoint(config, tmp_path):
    settings = config(training={"max_steps": 2, "eval_steps": None})
    first = light_tune(settings)
    before = result(tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "adapter")
    again = light_tune(settings, resume=True)
    assert result(tmp_path / "run") == before
    assert again.evaluation == first.evaluation is not None
    assert events(tmp_path / "run")[-2:] == [
        f"going on after step 2, from {tmp_path}/run/checkpoints/2",
        "finished after step 2",
    ]
    weights = bytearray(before)
    weights[-1] ^= 1
    (tmp_path / "run" / "adapter" / "adapter_model.safetensors").write_bytes(weights)
    console = Console(file=io.StringIO(), width=300)
    light_tune(settings, console, resume=True)
    assert result(tmp_path / "run") == before
    told = f"warning: {tmp_path}/run/adapter is damaged: adapter_model.safetensors is not as it was written"
    assert told in console.file.getvalue() and "nothing is left to do" not in console.file.getvalue()
    (tmp_path / "run" / "adapter" / "adapter_config.json").write_text("{")
    light_tune(settings, console, resume=True)
    assert (
        f"warning: {tmp_path}/run/adapter is damaged: {tmp_path}/run/adapter/adapter_config" in console.file.getvalue()
    )
    assert json.loads((tmp_path / "run" / "adapter" / "adapter_config.json").read_text())["r"] == 4


class TenDaysLater(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return super().now(tz) + datetime.timedelta(10)


def test_what_may_not_change_is_refused_and_nothing_is_touched(config, chat_folder, tmp_path, monkeypatch):
    """The day of the start is in the data, and stays."""
    short, dated = {"max_steps": 2, "eval_steps": None}, tmp_path / "dated.jinja"
    dated.write_text("{{ strftime_now('%d %b %Y') }}" + TEMPLATE)
    config = functools.partial(config, data={"chat_template": str(dated)})
    light_tune(config(training=short))
    monkeypatch.setattr(sys.modules["fastjax.data.pipeline"], "datetime", TenDaysLater)
    before = contents(tmp_path / "run")
    with pytest.raises(ConfigError, match="another configuration: lora.r: expected 4, got 8"):
        light_tune(config(training=short, lora={"r": 8}), resume=True)
    other = tmp_path / "other.jsonl"
    other.write_text((json.dumps({"text": "abc"}) + "\n") * 9)
    with pytest.raises(ConfigError, match="^data.train: expected the data of"):
        light_tune(config(training=short, data={"train": str(other), "chat_template": str(dated)}), resume=True)
    shutil.copytree(chat_folder, tmp_path / "base")
    base = open_checkpoint(chat_folder)
    write_checkpoint(tmp_path / "base", [(name, -base.read(name)) for name in base.names], base.config)
    with pytest.raises(ConfigError, match="^model.model_name: expected the base .* whose weights have other values"):
        longer = {"max_steps": 3, "eval_steps": None}
        light_tune(config(training=longer, model={"model_name": str(tmp_path / "base")}), resume=True)
    assert contents(tmp_path / "run") == before
    light_tune(config(training={"max_steps": 3, "eval_steps": None}, optimizer={"learning_rate": 0.02}), resume=True)
    (told,) = [row["message"] for row in rows(tmp_path / "run") if row.get("event") == "resumed"]
    assert "changed since: optimizer.learning_rate: 0.01 → 0.02; training.max_steps: 2 → 3" in told
    assert [row["step"] for row in rows(tmp_path / "run") if "loss" in row] == [1, 2, 3]


def test_a_weight_that_is_cut_off_from_the_loss_ends_the_run_by_name(config):
    """B of one projection of one layer of two, which are stacked in one array; as B stays zero, its A is dead too."""

    def cut(model, trainable, rows, *, key):
        def stopped(path, leaf):
            name = jax.tree_util.keystr(path)
            if "down_proj" not in name or "lora_B" not in name:
                return leaf
            return leaf.at[1].set(jax.lax.stop_gradient(leaf[1]))

        graphdef, variables = nnx.split(model)
        changed = jax.tree_util.tree_map_with_path(stopped, nnx.to_pure_dict(variables))
        return loss_sums(nnx.merge(graphdef, changed), trainable, rows, key=key)

    with pytest.raises(TrainingError, match="2 of 8 trained weights have no gradient after the first steps: ") as e:
        fine_tune(config(training={"eval_steps": None}), loss=cut)
    dead = "layers.1.mlp.down.adapters.down_proj.lora_"
    assert f"first steps: {dead}A, {dead}B. They would never change" in str(e.value)


def test_a_row_that_breaks_a_step_is_named_and_the_state_before_it_kept(config, chat_folder, tmp_path):
    """The embedding of one character is not a number; one row of forty has it."""
    folder, data = tmp_path / "model", tmp_path / "rows.jsonl"
    checkpoint = open_checkpoint(chat_folder)
    arrays = {name: np.array(checkpoint.read(name)) for name in checkpoint.names}
    poisoned = json.loads((chat_folder / "tokenizer.json").read_text())["model"]["vocab"]["Z"]
    arrays["lm_head.weight"] = arrays["model.embed_tokens.weight"].copy()
    arrays["model.embed_tokens.weight"][poisoned] = np.nan
    write_checkpoint(folder, arrays.items(), dict(checkpoint.config) | {"tie_word_embeddings": False})
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (chat_folder / name).exists():
            (folder / name).write_bytes((chat_folder / name).read_bytes())
    texts = ["abcabc"] * 40
    texts[17] = "abcZabc"
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    settings = config(
        model={"model_name": str(folder), "load_in_4bit": False, "allow_nonfinite": True},
        data={"train": str(data), "eval": None, "packing": False},
        training={"max_steps": 20, "eval_steps": None},
        output={"save_steps": None},
    )
    with pytest.raises(TrainingError) as error:
        fine_tune(settings)
    message = str(error.value)
    step = next(row["step"] for row in rows(tmp_path / "run") if row.get("event") == "not_finite")
    assert message.startswith(f"step {step}: the loss is nan")
    assert f"{data}:18)" in message and message.count("row ") == 1
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == [str(step - 1)]
    assert not (tmp_path / "run" / "adapter").exists()


def test_a_users_evaluation_decides_nothing_but_is_reported(config, tmp_path):
    seen = []

    def exact(model):
        seen.append(model.num_parameters())
        return {"eval_exact": 0.5}

    done = light_tune(config(training={"max_steps": 3}), evaluate=exact)
    assert done.evaluation is not None and done.evaluation.extra == {"eval_exact": 0.5}
    assert [row["eval_exact"] for row in rows(tmp_path / "run") if "eval_loss" in row] == [0.5]
    assert len(seen) == 1
    named = "evaluate: expected numbers by names that begin with eval_, got "
    for given, message in (
        ({"exact": 1.0}, named + "{'exact': 1.0}"),
        ({"eval_exact": "much"}, named + "{'eval_exact': 'much'}"),
        (0.5, named + "0.5"),
        ({"eval_loss": 1.0}, "evaluate: expected names that the evaluation has not itself, got eval_loss"),
    ):
        with pytest.raises(ConfigError, match=re.escape(message)):
            light_tune(config(output={"overwrite_output_dir": True}), evaluate=lambda model, given=given: given)


BEST = {
    "optimizer": {"learning_rate": 30.0, "warmup_steps": 40, "lr_scheduler_type": "constant"},
    "training": {
        "max_steps": 20,
        "eval_steps": 1,
        "early_stopping_patience": 3,
        "early_stopping_threshold": 2.0,
        "neftune_noise_alpha": 5.0,
    },
    "output": {"load_best_model_at_end": True, "save_steps": None},
}
"""Better is two nats less: the second evaluation is the best, and three later ones are not better."""


def test_a_best_state_that_was_damaged_is_told(config, tmp_path):
    evaluations = itertools.count(1)

    def damage(model):
        if next(evaluations) == 5:
            checkpoint = tmp_path / "run" / "checkpoints" / "2"
            while not checkpoint.exists():  # it gets its name when it is whole
                time.sleep(0.01)
            for file in checkpoint.rglob("*"):
                if file.is_file():
                    file.write_bytes(b"")
        return {}

    with pytest.raises(TrainingError, match="step 2 is the best, but .*/2 cannot be read: .*the last state is"):
        fine_tune(config(**BEST), evaluate=damage)
    assert not (tmp_path / "run" / "adapter").exists()


def test_the_best_state_is_the_result(config, tmp_path):
    done = fine_tune(config(**BEST))
    losses = {row["step"]: row["eval_loss"] for row in rows(tmp_path / "run") if "eval_loss" in row}
    (told,) = [row["message"] for row in rows(tmp_path / "run") if row.get("event") == "early_stop"]
    best = 2
    assert max(losses) == best + 3 and f"{losses[best]:.4f} at step {best} in 3 evaluations" in told
    again = fine_tune(
        dataclasses.replace(
            config(**BEST),
            training=TrainingSection(max_steps=best, eval_steps=best, neftune_noise_alpha=5.0),
            output=OutputSection(str(tmp_path / "again")),
        )
    )
    assert result(tmp_path / "again") == result(tmp_path / "run")
    assert done.model.lora is not None and again.evaluation is not None
    assert again.evaluation.loss == pytest.approx(losses[best])
    assert tensor_file.read_header(tmp_path / "run" / "adapter" / "adapter_model.safetensors")
