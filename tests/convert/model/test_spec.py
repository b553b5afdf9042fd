"""One description of every weight, from which the layers' groups follow."""

import dataclasses
import itertools
import math

import pytest

from convert.errors import ConvertError
from convert.families import FAMILIES
from convert.families.mapping import read_config, with_score
from convert.model.spec import AXES
from tests.support.families import BESIDE, CONFIGS
from tests.support.family_mixtures import MIXTURES

ALL = {**CONFIGS, **MIXTURES, **BESIDE}


@pytest.mark.parametrize("family", ALL)
def test_every_weight_says_what_it_is(family):
    config = read_config(ALL[family])
    assert config.specs == FAMILIES[family].specs(ALL[family])
    assert [spec.path for spec in config.specs][0] == "embed_tokens.weight"
    grouped = {spec.path.module for spec in config.specs if spec.kind in ("matrix", "experts")}
    for spec in config.specs:
        dimensions = {"matrix": 2, "table": 2, "router": 2, "gate": 2, "experts": 3, "sinks": 1}
        wanted = 1 + spec.path.of_experts if spec.kind == "bias" else dimensions.get(spec.kind, len(spec.shape))
        assert len(spec.shape) == len(spec.axes) == wanted and set(spec.axes) <= set(AXES.values())
        bias = spec.kind in ("bias", "choice_bias", "decay")
        assert bias == (spec.init == "zeros")
        if spec.kind not in ("decay", "scale"):
            assert (bias or isinstance(spec.init, float)) == (spec.path.leaf == spec.kind)
        assert spec.path.of_experts == (spec.axes[:1] == ("expert",) and spec.path.part != "router")
        assert (spec.group is not None) == (spec.path.module in grouped)
        assert (spec.path.layer is None) == (spec.path.module in ("embed_tokens", "norm", "lm_head"))
    layers = {spec.path.layer for spec in config.specs}
    assert layers == {None, *range(config.num_hidden_layers)}
    assert config.tie_word_embeddings == ("lm_head.weight" not in [spec.path for spec in config.specs])


@pytest.mark.parametrize("family", ALL)
def test_the_weights_of_a_changed_config_are_those_of_its_file(family):
    """A grown vocabulary and another head, after the weights were asked for."""
    raw, config = ALL[family], read_config(ALL[family])
    assert config.specs and config.groups(0)
    for changes in (
        {"vocab_size": config.vocab_size + 7},
        {"tie_word_embeddings": not config.tie_word_embeddings},
    ):
        text = changes
        if "text_config" in raw:  # of two words the outer one counts
            outer = {name: value for name, value in changes.items() if name in raw}
            text = {"text_config": raw["text_config"] | changes, **outer}
        changed = dataclasses.replace(config, **changes)
        assert changed.specs == FAMILIES[family].specs(raw | text) != config.specs
    fewer = dataclasses.replace(config, num_hidden_layers=1, layers=config.layers[:1])
    assert {spec.path.layer for spec in fewer.specs} == {None, 0}
    assert [spec for spec in fewer.specs if spec.path.layer == 0] == [s for s in config.specs if s.path.layer == 0]
    try:
        scored, file = with_score(config), FAMILIES[family].scored(raw)
    except ConvertError:
        return
    assert scored.specs == FAMILIES[family].specs(file) and scored.specs[-1].kind == "score"


@pytest.mark.parametrize("family", ALL)
def test_groups_hold_every_projection_once(family):
    config = read_config(ALL[family])
    for layer in range(config.num_hidden_layers):
        groups, specs = config.groups(layer), config.layer_specs(layer)
        parts = {
            f"{group.block}.{part}": (*((group.experts,) if group.experts else ()), rows, group.columns)
            for group in groups.values()
            for part, rows in group.parts
        }
        assert parts == {spec.path.module: spec.shape for spec in specs if spec.kind in ("matrix", "experts")}
        biased = {name for name, group in groups.items() if group.bias}
        experts = {"mlp.experts.gate_up", "mlp.experts.down"} if config.moe and config.moe.bias else set()
        assert biased == config.biases & set(groups) | experts
        for group in groups.values():
            rows = [group.part_rows(part) for part, _ in group.parts]
            assert rows[0].start == 0 and rows[-1].stop == group.rows
            assert all(first.stop == second.start for first, second in itertools.pairwise(rows))
        modules = [spec.path.in_layer(layer) for spec in specs if spec.kind in ("matrix", "experts")]
        assert all(path.part in dict(config.group_of(path).parts) for path in modules)


def test_mixtures_and_dense_layers_have_their_own_weights():
    """Two of four layers of the one, a step of two less an excepted layer of the other."""
    glm, qwen = (read_config(MIXTURES[name]) for name in ("glm4_moe", "qwen2_moe"))
    assert list(glm.mixtures) == [False, False, True, True]
    assert list(qwen.mixtures) == [False, False, False, True]
    dense, sparse = ({spec.path: spec for spec in glm.layer_specs(number)} for number in (1, 2))
    assert "mlp.gate_proj.weight" in dense and not any("expert" in path or "router" in path for path in dense)
    assert set(sparse) - set(dense) == {
        *("mlp.router.weight", "mlp.router.choice_bias"),
        *(
            f"mlp.{block}.{part}_proj.weight"
            for block in ("experts", "shared_expert")
            for part in ("gate", "up", "down")
        ),
    }
    down = sparse["mlp.experts.down_proj.weight"]
    assert down.shape == (8, 32, 12) and down.axes == ("expert", "embed", "expert_mlp") and down.kind == "experts"
    assert down.name == "model.layers.2.mlp.experts.{x}.down_proj.weight" and down.layout == "apart"
    gate = next(spec for spec in qwen.layer_specs(3) if spec.kind == "gate")
    assert (gate.path, gate.shape) == ("mlp.shared_expert_gate.weight", (1, 32))
    assert glm.moe and glm.moe.shared_intermediate_size == 24 and qwen.moe and qwen.moe.shared_gate


def test_a_family_that_is_not_supported_is_refused_by_name():
    with pytest.raises(ConvertError, match="deepseek_v2 models cannot be read: its router"):
        read_config({"model_type": "deepseek_v2"})


@pytest.mark.parametrize(
    ("family", "field", "value", "expected"),
    [
        ("mixtral", "num_experts_per_tok", 5, "at most the number of experts, 4"),
        ("mixtral", "num_experts", 5, "4, as num_local_experts says"),
        ("qwen3_moe", "mlp_only_layers", "3", "a list of layer numbers"),
        ("qwen3_moe", "mlp_only_layers", [1, 3], "a mixture in at least one layer"),
        ("glm4_moe", "n_group", 3, "a divisor of 8 experts"),
        ("glm4_moe", "topk_group", 5, "at most n_group, 4"),
        ("glm4_moe", "num_experts_per_tok", 5, "at most the 4 experts of 2 groups"),
        ("glm4_moe", "first_k_dense_replace", 4, "an integer from 0 to 3"),
        ("qwen2_moe", "max_window_layers", None, "an integer from 0"),
        ("gpt_oss", "sliding_window", None, "a positive integer, as there are layers with a window"),
    ],
)
def test_a_wrong_mixture_is_named(family, field, value, expected):
    with pytest.raises(ConvertError, match=f"{field}: expected {expected}"):
        read_config(MIXTURES[family] | {field: value})


@pytest.mark.parametrize(("config", "windows"), [(CONFIGS["qwen2"], 5), (MIXTURES["qwen2_moe"], None)])
def test_windows_from_layer_0_or_in_no_layer(config, windows):
    """`max_window_layers` of 0: Qwen 2 has windows from that layer on, its mixtures in layers before it."""
    parsed = read_config(config | {"max_window_layers": 0, "layer_types": None})
    assert {mixer.sliding_window for mixer in parsed.attention} == {windows}


_ATTENTION = {"num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": False}
#: Sizes of published models, and their number of parameters in millions.
PUBLISHED = {
    "Mixtral-8x7B": (
        {"model_type": "mixtral", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336}
        | {**_ATTENTION, "num_hidden_layers": 32},
        46703,
    ),
    "Qwen1.5-MoE-A2.7B": (
        {"model_type": "qwen2_moe", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5632}
        | {"num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 16},
        14316,
    ),
    "Qwen3-30B-A3B": (
        {"model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144}
        | {**_ATTENTION, "num_hidden_layers": 48, "num_key_value_heads": 4, "head_dim": 128},
        30532,
    ),
    "OLMoE-1B-7B": (
        {"model_type": "olmoe", "vocab_size": 50304, "hidden_size": 2048, "intermediate_size": 1024}
        | {"num_hidden_layers": 16, "num_attention_heads": 16},
        6919,
    ),
    "gpt-oss-20b": (
        {"model_type": "gpt_oss", "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880}
        | {**_ATTENTION, "num_hidden_layers": 24, "num_attention_heads": 64, "num_local_experts": 32},
        20915,
    ),
    "GLM-4.5-Air": (
        {"model_type": "glm4_moe", "vocab_size": 151552, "hidden_size": 4096, "intermediate_size": 10944}
        | {**_ATTENTION, "num_hidden_layers": 46, "num_attention_heads": 96, "head_dim": 128, "attention_bias": True},
        106852,
    ),
    "DeepSeek-V3": (
        {"model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432}
        | {"num_hidden_layers": 61, "num_attention_heads": 128},
        671026,
    ),
    "Kimi-K2": (
        {"model_type": "kimi_k2", "vocab_size": 163840, "hidden_size": 7168, "intermediate_size": 18432}
        | {"num_hidden_layers": 61, "num_attention_heads": 64, "n_routed_experts": 384, "first_k_dense_replace": 1}
        | {"n_group": 1, "topk_group": 1},
        1026408,
    ),
    "GLM-4.7-Flash": (
        {"model_type": "glm4_moe_lite", "vocab_size": 154880, "hidden_size": 2048, "intermediate_size": 10240}
        | {"num_hidden_layers": 47, "num_attention_heads": 20},
        29943,
    ),
    "Mistral-Small-4": (
        {"model_type": "mistral4", "vocab_size": 131072, "hidden_size": 4096, "intermediate_size": 12288}
        | {"num_hidden_layers": 36, "num_attention_heads": 32},
        118973,
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_mixtures_have_their_number_of_parameters(name):
    config, millions = PUBLISHED[name]
    assert round(sum(math.prod(spec.shape) for spec in read_config(config).specs) / 1e6) == millions
