"""`fastjax train` with `training.qat`, to a result that knows what it was trained for."""

import json
import shlex
import types
from pathlib import Path

import jax
import numpy as np
import pytest
import yaml

from convert.weights import open_weights
from fastjax.cli import main
from fastjax.commands import train
from fastjax.language_model import FastLanguageModel
from fastjax.models.quantized import QuantizationAware
from fastjax.runs.comparison import compare_logits
from tests.support import tiny


@pytest.fixture
def settings(chats, run_file):
    """The command of a short run, after changes to sections."""

    short = {"model": {"load_in_4bit": False}, "data": {"eval": str(chats)}}
    short["training"] = {"max_steps": 2, "logging_steps": 1}
    return lambda **changes: ["train", "--config", run_file(short, **changes)]


def test_full_fine_tuning_for_int4(settings, tmp_path, one_layer_folder, capsys):
    whole = {"model_name": str(one_layer_folder), "full_finetuning": True}
    command = settings(model=whole, training={"qat": "int4_weight_only"})
    assert main(command) == 0
    folder = tmp_path / "run" / "model"
    assert QuantizationAware.read(folder) == QuantizationAware("int4-32")
    rows = [json.loads(row) for row in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    (held_out,) = [row["eval_loss"] for row in rows if "eval_loss" in row]
    assert np.isfinite(held_out) and rows[-1]["event"] == "finished"
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["training"]["qat"] == "int4_weight_only"
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("as what it was trained for: ")]
    program, *packing = shlex.split(line.partition(": ")[2])
    assert program == "fastjax" and main(packing) == 0
    assert "note: " not in capsys.readouterr().out
    assert main(["convert", "quantize", str(folder), str(tmp_path / "other"), "--scheme", "int8"]) == 0
    assert "note: model was trained for int4-32 (quantization_aware.json), not for int8" in capsys.readouterr().out
    assert json.loads((tmp_path / "run" / "model-int4-32" / "config.json").read_text())["quantization_config"]
    # The model in 16 bits computes as the quantised one, here and on the command line, and says so.
    found = compare_logits(folder, f"{folder}-int4-32", ["Ben bought 4 red pens."])
    assert found.largest < 1e-5 * found.scale
    capsys.readouterr()
    answers = []
    for model in (folder, f"{folder}-int4-32"):
        assert main(["generate", "--model", str(model), "--prompt", "Ben has", "--raw", "--max_new_tokens", "1"]) == 0
        answers.append(capsys.readouterr())
    assert answers[0].out == answers[1].out
    assert [line for line in answers[0].err.splitlines() if "note" in line] == [
        f"note: {folder} computes as it was trained, with matrices in int4-32"
    ]
    packed = ["--load_in_4bit", "--prompt", "Ben has", "--raw", "--max_new_tokens", "1"]
    assert main(["generate", "--model", str(folder), *packed]) == 0
    assert "was trained for int4-32, and computes without it here" in capsys.readouterr().err
    assert main([*command, "--resume"]) == 0
    assert "nothing is left to do" in capsys.readouterr().out


@pytest.mark.exhaustive(by="test_full_fine_tuning_for_int4, test_the_command_that_is_told")
def test_an_adapter_computes_as_it_was_trained(settings, tmp_path, chat_folder, capsys):
    qat = {"weights": "int4-32", "activations": "int8", "start_step": 1, "modules_to_not_quantize": ["down_proj"]}
    output = {"output_dir": str(tmp_path / "run of mine")}
    assert main([*settings(lora={"r": 4}, training={"qat": qat}, output=output), "--verbose"]) == 0
    said = capsys.readouterr().out
    assert "product with fake-quantised float32 weights and adapters of rank 4 on" in said
    folder = tmp_path / "run of mine" / "adapter"
    aware = QuantizationAware("int4-32", "int8", ("down_proj",))
    assert QuantizationAware.read(folder) == aware
    base, _ = FastLanguageModel.from_pretrained(chat_folder, dtype="float32", load_in_4bit=False)
    ours = FastLanguageModel.load_adapter(base, folder)
    plain = FastLanguageModel.load_adapter(base, folder, fake_quantization=False)
    assert ours.quantization_aware == aware and plain.quantization_aware is None
    tokens = np.arange(12, dtype=np.int32)[None]
    assert np.abs(tiny.logits(ours, tokens) - tiny.logits(plain, tokens)).max() > 1e-3
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(ours.trainable))
    # The command that is told makes the folder that was trained for, of a path with blanks, without what was left out.
    (line,) = [line for line in said.splitlines() if line.startswith("as what it was trained for: ")]
    _, *packing = shlex.split(line.partition(": ")[2])
    assert main(packing) == 0
    served = tmp_path / "run of mine" / "adapter-int4-32"
    formats = open_weights(served).format
    assert (
        formats("layers.0.mlp.down_proj.weight") == "float32" and formats("layers.0.mlp.up_proj.weight") == "int4-bytes"
    )
    group = open_weights(served).checkpoint.config["quantization_config"]["config_groups"]["group_0"]
    assert group["input_activations"]["num_bits"] == 8 and group["weights"]["num_bits"] == 4
    texts = ["Ben bought 4 red pens.", "Who has pens?"]
    found = compare_logits(chat_folder, served, texts, adapter=folder)
    assert found.largest < 1e-5 * found.scale


@pytest.mark.parametrize(
    ("aware", "whole", "line"),
    [
        (("q4_0",), True, "as what it was trained for: fastjax convert gguf 'a b' 'a b-q4_0.gguf' --type q4_0"),
        (
            ("q8_0", "int8", ("o_proj",)),
            False,
            "as what it was trained for, but for inputs in int8, which no such folder has a name for (llama.cpp "
            "quantises them its own way): fastjax convert merge BASE 'a b' 'a b-merged' && fastjax convert gguf "
            "'a b-merged' 'a b-q8_0.gguf' --type q8_0 --skip o_proj",
        ),
        (
            ("nvfp4", "nvfp4"),
            True,
            "as what it was trained for, but for inputs in nvfp4, which no such folder has a name for (servers are "
            "told to leave them): fastjax convert quantize 'a b' 'a b-nvfp4' --scheme nvfp4",
        ),
        (
            ("fp8-block", "fp8"),
            False,
            "as what it was trained for, but for inputs in fp8, which no such folder has a name for (servers are told "
            "fp8-128): fastjax convert merge BASE 'a b' 'a b-fp8-block' --dtype fp8-block",
        ),
        (("int8",), True, "as what it was trained for: fastjax convert quantize 'a b' 'a b-int8' --scheme int8"),
    ],
)
def test_the_command_that_is_told(aware, whole, line):
    model = types.SimpleNamespace(quantization_aware=QuantizationAware(*aware))
    settings = types.SimpleNamespace(full_finetuning=whole, in_nf4=False, model_name="BASE")
    config = types.SimpleNamespace(model=settings)
    assert train._packing(types.SimpleNamespace(model=model, config=config, folder=Path("a b"))) == line


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lora": {"lora_dropout": 0.1}, "training": {"qat": "nf4"}}, "qat: expected lora_dropout: 0"),
        ({"model": {"load_in_4bit": True}, "training": {"qat": "mxfp4"}}, "load_in_4bit: false) with mxfp4"),
        ({"training": {"qat": {"weights": "int5"}}}, "training.qat.weights: expected one of int4-32, int4-128"),
        ({"training": {"qat": {"weights": "nf4", "bits": 4}}}, "training.qat.bits: unknown; expected one of weights"),
        (
            {"training": {"qat": {"weights": "nf4", "start_step": -1}}},
            "training.qat.start_step: expected an integer of",
        ),
        ({"parallel": {"tensor": 2, "data": 1, "fsdp": 1}, "training": {"qat": "nf4"}}, "parallel"),
    ],
)
def test_what_is_not_served_is_refused(settings, capsys, changes, message):
    assert main(settings(**changes)) == 2
    assert message in capsys.readouterr().err
