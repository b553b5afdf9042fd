"""Every spelling of the rotary settings, and several at once: as transformers reads them, or refused."""

import copy

import pytest
from transformers import AutoConfig

from convert.errors import ConvertError
from convert.families import FAMILIES
from convert.families.mapping import read_config
from convert.gguf_architecture import hyper_parameters
from convert.rope import FULL, SLIDING
from fastjax.models.rope_override import with_rope_scaling
from tests.support import families, tiny

CONFIGS = {**{name: dict(config) for name, config in families.CONFIGS.items()}, "llama": families.LLAMA}
# Without numbers that no case has ministral3 has no forward pass, apertus settings of its own, phi here an odd part.
for name in ("ministral3", "apertus", "phi"):
    del CONFIGS[name]
del CONFIGS["granite_swa"]["layer_rope_theta"]  # bases by layer, whatever the settings say
_ROPE = {"rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings"}
LINEAR = {"rope_type": "linear", "factor": 2.0}
DEFAULT = {"rope_type": "default", "rope_theta": 300.0}
YARN = {"rope_type": "yarn", "factor": 4.0}
LOCAL = {"rope_type": "default", "rope_theta": 50.0}
EVERY = set(CONFIGS)
BY_LAYER = {"gemma3_text", "olmo3"}
OTHERS = EVERY - BY_LAYER
#: Families a part of whose heads turns.
IN_PART = {"glm4", "nemotron", "phi3", "qwen3_5_text"}

#: Fields of a config.json -> the families that refuse them; Phi-3 has longrope for "linear" and "yarn".
CASES = {
    "nothing": ({}, set()),
    "a base": ({"rope_theta": 300.0}, set()),
    "new": ({"rope_parameters": LINEAR | {"rope_theta": 300.0}}, BY_LAYER),
    "new, base beside": ({"rope_parameters": LINEAR, "rope_theta": 300.0}, BY_LAYER),
    "new, two bases": ({"rope_parameters": LINEAR | {"rope_theta": 300.0}, "rope_theta": 700.0}, BY_LAYER),
    "new, no base": ({"rope_parameters": LINEAR}, BY_LAYER),
    "new, by type": ({"rope_parameters": {"type": "linear", "factor": 2.0, "rope_theta": 300.0}}, BY_LAYER),
    "new, flat as the default": ({"rope_parameters": DEFAULT, "rope_theta": 300.0}, set()),
    "old": ({"rope_scaling": LINEAR, "rope_theta": 300.0}, set()),
    "old, base inside": ({"rope_scaling": LINEAR | {"rope_theta": 300.0}}, set()),
    "old, two bases": ({"rope_scaling": LINEAR | {"rope_theta": 300.0}, "rope_theta": 700.0}, set()),
    "old, no base": ({"rope_scaling": LINEAR}, set()),
    "old, by type": ({"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 300.0}, BY_LAYER),
    "old, beside null": ({"rope_parameters": None, "rope_scaling": LINEAR, "rope_theta": 300.0}, set()),
    "two types that agree": ({"rope_scaling": LINEAR | {"type": "linear"}}, set()),
    "a null type": ({"rope_scaling": LINEAR | {"type": None}}, set()),
    "a null rope_type": ({"rope_scaling": {"rope_type": None, "type": "linear", "factor": 2.0}}, EVERY),
    "two types": ({"rope_scaling": LINEAR | {"type": "default"}}, EVERY),
    "two types, default first": ({"rope_scaling": LINEAR | {"rope_type": "default", "type": "linear"}}, EVERY),
    "two types, new": ({"rope_parameters": LINEAR | {"type": "dynamic"}}, EVERY),
    "both, empty": ({"rope_parameters": LINEAR | {"rope_theta": 300.0}, "rope_scaling": {}}, BY_LAYER),
    "both, null": ({"rope_parameters": LINEAR | {"rope_theta": 300.0}, "rope_scaling": None}, BY_LAYER),
    "both, equal": (
        {"rope_parameters": LINEAR | {"rope_theta": 300.0}, "rope_scaling": LINEAR, "rope_theta": 300.0},
        set(),
    ),
    "both, equal with their bases": (
        {"rope_parameters": LINEAR | {"rope_theta": 300.0}, "rope_scaling": LINEAR | {"rope_theta": 300.0}},
        set(),
    ),
    "both, the base in one": ({"rope_parameters": LINEAR | {"rope_theta": 300.0}, "rope_scaling": LINEAR}, EVERY),
    "both, other types": ({"rope_parameters": DEFAULT, "rope_scaling": YARN, "rope_theta": 300.0}, EVERY),
    "both, other factors": (
        {"rope_parameters": LINEAR | {"factor": 3.0}, "rope_scaling": LINEAR, "rope_theta": 300.0},
        EVERY - {"phi3"},  # whose longrope has lists
    ),
    "by layer": ({"rope_parameters": {FULL: LINEAR | {"rope_theta": 300.0}, SLIDING: LOCAL}}, OTHERS),
    "by layer, bases beside": (
        {"rope_parameters": {FULL: LINEAR, SLIDING: {}}, "rope_theta": 300.0, "rope_local_base_freq": 50.0},
        OTHERS | {"olmo3"},  # which has no such field
    ),
    "by layer, one kind": ({"rope_parameters": {FULL: LINEAR | {"rope_theta": 300.0}}}, OTHERS),
    "by layer, one null": ({"rope_parameters": {FULL: LINEAR, SLIDING: None}}, OTHERS),
    "by layer, and flat": ({"rope_parameters": {FULL: DEFAULT, SLIDING: LOCAL, **DEFAULT}}, OTHERS),
    "by layer, and flat otherwise": ({"rope_parameters": {FULL: DEFAULT, SLIDING: LOCAL, **LINEAR}}, EVERY),
    "by layer, and old that agrees": (
        {"rope_parameters": {FULL: LINEAR | {"rope_theta": 300.0}, SLIDING: LOCAL}, "rope_scaling": LINEAR},
        OTHERS,
    ),
    "by layer, and old": ({"rope_parameters": {FULL: DEFAULT, SLIDING: LOCAL}, "rope_scaling": LINEAR}, EVERY),
    "a part that turns": ({"rope_parameters": DEFAULT | {"partial_rotary_factor": 0.75}}, BY_LAYER),
    "a part beside": ({"rope_theta": 300.0, "partial_rotary_factor": 0.75}, set()),
    "a part, scaled": ({"rope_scaling": LINEAR, "partial_rotary_factor": 0.75}, EVERY - IN_PART | {"phi3"}),
    "the whole": ({"rope_scaling": LINEAR, "partial_rotary_factor": 1.0}, set()),
    "an original length, default": ({"rope_theta": 300.0, "original_max_position_embeddings": 40}, set()),
    "an original length, linear": (
        {"rope_scaling": LINEAR | {"original_max_position_embeddings": 40}, "original_max_position_embeddings": 50},
        set(),
    ),
    "an original length inside": ({"rope_scaling": YARN | {"original_max_position_embeddings": 40}}, set()),
    "an original length twice": (
        {"rope_scaling": YARN | {"original_max_position_embeddings": 40}, "original_max_position_embeddings": 40},
        set(),
    ),
    "two original lengths": (
        {"rope_scaling": YARN | {"original_max_position_embeddings": 40}, "original_max_position_embeddings": 50},
        EVERY - {"phi3"},  # where the one beside it counts
    ),
    "an original length beside": (
        {"rope_scaling": YARN, "original_max_position_embeddings": 40},
        EVERY - {"phi3"},
    ),
    "llama3 without an original length": (
        {"rope_scaling": {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}},
        set(),
    ),
}


def config_of(family, fields):
    """A family's config with these rotary fields; longrope in Phi-3, which has nothing else."""

    def longrope(value):
        if not isinstance(value, dict):
            return value
        if "factor" not in value:
            return value
        kept = {name: one for name, one in value.items() if "factor" not in name}
        kept = {name: "longrope" if one in ("linear", "yarn", "llama3") else one for name, one in kept.items()}
        return kept | {"short_factor": 4 * [1.0], "long_factor": 4 * [2.0]}

    rest = {name: value for name, value in CONFIGS[family].items() if name not in _ROPE}
    if family == "phi3":
        fields = {name: longrope(value) for name, value in fields.items()}
        fields = {"original_max_position_embeddings": 20} | fields
    return copy.deepcopy(rest | fields)


def theirs(config):
    """transformers' settings as a model takes them, which standardises them once more; by layer or for all."""
    fields = {name: value for name, value in copy.deepcopy(config).items() if name != "model_type"}
    parsed = AutoConfig.for_model(config["model_type"], **fields)
    parsed.standardize_rope_params()
    found = parsed.rope_parameters
    return {"rope": found[FULL], "local_rope": found[SLIDING]} if FULL in found else {"rope": found}


@pytest.mark.parametrize("case", CASES)
def test_as_transformers_reads_it_or_refused(case):
    fields, refusing = CASES[case]
    for family in CONFIGS:
        config = config_of(family, fields)
        if family in refusing:
            with pytest.raises(ConvertError, match="^config.json: .*(rope|original_max_position_embeddings)"):
                read_config(config)
            continue
        found = read_config(config)
        if case.startswith("both, equal") and family in BY_LAYER:
            continue  # a KeyError in transformers
        for name, values in theirs(config).items():
            rope = getattr(found, name)
            assert (rope.kind, rope.theta) == (values["rope_type"], values["rope_theta"]), (family, name)
            if rope.kind in ("linear", "llama3", "yarn"):
                assert rope.factor == values["factor"], (family, name)
            if rope.kind in ("llama3", "yarn", "longrope"):
                original = values["original_max_position_embeddings"]
                assert rope.original_max_position_embeddings == original, (family, name)
            turning = values.get("partial_rotary_factor") if family in IN_PART else 1
            assert rope.partial_rotary_factor == turning, (family, name)


@pytest.mark.parametrize("case", [case for case, (_, refusing) in CASES.items() if "llama" in refusing])
def test_a_gguf_file_is_refused_alike(case):
    config = config_of("llama", CASES[case][0]) | {"hidden_act": "silu"}
    with pytest.raises(ConvertError, match="(rope|original_max_position_embeddings|partial_rotary_factor)"):
        hyper_parameters(FAMILIES["llama"], config, "config.json")


def test_disagreement_says_which_field_and_the_way_out():
    config = tiny.config(rope_parameters=DEFAULT, rope_scaling=YARN)
    message = r"rope_scaling: .*transformers takes rope_scaling alone.*rope_theta \(10000.0, 300.0\).*remove one"
    with pytest.raises(ConvertError, match=message):
        read_config(config)


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_parameters": None, "rope_theta": 300.0},
        {"rope_parameters": DEFAULT, "rope_scaling": None},
        {"rope_parameters": DEFAULT, "rope_theta": 300.0, "original_max_position_embeddings": 33},
    ],
)
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_an_override_of_any_spelling(fields, family):
    config = config_of(family, {"rope_theta": 300.0, **fields})
    changed = with_rope_scaling(config, {"rope_type": "yarn", "factor": 4.0})
    found = read_config(changed).rope
    assert (found.kind, found.theta, found.factor) == ("yarn", 300.0, 4.0)
    assert theirs(changed)["rope"].items() >= {"rope_type": "yarn", "rope_theta": 300.0, "factor": 4.0}.items()


@pytest.mark.parametrize("family", ["gemma3_text", "olmo3"])
def test_what_transformers_reads_past_by_kind_of_layer_is_refused(family):
    full = YARN | {"rope_theta": 300.0, "original_max_position_embeddings": 40, "truncate": False}
    for field in ({"rope_parameters": {FULL: full, SLIDING: LOCAL}}, {"rope_scaling": full}):
        with pytest.raises(ConvertError, match="truncate: expected true or nothing: by kind of layer transformers"):
            read_config(config_of(family, field))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"alpha": "x"}, "alpha: expected a number"),
        ({"alpha": -1.0}, "alpha: expected a number"),
        ({"alpha": 5.0, "rope_theta": [1]}, "rope_theta: expected a number"),
        ({"alpha": 5.0, "low_freq_factor": 2.0}, r"expected alpha, and beside it .* alone, got \['low_freq_factor'\]"),
    ],
)
def test_a_stretched_base_that_is_wrong(fields, message):
    config = config_of("hunyuan_v1_dense", {"rope_parameters": {"rope_type": "dynamic", "factor": 1.0} | fields})
    with pytest.raises(ConvertError, match=message):
        read_config(config)
    stretched = {"rope_parameters": {"rope_type": "dynamic", "factor": 1.0, "alpha": 5.0}}
    with pytest.raises(ConvertError, match="head_dim: expected 4 or more, with alpha, got 2"):
        read_config(config_of("hunyuan_v1_dense", stretched) | {"head_dim": 2})
