"""One definition of an adapter's settings: the section `lora` and `get_peft_model` have its names and defaults."""

import dataclasses
import inspect

import pytest

from convert.adapter_config import AdapterConfig
from convert.families.mapping import read_config
from fastjax.errors import ConfigError
from fastjax.language_model import FastLanguageModel
from fastjax.lora.settings import LoraSettings, fresh_adapter
from fastjax.lora.sites import adapter_sites
from fastjax.lora.usual_names import with_usual_names
from fastjax.training.config import LoraSection
from tests.support.families import CONFIGS
from tests.support.family_mixtures import MIXTURES

SETTINGS = {field.name: field.default for field in dataclasses.fields(LoraSettings)}


def test_the_section_adds_an_adapter_to_start_from():
    section = {field.name: field.default for field in dataclasses.fields(LoraSection)}
    assert list(section.items()) == [("adapter", None), *SETTINGS.items()]


def test_get_peft_model_takes_the_same():
    parameters = inspect.signature(FastLanguageModel.get_peft_model).parameters
    found = {name: parameter.default for name, parameter in parameters.items()}
    assert found.pop("model") is inspect.Parameter.empty and found.pop("use_gradient_checkpointing") is None
    assert found.pop("qat_scheme") is None  # of the model, not of its adapter
    assert found == SETTINGS | {"lora_dropout": 0.0}  # what null means without an adapter to start from


def test_all_others_are_pefts():
    assert SETTINGS.keys() - {field.name for field in dataclasses.fields(AdapterConfig)} == {"bias", "random_state"}


@pytest.mark.parametrize(
    ("config", "modules", "parameters"),
    [
        (CONFIGS["phi3"], ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"], None),
        (MIXTURES["gpt_oss"], [f"{x}_proj" for x in "qkvo"], ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]),
        (CONFIGS["qwen3"], [*(f"{x}_proj" for x in "qkvo"), "gate_proj", "up_proj", "down_proj"], None),
    ],
)
def test_llamas_names_in_models_that_hold_the_matrices_otherwise(config, modules, parameters):
    listed = [f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")]
    config = read_config(config)
    settings, note = with_usual_names(LoraSettings(target_modules=listed, lora_dropout=0.0), config)
    assert (settings.target_modules, settings.target_parameters) == (modules, parameters)
    assert (note is None) == (settings.target_modules == listed)
    fresh_adapter(config, settings)
    assert with_usual_names(LoraSettings(target_modules=["x_proj"]), config)[1] is None


def test_a_routers_rank_and_scale_go_by_its_parameters_name():
    config, targets = read_config(MIXTURES["qwen3_moe"]), {"target_modules": ["q_proj"], "r": 4}
    targets["target_parameters"] = ["gate.weight"]
    patterns = {"rank_pattern": {"gate.weight": 2}, "alpha_pattern": {"mlp.gate.weight": 3}}
    adapter = fresh_adapter(config, LoraSettings(**targets, **patterns))
    sites = {(site.path.part, site.rank, site.scaling) for site in adapter_sites(adapter, config)}
    assert sites == {("q_proj", 4, 4.0), ("router", 2, 1.5)}
    with pytest.raises(ConfigError, match=r"alpha_pattern: .* got \['mlp.gate'\], .* there are .*mlp.gate.weight"):
        fresh_adapter(config, LoraSettings(**targets, alpha_pattern={"mlp.gate": 3}))


def test_dora_is_refused_where_peft_holds_an_adapter_on_a_weight():
    config = read_config(MIXTURES["glm4_moe"])
    assert fresh_adapter(config, LoraSettings(use_dora=True, target_modules=["q_proj"])).use_dora
    with pytest.raises(
        ConfigError, match=r"use_dora: expected false, .* without .*layers.2.mlp.shared_experts.up_proj"
    ):
        fresh_adapter(config, LoraSettings(use_dora=True, target_modules=["q_proj", "shared_experts.up_proj"]))
    fresh_adapter(read_config(MIXTURES["qwen2_moe"]), LoraSettings(use_dora=True))
