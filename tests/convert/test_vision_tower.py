"""A text model beside a vision tower: transformers and PEFT leave the tower alone, quantised and with an adapter."""

import json

import numpy as np
import pytest

from convert.adapter_config import AdapterConfig, config_from_json, config_to_json
from convert.adapters import write_adapter
from convert.checkpoint import open_checkpoint
from convert.families import FAMILIES
from convert.merge import merge
from convert.quantize import quantize
from convert.saving import save
from convert.weights import stream
from tests.support import tiny
from tests.support.families import NESTED
from tests.support.folders import lora_arrays

pytestmark = pytest.mark.torch
FAMILY = FAMILIES["gemma3"]
TEXT = NESTED["text_config"] | {
    "hidden_size": 64,
    "intermediate_size": 64,
    "head_dim": 16,
    "num_hidden_layers": 2,
    "layer_types": NESTED["text_config"]["layer_types"][:2],
    "attention_bias": False,
}
CONFIG = NESTED | {"text_config": TEXT, "vision_config": NESTED["vision_config"] | {"hidden_size": 64}}


@pytest.fixture(scope="module")
def torch():
    torch = pytest.importorskip("torch")
    pytest.importorskip("tests.support.torch_family")
    return torch


def build(torch):
    from tests.support import torch_family

    torch.manual_seed(3)
    return torch_family.build(CONFIG, tiny.arrays(CONFIG))


@pytest.fixture(scope="module")
def folder(torch, tmp_path_factory):
    path = tmp_path_factory.mktemp("gemma3")
    build(torch).to(torch.bfloat16).save_pretrained(path)
    return path


def tower_of(torch, path):
    """What the tower and the projector make of an image."""
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.bfloat16, device_map="cpu").eval()
    torch.manual_seed(0)
    pixels = torch.randn(1, 3, 28, 28).to(torch.bfloat16)
    with torch.no_grad():
        return model, model.model.vision_tower(pixels).last_hidden_state.float().numpy()


def adapter(path, **options):
    """A folder with an adapter on the text model, of random arrays."""
    config = AdapterConfig(r=4, **{"target_modules": ["q_proj", "up_proj"], **options})
    arrays = lora_arrays(config, ((row.path, row.shape) for row in FAMILY.specs(CONFIG)), FAMILY)
    write_adapter(path, config, arrays, family=FAMILY)
    return path, {name.rpartition(".")[0] for name in arrays}


def test_a_quantised_folder_runs_in_transformers_as_before(torch, folder, tmp_path):
    bitsandbytes = pytest.importorskip("bitsandbytes")
    _, before = tower_of(torch, folder)
    quantize(folder, tmp_path / "packed", skip=["layers.1.mlp.down_proj"])
    model, after = tower_of(torch, tmp_path / "packed")
    assert np.array_equal(after, before) and np.isfinite(after).all() and after.std() > 0
    kinds = {name: isinstance(module, bitsandbytes.nn.Linear4bit) for name, module in model.named_modules()}
    linear = {name: packed for name, packed in kinds.items() if name.endswith(("_proj", ".fc1", ".fc2"))}
    assert len(linear) > 2 * 7 and {name for name, packed in linear.items() if packed} == {
        name for name in linear if "language_model.layers" in name and not name.endswith("layers.1.mlp.down_proj")
    }


def test_every_writer_of_a_quantised_folder_names_what_stays_plain(torch, folder, tmp_path):
    from transformers.quantizers.quantizers_utils import should_convert_module

    quantize(folder, tmp_path / "packed")
    merge(folder, adapter(tmp_path / "adapter")[0], tmp_path / "merged", dtype="nf4")
    save(tmp_path / "saved", stream(tmp_path / "packed"), source=folder)
    modules = dict(build(torch).named_modules())
    linear = [name for name, module in modules.items() if isinstance(module, torch.nn.Linear)]
    plain = [name for name in linear if "language_model.layers" not in name]
    assert any("vision_tower" in name for name in plain) and "lm_head" in plain
    for name in ("packed", "merged", "saved"):
        skipped = open_checkpoint(tmp_path / name).config["quantization_config"]["llm_int8_skip_modules"]
        for module in linear:
            assert should_convert_module(module, skipped) == (module not in plain), (name, module)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"target_modules": "all-linear"},
        {"exclude_modules": ["up_proj"], "init_lora_weights": False},
        {"exclude_modules": r".*layers\.1\..*up_proj", "layers_to_transform": [1], "init_lora_weights": "orthogonal"},
    ],
)
def test_an_adapter_is_on_the_text_model_alone(torch, tmp_path, options):
    peft = pytest.importorskip("peft")
    path, expected = adapter(tmp_path / "adapter", **options)
    loaded = peft.PeftModel.from_pretrained(build(torch), path)
    found = {
        name.removeprefix("base_model.model.")
        for name, module in loaded.named_modules()
        if isinstance(module, peft.tuners.lora.LoraLayer)
    }
    assert found == {FAMILY.module_name(module) for module in expected} and found
    written = json.loads((path / "adapter_config.json").read_text())
    again = config_to_json(config_from_json(written, path / "adapter_config.json"), FAMILY)
    assert again == written and written["init_lora_weights"] is True
