"""`fastjax convert` from the command line: every subcommand on small folders, and what it says when it refuses."""

import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file

from convert.errors import ConvertError
from convert.formats import WRITERS
from convert.hub import fetch
from convert.tensor_file import read_header, read_tensor, write_tensor_file
from convert.trained_over import read_trained_over
from convert.weights import open_weights
from fastjax.cli import main
from fastjax.commands.convert import _SCHEMES
from fastjax.errors import ConfigError
from fastjax.execution.opening import open_folder
from fastjax.execution.options import LoadOptions
from fastjax.language_model import FastLanguageModel
from tests.support import chat, tiny
from tests.support.family_mixtures import MIXTURES
from tests.support.runs import World


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return chat.write_model(tmp_path_factory.mktemp("convert") / "model")


@pytest.fixture(scope="module")
def adapter(model, tmp_path_factory):
    base = FastLanguageModel.from_pretrained(model, dtype="float32", load_in_4bit=False, max_seq_length=32)[0]
    folder = tmp_path_factory.mktemp("convert") / "adapter"
    return tiny.adapted(base, r=4, use_dora=True).save_pretrained(folder)


def run(*arguments):
    return main(["convert", *map(str, arguments)])


@pytest.mark.older_jax
def test_merge_then_verify_with_logits(model, adapter, tmp_path, capsys):
    assert run("merge", model, adapter, tmp_path / "out", "--dtype", "float32") == 0
    assert "read back and compared" in capsys.readouterr().out
    text = "what is there to say"
    asked = ["verify", model, tmp_path / "out", "--adapter", adapter, "--text", text]
    assert run(*asked) == 0, "the tensors are others, the logits are not"
    told = capsys.readouterr().out
    largest = float(told.split("largest difference ")[-1].split(",")[0])
    assert largest < 1e-4 and "the likeliest token is the same on 100.0%" in told
    assert run("merge", model, adapter, tmp_path / "16", "--dtype", "bfloat16") == 0
    assert run("verify", model, tmp_path / "16", "--adapter", adapter, "--text", text) == 0, "only rounded"
    assert run(*asked, "--tolerance", "0") == 1, "tensors are judged where it is asked for"
    assert run(*asked, "--logit_tolerance", "1e-12") == 1
    assert "logits differ by up to" in capsys.readouterr().err
    assert run("verify", model, tmp_path / "out", "--text", text) == 1, "without the adapter it is another model"
    assert run("verify", model, tmp_path / "out", "--logit_tolerance", "1") == 1
    assert "--logit_tolerance: expected --text with it" in capsys.readouterr().err
    assert run("verify", model, tmp_path / "out") == 1
    captured = capsys.readouterr()
    assert "q_proj.weight" in captured.out and "not the same as" in captured.err
    assert run("merge", model, adapter, tmp_path / "out") == 1
    assert "--force or force=True replaces a model folder" in capsys.readouterr().err
    assert run("merge", model, adapter, tmp_path / "out", "--force") == 0


def test_verify_a_merge_over_the_base_in_4_bits(model, adapter, tmp_path, capsys):
    assert run("merge", model, adapter, tmp_path / "out", "--base_in_nf4", "--dtype", "float32") == 0
    asked = ["verify", model, tmp_path / "out", "--adapter", adapter, "--text", "what is there to say"]
    assert run(*asked, "--base_in_nf4", "--logit_tolerance", "1e-4") == 0
    assert run(*asked) == 1, "over 16 bits it is another model"
    assert "logits differ by up to" in capsys.readouterr().err
    assert run("verify", model, tmp_path / "out", "--base_in_nf4") == 1
    assert "--base_in_nf4: expected --text with it" in capsys.readouterr().err


def test_inspect_refuses_what_loading_refuses(model, adapter, tmp_path, capsys):
    config = json.loads((model / "config.json").read_text())
    for name, changes, message in (
        ("act", {"hidden_act": "tanh"}, "hidden_act: expected"),
        ("rope", {"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}}, "rope_type: expected"),
        ("rows", {"vocab_size": 40}, "tokens"),
    ):
        shutil.copytree(model, tmp_path / name)
        (tmp_path / name / "config.json").write_text(json.dumps(config | changes))
        with pytest.raises((ConfigError, ConvertError)) as refused:
            open_folder(fetch(tmp_path / name), LoadOptions())
        assert run("inspect", tmp_path / name, "--json") == 0
        assert str(refused.value) in json.loads(capsys.readouterr().out)["unsupported"], message
    settings = json.loads((adapter / "adapter_config.json").read_text()) | {"modules_to_save": ["norm"]}
    for number, base in enumerate((settings["base_model_name_or_path"], "nowhere")):
        shutil.copytree(adapter, tmp_path / f"adapter{number}")
        settings["base_model_name_or_path"] = base
        (tmp_path / f"adapter{number}" / "adapter_config.json").write_text(json.dumps(settings))
        assert run("inspect", tmp_path / f"adapter{number}") == 0
        told = capsys.readouterr().out
        assert "unsupported: modules_to_save: expected some of" in told and "everything" not in told
    assert run("inspect", adapter) == 0 and "everything in it is supported" in capsys.readouterr().out


def test_quantize_and_inspect(model, tmp_path, capsys):
    assert run("quantize", model, tmp_path / "out", "--skip", "o_proj") == 0
    capsys.readouterr()
    assert run("inspect", tmp_path / "out", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["family"] == "llama" and "nf4-nested" in found["formats"] and found["unsupported"] == []
    assert run("inspect", tmp_path / "out") == 0
    assert "everything in it is supported" in capsys.readouterr().out
    assert run("inspect", tmp_path) == 1
    assert "no such file" in capsys.readouterr().err


def test_every_scheme_can_be_asked_for(model, tmp_path):
    assert tuple(WRITERS) == _SCHEMES
    assert run("quantize", model, tmp_path / "out", "--scheme", "int8") == 0
    assert open_weights(tmp_path / "out").formats()[-1].label == "INT8"


def test_the_base_that_an_adapter_was_trained_over_is_told(model, adapter, tmp_path, capsys):
    options = {"dtype": "float32", "max_seq_length": 32}
    four, _ = FastLanguageModel.from_pretrained(model, float32_modules=["layers.0.self_attn"], **options)
    (tmp_path / "four").mkdir()
    (tmp_path / "four" / "README.md").write_text("mine")
    folder = tiny.adapted(four, r=4).save_pretrained(tmp_path / "four")
    skipped = [f"layers.0.self_attn.{name}_proj" for name in "koqv"]
    assert read_trained_over(folder / "adapter_model.safetensors") == (str(model), None, "nf4", True, tuple(skipped))
    assert (folder / "README.md").read_text() == "mine"
    card = tiny.adapted(four, r=4).save_pretrained(tmp_path / "new") / "README.md"
    text = card.read_text()
    assert "library_name: peft" in text and f"`{model}` in NF4 (but {', '.join(skipped)})" in text
    assert f"fastjax convert merge {model} new new-merged --base_in_nf4 --skip layers.0.self_attn." in text
    assert 'PeftModel.from_pretrained(model, "new")' in text and '"r": 4' in text and "## Training" not in text
    assert f"note: {tmp_path}/four/README.md is not fastjax's, and stays as it is" in capsys.readouterr().err

    but = f"NF4 (but {', '.join(skipped)})"
    told = f"note: the adapter was trained over {model} in {but}, quantised as it was read"
    added, other = f"and is added to {model.name} in", "which is another model;"
    way = "load_in_4bit (of convert --base_in_nf4)"
    for place, options_of, said in (
        ("16", [], f"{added} 16 bits, {other} {way} quantises this base so"),
        ("4", ["--base_in_nf4", "--skip", *skipped], "and so is what it was added to"),
        ("all", ["--base_in_nf4"], f"{added} NF4, {other} float32_modules (of convert --skip) keeps modules out"),
    ):
        assert run("merge", model, folder, tmp_path / place, *options_of) == 0
        assert f"{told}, {said}\n" in capsys.readouterr().out
    sixteen, _ = FastLanguageModel.from_pretrained(model, load_in_4bit=False, **options)
    for base, place, said in (
        (four, folder, ""),
        (sixteen, adapter, ""),
        (sixteen, folder, f"{told}, {added} 16 bits, {other} {way} quantises this base so\n"),
        (four, adapter, f"{added} {but}, {other} leave {way} out for it\n"),
    ):
        FastLanguageModel.load_adapter(base, place)
        err = capsys.readouterr().err
        assert err.startswith("note: ") == bool(said) and said in err


def test_a_mixture_in_nf4_is_told_to_be_for_fastjax_alone(tmp_path, capsys):
    mixture = chat.write_model(tmp_path / "mixture", MIXTURES["olmoe"] | {"hidden_size": 64})
    assert run("quantize", mixture, tmp_path / "int8", "--scheme", "int8") == 0
    assert "note:" not in capsys.readouterr().out
    assert run("quantize", mixture, tmp_path / "nf4") == 0
    assert "note: transformers and bitsandbytes have no experts in 4 bits" in capsys.readouterr().out


@pytest.mark.parametrize("scheme", ["nf4", "fp8-tensor", "mxfp4"])
def test_verify_allows_what_a_format_rounds_and_no_more(model, scheme, tmp_path, capsys):
    text = ["--text", "what is there to say"]
    assert run("quantize", model, tmp_path / "out", "--scheme", scheme) == 0
    capsys.readouterr()
    assert run("verify", model, tmp_path / "out") == 0
    assert "14 of 14 tensors differ by no more than these formats round" in capsys.readouterr().out
    assert run("verify", model, tmp_path / "out", *text) == 0
    assert run("verify", model, tmp_path / "out", "--tolerance", "0") == 1
    file = next((tmp_path / "out").glob("*.safetensors"))
    tensors = {name: read_tensor(name, info) for name, info in read_header(file).items()}
    codes = next(name for name in tensors if "layers.1.mlp.up_proj.weight" in name and tensors[name].itemsize == 1)
    tensors[codes] = np.roll(tensors[codes], 1, axis=0)
    write_tensor_file(file, tensors)
    capsys.readouterr()
    assert run("verify", model, tmp_path / "out") == 1
    assert "13 of 14 tensors differ by no more" in capsys.readouterr().out


@pytest.mark.older_jax
def test_the_adapter_of_a_checkpoint(tmp_path, capsys):
    """The run's last checkpoint gives what the run itself wrote."""
    world = World(tmp_path, 8).make()
    settings = yaml.safe_load((tmp_path / "run.yaml").read_text())
    settings["output"]["output_dir"] = str(tmp_path / "run")
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings))
    assert world.steps == 8 and main(["train", "--config", str(tmp_path / "run.yaml")]) == 0
    assert run("adapter", tmp_path / "run", tmp_path / "out") == 0
    first, second = (load_file(tmp_path / place / "adapter_model.safetensors") for place in ("out", "run/adapter"))
    assert first.keys() == second.keys()
    assert all(np.array_equal(first[name], second[name]) for name in first)
    capsys.readouterr()
    assert run("adapter", tmp_path / "run", tmp_path / "out") == 2
    assert run("adapter", tmp_path / "run", tmp_path / "new", "--step", "3") == 2
    told = capsys.readouterr().err
    assert "--force replaces what is there" in told and "expected a checkpoint of step 3, got [8]" in told
    assert run("adapter", tmp_path, tmp_path / "new") == 1


def test_converting_imports_neither_jax_nor_torch(model, adapter, tmp_path):
    """transformers stays away too, but for `inspect`, which loads the tokenizer as a run does."""
    calls = [
        ["merge", model, adapter, tmp_path / "out"],
        ["quantize", model, tmp_path / "packed"],
        ["verify", model, model],
    ]
    unwanted = {"jax", "flax", "torch"}
    script = f"""
import sys
from fastjax.cli import main
for call in {[[str(part) for part in call] for call in calls]!r}:
    assert main(["convert", *call]) == 0, call
import convert.gguf, convert.hub
assert not {unwanted | {"transformers"}} & set(sys.modules), sys.modules
assert main(["convert", "inspect", {str(model)!r}]) == 0
assert not {unwanted} & set(sys.modules), sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120, stdout=subprocess.DEVNULL)
