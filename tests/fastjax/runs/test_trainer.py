"""Training from Python: what `fastjax train` does with the same settings, over data in memory, and what it is told."""

import io
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import yaml
from rich.console import Console

import fastjax
from fastjax import FastLanguageModel, OptimizerConfig, OutputSection, Trainer, TrainerSettings, TrainingSection
from fastjax.cli import main
from fastjax.errors import ConfigError, DataError
from fastjax.language_model import ModelHandle
from fastjax.parallel import MeshShape
from fastjax.runs import checkpointing
from fastjax.runs.folder import RUN_FILES
from fastjax.runs.mesh import suited_meshes
from fastjax.training.config import ParallelSection, PreferencesSection
from tests.support.runs import metrics
from tests.support.runs import rows as rows_of

ASSETS = Path(fastjax.__file__).parent / "assets"
TRAINING = {"per_device_train_batch_size": 2, "max_steps": 4, "eval_steps": 2}
OPTIMIZER = {"learning_rate": 3e-3, "warmup_steps": 1}


def rows(name="train", count=40, folder="tiny-chat"):
    lines = (ASSETS / folder / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines[:count]]


@pytest.fixture(scope="module")
def base():
    return FastLanguageModel.from_pretrained(ASSETS / "tiny-llama", max_seq_length=128, load_in_4bit=True)[0].value


@pytest.fixture(scope="module")
def model(base):
    """A value, which no run changes."""
    return FastLanguageModel.get_peft_model(base, r=4).value


def settings(folder, **training):
    output = OutputSection(str(folder), save_steps=2)
    return TrainerSettings(output, TrainingSection(**(TRAINING | training)), OptimizerConfig(**OPTIMIZER))


def told(found):
    return [
        {key: row[key] for key in ("step", "loss", "eval_loss", "grad_norm", "learning_rate") if key in row}
        for row in found
    ]


def quiet():
    return Console(quiet=True)


def test_it_is_the_run_of_the_command_line(model, tmp_path, monkeypatch):
    """Rows in memory and as a file give the same steps, bit for bit, and the same files; so do two devices, rounded."""
    for name, found in (("train", rows()), ("eval", rows("test", 8))):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, found)))
    content = {
        "model": {
            "model_name": str(ASSETS / "tiny-llama"),
            "max_seq_length": 128,
            "use_gradient_checkpointing": "full",
        },
        "data": {"train": str(tmp_path / "train.jsonl"), "eval": str(tmp_path / "eval.jsonl"), "cache_dir": None},
        "lora": {"r": 4},
        "training": TRAINING,
        "optimizer": OPTIMIZER,
        "parallel": {"data": 1, "fsdp": 1},
        "output": {"output_dir": str(tmp_path / "command"), "save_steps": 2},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(content))
    assert main(["train", "--config", str(tmp_path / "run.yaml")]) == 0
    events = []
    trainer = Trainer(
        model,
        train_dataset=iter(rows()),
        eval_dataset=rows("test", 8),
        settings=settings(tmp_path / "python"),
        callbacks=[events.append],
        console=quiet(),
    )
    result = trainer.train()
    assert told(metrics(tmp_path / "python")) == told(metrics(tmp_path / "command"))
    names = {name for name in RUN_FILES if (tmp_path / "command" / name).exists()}
    assert names == {name for name in RUN_FILES if (tmp_path / "python" / name).exists()}
    ours, theirs = (
        (tmp_path / name / "adapter" / "adapter_model.safetensors").read_bytes() for name in ("python", "command")
    )
    assert ours == theirs and result.folder == tmp_path / "python" / "adapter"
    assert [(event.name, event.step) for event in events if event.name in ("step", "evaluation")] == [
        ("step", 1),
        ("step", 2),
        ("evaluation", 2),
        ("step", 3),
        ("step", 4),
        ("evaluation", 4),
    ]
    assert {"started", "saved", "finished"} <= {event.name for event in events}
    assert trainer.model is result.model
    with pytest.raises(ConfigError, match="resume: the run in .* is finished"):
        trainer.train(resume=True)
    card = (result.folder / "README.md").read_text(encoding="utf-8")
    assert "| data, train | `train_dataset`; 40 examples" in card and "| best held-out loss |" in card
    assert "\n  max_steps: 4\n" in card and 'PeftModel.from_pretrained(model, "adapter")' in card
    monkeypatch.setattr("fastjax.runs.trainer.suited_meshes", suited_meshes)
    monkeypatch.setattr("fastjax.runs.mesh.device_count", lambda: 2)
    own = settings(tmp_path / "two", per_device_train_batch_size=1)
    trainer = Trainer(model, train_dataset=rows(), eval_dataset=rows("test", 8), settings=own, console=quiet())
    assert_alike(trainer.train(), trainer, model, tmp_path / "two", tmp_path / "python")


def assert_alike(result, trainer, model, folder, one):
    """The figures of one device, by float32 sums in another order; the result is on one, and what was given whole."""
    for found, expected in zip(told(metrics(folder)), told(metrics(one)), strict=True):
        assert found == pytest.approx(expected, rel=1e-4)
    assert result.model is trainer.model
    leaves = jax.tree.leaves((result.model.trainable, result.model.frozen))
    assert {leaf.devices() == {jax.devices()[0]} for leaf in leaves} == {True}
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((model.trainable, model.frozen)))


@pytest.mark.exhaustive(by="test_it_is_the_run_of_the_command_line")
@pytest.mark.parametrize("kind", ["data", "fsdp", "full", "dpo", "context"])
def test_on_four_devices(kind, base, model, tmp_path, monkeypatch, capsys):
    """Weights that are split, all of them trained, a reference that the adapter begins with, rows that are cut."""
    if kind == "full":
        model = FastLanguageModel.from_pretrained(ASSETS / "tiny-llama", 128, full_finetuning=True, load_in_4bit=False)[
            0
        ].value
    elif kind == "dpo":  # an adapter that has learnt something is the reference
        grown = jax.tree.map(lambda leaf: leaf + jnp.asarray(0.01, leaf.dtype), model.trainable)
        model = model.replace(trainable=grown)
    shapes = {"fsdp": {"fsdp": 4}, "full": {"fsdp": 2}, "context": {"context": 2}}
    monkeypatch.setattr("fastjax.runs.trainer.suited_meshes", suited_meshes)
    made = []
    for name, devices, section in (("one", 1, {}), ("four", 4, shapes.get(kind, {}))):
        monkeypatch.setattr("fastjax.runs.mesh.device_count", lambda count=devices: count)
        rows_each = 4 // (2 if section.get("context") else devices)
        training = TrainingSection(**TRAINING | {"eval_steps": None, "per_device_train_batch_size": rows_each})
        more = {"preferences": PreferencesSection(loss="dpo"), "packing": False} if kind == "dpo" else {}
        sections = training, OptimizerConfig(**OPTIMIZER | {"adam_epsilon": 1e-3})
        own = TrainerSettings(str(tmp_path / name), *sections, parallel=ParallelSection(**section), **more)
        data = rows(folder="tiny-pairs") if kind == "dpo" else rows()
        made.append(Trainer(model, train_dataset=data, settings=own, console=Console(width=200)))
        result = made[-1].train()
    assert_alike(result, made[-1], model, tmp_path / "four", tmp_path / "one")
    shape = {"fsdp": "fsdp 4", "full": "data 2 × fsdp 2", "context": "data 2 × context 2"}.get(kind, "data 4")
    assert f"on 4 × cpu ({shape}), " in capsys.readouterr().out


def test_settings_that_one_device_serves_take_one(model, tmp_path, monkeypatch, capsys):
    """And why is said; sizes that are asked for are refused."""
    monkeypatch.setattr("fastjax.runs.mesh.device_count", lambda: 4)
    output = OutputSection(str(tmp_path), sample_answers=1)
    for parallel, said in (
        (ParallelSection(), "one of 4 devices: output.sample_answers: expected 0 on 4"),
        (ParallelSection(data=2), None),
    ):
        own = TrainerSettings(output, TrainingSection(max_steps=1), parallel=parallel)
        config = Trainer(model, train_dataset=rows(), eval_dataset=rows("test", 8), settings=own).config
        if said is None:
            with pytest.raises(ConfigError, match=r"output\.sample_answers: expected 0 on 4 devices, got 1"):
                suited_meshes(config, model, print)
        else:
            assert suited_meshes(config, model, print) == (MeshShape(),)
            assert capsys.readouterr().out.startswith(said)


def test_a_device_with_room_keeps_projections(model, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpointing, "device_stats", lambda: {"bytes_limit": 2**40, "bytes_in_use": 2**20})
    own = settings(tmp_path, max_steps=2, eval_steps=None)
    trainer = Trainer(model, train_dataset=rows(), settings=own, console=quiet())
    trainer.train()
    assert (model.execution.remat, trainer.model.execution.remat) == ("full", "projections")
    assert trainer.model.options.use_gradient_checkpointing == "auto"
    (chosen,) = [row for row in rows_of(tmp_path) if row.get("event") == "checkpointing"]
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(model.frozen))
    assert chosen["policy"] == "projections" and chosen["limit_bytes"] == 2**40 - 2**20 + held


def test_an_optimizer_a_loss_and_a_sink_of_ones_own_and_an_early_end(model, tmp_path):
    """Adam with a schedule is the settings' own rule; a callback ends the run, whose result is saved."""

    class Kept:
        rows, closed = [], False

        def write(self, row):
            self.rows.append(row)

        def close(self):
            Kept.closed = True

    schedule = optax.linear_schedule(0.0, 3e-3, 1)
    rule = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule))
    losses = []

    def end_after_two(event):
        if event.name == "step":
            losses.append(event.values["loss"])
            if event.step == 2:
                event.end()

    data = {"train_dataset": rows(), "eval_dataset": rows("test", 4), "console": quiet()}
    plain = TrainingSection(per_device_train_batch_size=2, max_steps=6)
    options = TrainerSettings(OutputSection(str(tmp_path / "own"), save_steps=5), plain)
    result = Trainer(
        model, settings=options, optimizer=(rule, schedule), callbacks=[end_after_two], sinks=[Kept()], **data
    ).train()
    *found, held_out = metrics(tmp_path / "own")
    assert len(found) in (2, 3) and [row["loss"] for row in found] == losses and Kept.closed
    assert held_out["step"] == len(found) and "eval_loss" in held_out  # it is the last step in all
    assert [path.name for path in (tmp_path / "own" / "checkpoints").iterdir()] == [str(len(found))]
    assert [row["learning_rate"] for row in found[:2]] == pytest.approx([0.0, 3e-3])
    assert (result.folder / "adapter_model.safetensors").is_file()
    assert [row["step"] for row in Kept.rows if "loss" in row] == [row["step"] for row in found]
    with pytest.raises(ConfigError, match="output_dir: expected a folder without an earlier run"):
        Trainer(model, settings=options, **data).train()


def test_what_cannot_be_trained_is_refused(model, tmp_path):
    base, _ = FastLanguageModel.from_pretrained(ASSETS / "tiny-llama", max_seq_length=128)
    plain = TrainerSettings(str(tmp_path / "out"))
    for arguments, error, message in (
        ({"model": base, "train_dataset": rows()}, ConfigError, "model: expected one with an adapter"),
        ({"model": "a folder"}, ConfigError, "model: expected one that FastLanguageModel has loaded, got a str"),
        ({}, ConfigError, "train_dataset: expected one, got none"),
        ({"train_dataset": rows(), "settings": {}}, ConfigError, "settings: expected TrainerSettings, got a dict"),
        (
            {"train_dataset": 3},
            ConfigError,
            "train_dataset: expected a data set, an iterable of dicts or a path, got int",
        ),
        ({"train_dataset": ["a text", {}]}, DataError, "train_dataset row 0: expected a dict of columns, got 'a text'"),
    ):
        with pytest.raises(error, match=message):
            Trainer(**({"model": model, "settings": plain, "console": quiet()} | arguments))
    with pytest.raises(DataError, match="train_dataset row 1: "):
        Trainer(model, train_dataset=[rows()[0], {"other": 1}], settings=plain, console=quiet()).train()
    with pytest.raises(ConfigError, match=r"training\.eval_steps: expected data\.eval or data\.val_set_size with it"):
        Trainer(model, train_dataset=rows(), settings=settings(tmp_path / "out"))
    for wrong, message in (
        ({"training": 3}, r"settings\.training: expected a TrainingSection, got 3"),
        ({"output": None}, r"settings\.output: expected a folder or an OutputSection, got None"),
        ({"max_seq_length": "a"}, r"settings\.max_seq_length: expected an integer from 2 to \d+ or null, got 'a'"),
    ):
        with pytest.raises(ConfigError, match=message):
            TrainerSettings(**({"output": tmp_path} | wrong))
    assert Trainer(model, None, rows(), settings=TrainerSettings(tmp_path)).config.output.output_dir == str(tmp_path)
    for wrong, message in (
        ({"optimizer": "adamw"}, "optimizer: expected one of optax, alone or with its schedule, got 'adamw'"),
        ({"optimizer": (optax.adam(1e-3), 1e-3)}, "optimizer: expected one of optax, alone or with its schedule"),
        ({"loss": 0.5}, r"loss: expected a function \(training.loss.Loss\), got 0.5"),
        ({"evaluate": {"eval_exact": 1.0}}, "evaluate: expected a function of the model, got"),
    ):
        with pytest.raises(ConfigError, match=message):
            Trainer(model, train_dataset=rows(), settings=plain, console=quiet(), **wrong).train()
    assert not list((tmp_path / "out").glob("*.jsonl"))


def test_a_model_that_is_trained_for_a_format_is_not_for_another(model, tmp_path):
    data = {"train_dataset": rows(), "console": Console(file=io.StringIO(), width=200)}
    aware = Trainer(model, settings=settings(tmp_path, eval_steps=None, qat="nf4"), **data).model
    Trainer(aware, settings=settings(tmp_path, eval_steps=None, qat="nf4"), **data)
    with pytest.raises(ConfigError, match="training.qat: expected that of the model, nf4 .* got q8_0"):
        Trainer(aware, settings=settings(tmp_path, eval_steps=None, qat="q8_0"), **data)
    (tmp_path / "config.yaml").touch()
    with pytest.raises(ConfigError, match="expected a folder without an earlier run"):
        Trainer(aware, settings=settings(tmp_path, eval_steps=None), **data).train()
    assert data["console"].file.getvalue().startswith("training.qat: null, and the model is trained for nf4 already")


def test_a_model_says_what_it_is_and_computes_logits_and_answers(model):
    model = ModelHandle(model)
    assert repr(model).startswith("LanguageModel(llama, ") and "trained: r=4" in repr(model) and "NF4" in repr(model)
    tokens = np.random.default_rng(0).integers(0, model.config.vocab_size, (2, 24))
    logits = model.logits(tokens)
    assert logits.shape == (2, 24, model.config.vocab_size) and logits.dtype == jnp.float32
    packed = {
        "segment_ids": np.repeat([[1] * 12 + [2] * 12], 2, 0),
        "positions": np.repeat([[*range(12), *range(12)]], 2, 0),
    }
    apart = np.concatenate([model.logits(tokens[:, :12]), model.logits(tokens[:, 12:])], axis=1)
    np.testing.assert_allclose(model.logits(tokens, **packed), apart, rtol=1e-4, atol=1e-4)  # float32, other shapes
    np.testing.assert_array_equal(model.logits(tokens, adapters=False), logits)  # B is zero
    (answer,) = model.generate(["Record: Ben bought 9 red pens for 2 coins each."], max_new_tokens=1)
    assert isinstance(answer, str)
    for arguments, message in (
        ((tokens[0],), r"tokens: expected rows of tokens, \[B, S\], got \[24\]"),
        ((tokens - 10**6,), "tokens: expected ids from 0 to"),
        ((np.zeros((1, 129), int),), "tokens: expected at most 128 a row, max_seq_length, got 129"),
    ):
        with pytest.raises(ConfigError, match=message):
            model.logits(*arguments)
    with pytest.raises(ConfigError, match="positions: expected those of each token"):
        model.logits(tokens, segment_ids=packed["segment_ids"])
