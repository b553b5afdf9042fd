"""adapter_config.json: what is accepted, what is refused by name, and PEFT's rules for names, ranks and scales."""

import dataclasses
import itertools
import json
import math
import re

import pytest

from convert.adapter_config import AdapterConfig, config_from_json, config_to_json, rank_and_alpha, scaling, targets
from convert.errors import ConvertError
from convert.families import FAMILIES

Q = "model.layers.0.self_attn.q_proj"
MODULES = [
    "model",
    "model.embed_tokens",
    "model.norm",
    "lm_head",
    *itertools.chain.from_iterable(
        [
            f"model.layers.{i}",
            f"model.layers.{i}.self_attn",
            *(f"model.layers.{i}.self_attn.{name}_proj" for name in "qkvo"),
            *(f"model.layers.{i}.mlp.{name}_proj" for name in ("gate", "up", "down")),
            f"model.layers.{i}.input_layernorm",
        ]
        for i in (0, 1, 2, 11)
    ),
]


def read(**changes):
    return config_from_json({"peft_type": "LORA", "target_modules": ["q_proj"]} | changes, "some/adapter_config.json")


def test_written_settings_are_read_back():
    config = AdapterConfig(
        r=4,
        lora_alpha=7.5,
        lora_dropout=0.1,
        target_modules=["q_proj", "embed_tokens"],
        exclude_modules="lm_.*",
        modules_to_save=["lm_head"],
        layers_to_transform=[0, 2],
        layers_pattern="layers",
        rank_pattern={"q_proj": 3},
        alpha_pattern={r"layers\.1\..*": 2},
        use_rslora=True,
        use_dora=True,
        init_lora_weights="orthogonal",
        ensure_weight_tying=True,
        base_model_name_or_path="some/model",
        revision="main",
    )
    written = config_to_json(config)
    assert written["peft_type"] == "LORA" and written["inference_mode"] and written["bias"] == "none"
    back = config_from_json(json.loads(json.dumps(written)), "adapter_config.json")
    # PEFT starts an adapter anew before it loads one, and not every start is harmless
    assert back == dataclasses.replace(config, inference_mode=True, init_lora_weights=True)


def test_fields_that_are_off_are_accepted():
    config = read(
        bias="none",
        loftq_config={},
        megatron_core="megatron.core",
        qalora_group_size=16,
        use_qalora=False,
        eva_config=None,
        trainable_token_indices=None,
        auto_mapping={"base_model_class": "LlamaForCausalLM"},
        rank_pattern=None,
        a_field_of_tomorrow=None,
        another_one=False,
    )
    assert config == AdapterConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("bias", "all"),
        ("fan_in_fan_out", True),
        ("lora_bias", True),
        ("layer_replication", [[0, 2]]),
        ("target_parameters", "mlp.experts.down_proj"),
        ("target_parameters", ["self_attn.q_proj.weight"]),
        ("trainable_token_indices", [-1]),
        ("trainable_token_indices", {"embed_tokens": 3}),
        ("loftq_config", {"loftq_bits": 4}),
        ("megatron_config", {"a": 1}),
        ("use_qalora", True),
        ("eva_config", {"rho": 2.0}),
        ("alora_invocation_tokens", [1, 2]),
        ("arrow_config", {"top_k": 3}),
        ("velora_config", {"num_groups": 4}),
        ("kasa_config", {"beta": 1}),
        ("a_field_of_tomorrow", True),
        ("a_field_of_tomorrow", "on"),
        ("peft_type", "LOHA"),
        ("init_lora_weights", "pissa"),
        ("init_lora_weights", None),
        ("r", 0),
        ("r", 2.0),
        ("r", True),
        ("lora_alpha", "16"),
        ("lora_alpha", float("inf")),
        ("lora_dropout", 1.0),
        ("lora_dropout", -0.1),
        ("target_modules", None),
        ("target_modules", [1]),
        ("target_modules", "(q_proj"),
        ("exclude_modules", "["),
        ("modules_to_save", "lm_head"),
        ("modules_to_save", ["(lm_head"]),
        ("layers_to_transform", ["0"]),
        ("layers_to_transform", -1),
        ("layers_pattern", "layers"),
        ("rank_pattern", {"q_proj": 0}),
        ("rank_pattern", {"(": 2}),
        ("alpha_pattern", ["q_proj"]),
        ("use_dora", 1),
        ("use_rslora", "true"),
        ("ensure_weight_tying", None),
        ("base_model_name_or_path", 3),
    ],
)
def test_what_is_not_supported_is_refused_by_name(field, value):
    with pytest.raises(ConvertError, match=rf"^some/adapter_config\.json: {field}: expected .*, got ") as caught:
        read(**{field: value})
    given = (
        next(iter(value)) if field in ("modules_to_save", "rank_pattern") and "regular" in str(caught.value) else value
    )
    assert repr(given) in str(caught.value)


def test_flags_of_an_expression_are_kept_beside_a_vision_tower():
    config = AdapterConfig(target_modules=r"(?i).*Q_PROJ", exclude_modules=r"(?i).*LAYERS\.1\..*")
    written = config_to_json(config, FAMILIES["gemma3"])
    again = config_from_json(json.loads(json.dumps(written)), "adapter_config.json")
    assert [module for module in MODULES if targets(again, module)] == [
        f"model.layers.{number}.self_attn.q_proj" for number in (0, 2, 11)
    ]
    assert re.fullmatch(written["exclude_modules"], "model.vision_tower.layers.0.self_attn.q_proj")


def test_layers_cannot_be_chosen_twice():
    for changes in ({"layers_to_transform": 1}, {"layers_to_transform": [1], "layers_pattern": "layers"}):
        with pytest.raises(ConvertError, match="layers_to_transform: expected null, since target_modules is a string"):
            AdapterConfig(target_modules="all-linear", **changes)


def test_ranks_and_scales():
    config = AdapterConfig(
        r=8,
        lora_alpha=16,
        target_modules=["q_proj"],
        rank_pattern={r"layers\.[12]\.self_attn\.q_proj": 4, "q_proj": 2, "proj": 64},
        alpha_pattern={"model.layers.0.self_attn.q_proj": 3},
    )
    assert rank_and_alpha(config, Q) == (2, 3) and scaling(config, Q) == 1.5
    assert rank_and_alpha(config, Q.replace("0", "1")) == (4, 16)
    assert rank_and_alpha(config, "model.layers.0.self_attn.k_proj") == (8, 16)
    stable = dataclasses.replace(config, use_rslora=True)
    assert scaling(stable, Q) == 3 / math.sqrt(2)


def test_which_modules_are_meant():
    def meant(**settings):
        config = AdapterConfig(**settings)
        return [module for module in MODULES if targets(config, module)]

    assert meant(target_modules=["q_proj"], layers_to_transform=1) == ["model.layers.1.self_attn.q_proj"]
    assert meant(target_modules=["lm_head", "embed_tokens"]) == ["model.embed_tokens", "lm_head"]
    assert meant(target_modules=["lm_head", "embed_tokens"], modules_to_save=["embed_tokens"]) == ["lm_head"]
    assert len(meant(target_modules="ALL-linear")) == 4 * 7
    assert meant(target_modules="all-linear", exclude_modules=["self_attn.v_proj", "mlp.up_proj"]) == [
        module for module in meant(target_modules="all-linear") if "v_proj" not in module and "up_proj" not in module
    ]
    assert meant(target_modules=r".*\.1\.mlp\.(up|down)_proj") == [
        f"model.layers.1.mlp.{n}_proj" for n in ("up", "down")
    ]
    assert meant(target_modules=[]) == []


MATCHING = [
    {"target_modules": ["q_proj", "up_proj"]},
    {"target_modules": ["proj", "self_attn.k_proj", "layers.1.mlp.up_proj"]},
    {"target_modules": ["q_proj", "embed_tokens", "lm_head"], "layers_to_transform": [1, 11]},
    {"target_modules": ["q_proj", "model.layers.0.mlp.up_proj", "lm_head"], "layers_to_transform": 2},
    {"target_modules": ["q_proj"], "layers_to_transform": []},
    {"target_modules": ["q_proj"], "layers_to_transform": [0, 1], "layers_pattern": "layers"},
    {"target_modules": ["q_proj"], "layers_to_transform": [0, 1], "layers_pattern": ["h", "layers"]},
    {"target_modules": ["q_proj"], "layers_to_transform": [0], "layers_pattern": ["h"]},
    {"target_modules": ["v_proj", "lm_head"], "exclude_modules": ["layers.1.self_attn.v_proj"]},
    {"target_modules": ["v_proj", "lm_head"], "exclude_modules": r".*\.1\..*|lm_head"},
    {"target_modules": r".*\.(q|k)_proj|lm_head"},
    {"target_modules": r"(?i).*\.(Q|k)_PROJ", "exclude_modules": r"(?i).*LAYERS\.1\..*"},
    {"target_modules": r"model\.layers\.\d+\.mlp\..*", "modules_to_save": ["lm_head"]},
    {"target_modules": ["q_proj", "embed_tokens"], "modules_to_save": ["embed_tokens", "layers.1"]},
]
PATTERNS = [
    {},
    {"rank_pattern": {"q_proj": 3}, "alpha_pattern": {"model.layers.1.self_attn.q_proj": 5}},
    {"rank_pattern": {r"layers\.1\..*": 3, "q_proj": 4, "proj": 9}, "alpha_pattern": {"self_attn": 5, "[qk]_proj": 6}},
    {"rank_pattern": {"^model.layers.0.self_attn.q_proj": 7}, "use_rslora": True},
]


@pytest.mark.torch
@pytest.mark.parametrize("settings", MATCHING)
def test_targets_are_pefts(settings):
    pytest.importorskip("torch")
    peft = pytest.importorskip("peft")
    check = pytest.importorskip("peft.tuners.tuners_utils").check_target_module_exists
    theirs, ours = peft.LoraConfig(**settings), AdapterConfig(**settings)
    excluded = pytest.importorskip("peft.tuners.tuners_utils")._ExcludedModule
    for module in MODULES:
        result = check(theirs, module)
        expected = bool(result) and not isinstance(result, excluded)
        assert targets(ours, module) == expected, module


@pytest.mark.torch
@pytest.mark.parametrize("settings", PATTERNS)
def test_ranks_are_pefts(settings):
    pytest.importorskip("torch")
    key = pytest.importorskip("peft.utils.other").get_pattern_key
    config = AdapterConfig(target_modules=["q_proj"], **settings)
    for module in MODULES:
        rank = config.rank_pattern.get(key(config.rank_pattern, module), config.r)
        alpha = config.alpha_pattern.get(key(config.alpha_pattern, module), config.lora_alpha)
        assert rank_and_alpha(config, module) == (rank, alpha)


def test_weights_of_modules_in_a_file_are_modules_here():
    """Their rank is found by the weight's name, as PEFT finds it."""
    weight = "model.layers.0.mlp.gate_proj.weight"
    parameters = {"target_parameters": ["mlp.gate.weight", weight]}
    config = read(**parameters, rank_pattern={re.escape(weight): 3, r"layers\.0\.mlp.*": 3})
    assert config.target_modules == ["q_proj", "model.layers.0.mlp.gate_proj"]
    assert config.target_parameters == ["mlp.gate.weight"]
    with pytest.raises(ConvertError, match="expected the same rank and alpha for model.layers.0.mlp.gate_proj and"):
        read(**parameters, rank_pattern={"gate_proj": 3})
    with pytest.raises(ConvertError, match="target_parameters: expected parameters of experts or routers"):
        read(target_parameters=["gate_proj.weight"])


@pytest.mark.torch
def test_every_field_of_peft_is_known_by_its_default(tmp_path):
    pytest.importorskip("torch")
    peft = pytest.importorskip("peft")
    theirs = peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")
    theirs.save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config_from_json(raw, "adapter_config.json") == AdapterConfig(target_modules=["q_proj"])
    (tmp_path / "adapter_config.json").write_text(json.dumps(config_to_json(AdapterConfig(target_modules=["q_proj"]))))
    back = peft.LoraConfig.from_pretrained(tmp_path)
    assert back == dataclasses.replace(theirs, inference_mode=True)
    for field in dataclasses.fields(AdapterConfig):
        assert hasattr(theirs, field.name)
        if field.name not in ("target_modules", "task_type"):
            assert getattr(AdapterConfig(), field.name) == getattr(peft.LoraConfig(), field.name)
