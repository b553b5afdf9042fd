"""Unsloth's column: its model folder, the cases that differ for it, and none that it does not serve."""

import dataclasses

import ml_dtypes
import numpy as np
import pytest

from convert.checkpoint import open_checkpoint
from convert.families import family_for
from fastjax.bench.peer_models import write_peer_model
from fastjax.bench.step import peers
from fastjax.bench.step.case import StepCase
from fastjax.parallel import MeshShape

CASE = StepCase("tiny", 2, 32, "full", "scan")


def test_a_folder_is_a_model_with_a_tokenizer(tmp_path):
    folder = write_peer_model(tmp_path, CASE.hf_config, nf4=True)
    assert any(name.endswith(".quant_state.bitsandbytes__nf4") for name in open_checkpoint(folder).names)
    assert (folder / "tokenizer.json").exists() and (folder / "tokenizer_config.json").exists()
    plain = open_checkpoint(tmp_path / "16bit")
    assert plain.config["architectures"] == ["LlamaForCausalLM"]
    specs = family_for(CASE.hf_config).specs(CASE.hf_config)
    assert set(plain.names) == {spec.name for spec in specs}
    for spec in specs:
        array = plain.read(spec.name)
        assert array.shape == spec.shape and array.dtype == ml_dtypes.bfloat16 and np.any(array != 0)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"mesh": MeshShape(data=2)}, "measured on one device alone"),
        ({"preset": "gpt-oss-20b"}, "a mixture's adapters are on other modules there"),
        ({"lengths": (9,)}, "rows of several documents are prepared otherwise there"),
        ({"dtype": "float16"}, "measured in bfloat16 alone, not in float16"),
        ({"method": "full", "weights": "16bit"}, "what it trains is in bfloat16, not in float32"),
    ],
)
def test_cases_that_it_does_not_serve(changes, reason, monkeypatch):
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    assert peers.why_not(CASE) == "not installed"
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: "there")
    assert peers.why_not(dataclasses.replace(CASE, **changes)) == reason
