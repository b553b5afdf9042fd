"""config.json of every family: each field, and pairs of fields, with values that no file should hold.

`pytest tests/fuzz --fuzz 20000 -rP` tries more of every kind and shows the counts.
"""

import itertools
import random

import numpy as np
import pytest

from convert.errors import ConvertError
from convert.families import FAMILIES, family_for
from convert.families.mapping import read_config
from convert.gguf_architecture import ARCHITECTURES, hyper_parameters
from fastjax.errors import ConfigError
from fastjax.models.rope_override import with_rope_scaling
from fastjax.models.rotary import inverse_frequencies
from tests.support import families, hostile
from tests.support.fuzz import fuzz

VALUES = (*hostile.VALUES, hostile.UNWRITABLE)
#: Fields that a model has though its config may leave them out.
FURTHER = (
    *("rope_scaling", "rope_theta", "rope_local_base_freq", "partial_rotary_factor", "layer_types", "sliding_window"),
    *("sliding_window_pattern", "original_max_position_embeddings", "attention_dropout", "head_dim", "model_type"),
    *("hidden_act", "hidden_activation", "max_window_layers", "model_max_length", "no_rope_layer_interval"),
    *("num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size", "mlp_only_layers"),
    *("attention_bias", "mlp_bias", "logit_scale", "logits_scaling", "use_qk_norm", "clip_qkv", "text_config"),
)
SETTINGS = (
    *("rope_type", "type", "rope_theta", "factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"),
    *("original_max_position_embeddings", "attention_factor", "short_factor", "long_factor", "mscale"),
    *("mscale_all_dim", "truncate", "partial_rotary_factor", "full_attention", "sliding_attention", "anything"),
)
KINDS = {
    "default": {},
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "llama3": {"factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": {"factor": 2.0, "original_max_position_embeddings": 40},
    "longrope": {"short_factor": 4 * [1.0], "long_factor": 4 * [2.0], "original_max_position_embeddings": 40},
}
CONFIGS = {
    **families.CONFIGS,
    **families.MIXTURES,
    "llama": families.LLAMA | {"head_dim": 8},
    **families.BESIDE,
    "qwen3_5": {"model_type": "qwen3_5", "text_config": families.CONFIGS["qwen3_5_text"]},
    "qwen3_5_moe": {"model_type": "qwen3_5_moe", "text_config": families.MIXTURES["qwen3_5_moe_text"]},
    "kimi_k2": families.MIXTURES["deepseek_v3"] | {"model_type": "kimi_k2"},
}
#: Where each of three families has its rotary settings.
SPELLINGS = {
    "llama": lambda settings: {"rope_parameters": settings},
    "phi3": lambda settings: {"rope_parameters": None, "rope_scaling": settings},
    "gemma3_text": lambda settings: {
        "rope_parameters": {"full_attention": settings, "sliding_attention": {"rope_theta": 50.0}}
    },
}


def read(config):
    """Everything that reads a config.json before there is a model; whether it was accepted."""
    try:
        parsed = read_config(config)
    except ConvertError as error:
        assert str(error).startswith("config.json: ") and len(str(error)) < 1500, str(error)[:300]
        accepted = False
    else:
        assert isinstance(parsed.max_length, int)
        family_for(config).specs(config)
        for rope in {parsed.rope, parsed.local_rope} - {None}:
            found = inverse_frequencies(rope, parsed.head_dim)
            assert found.size and np.isfinite(found).all() and np.isfinite(rope.attention_factor)
        accepted = True
    if config["model_type"] in list(ARCHITECTURES):
        refused_or_written(config)
    return accepted


def refused_or_written(config):
    """Likewise the reader for GGUF."""
    try:
        found = hyper_parameters(family_for(config), config, "config.json")
    except ConvertError as error:
        assert str(error).startswith("config.json: ") and len(str(error)) < 1500, str(error)[:300]
        return
    for value in found.keys.values():
        assert not isinstance(value, float) or np.isfinite(value), found.keys


def changed(config, field, value):
    """The config with a field of it, or of its text half, at a value."""
    if "text_config" in config and field not in ("text_config", "model_type"):
        if not isinstance(config["text_config"], dict):  # a pair's other field
            return config
        return config | {"text_config": config["text_config"] | {field: value}}
    return config | {field: value}


def walk(*parts):
    """All combinations, in an order that mixes them."""
    found = list(itertools.product(*parts))
    random.Random(0).shuffle(found)
    return found


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of numbers that are far from any model's
def test_every_field_and_pairs_of_fields(pytestconfig):
    fields = {name: sorted({*config, *FURTHER, *config.get("text_config", ())}) for name, config in CONFIGS.items()}
    single = walk([(family, field) for family in CONFIGS for field in fields[family]], range(len(VALUES)))

    def make(draw, number):
        if number % 2 == 0:
            (family, field), value = single[number // 2 % len(single)]
            return changed(CONFIGS[family], field, VALUES[value])
        family = draw.choice(list(CONFIGS))
        given = CONFIGS[family]
        for field in draw.sample(fields[family], 2):
            given = changed(given, field, draw.choice(VALUES))
        return given

    count = 2 * pytestconfig.getoption("--fuzz")
    fuzz("config.json", count, make, read, (), known=CONFIGS.values())


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_every_rotary_setting(pytestconfig):
    places = walk(SPELLINGS, KINDS, SETTINGS, range(len(VALUES)))

    def rotary(family, kind, **settings):
        sizes = {} if family == "phi3" else {"head_dim": 8}
        settings = {"rope_type": kind, "rope_theta": 300.0, **KINDS[kind], **settings}
        return CONFIGS[family] | sizes | SPELLINGS[family](settings)

    def make(draw, number):
        family, kind, name, value = places[number // 2 % len(places)]
        also = {draw.choice(SETTINGS): draw.choice(VALUES)} if number % 2 else {}
        return rotary(family, kind, **{name: VALUES[value]} | also)

    known = [rotary(family, kind) for family in SPELLINGS for kind in KINDS if (family, kind) != ("phi3", "yarn")]
    fuzz("rotary settings", pytestconfig.getoption("--fuzz"), make, read, (), known)


def test_every_setting_of_an_override(pytestconfig):
    places = walk(KINDS, SETTINGS, range(len(VALUES)))

    def make(draw, number):
        kind, name, value = places[number // 2 % len(places)]
        also = {draw.choice(SETTINGS): draw.choice(VALUES)} if number % 2 else {}
        return {"rope_type": kind, **KINDS[kind], name: VALUES[value]} | also

    def override(scaling):
        try:
            with_rope_scaling(CONFIGS["llama"], scaling)
        except ConfigError as error:
            assert len(str(error)) < 1500
            return False

    known = [{"rope_type": kind, **settings} for kind, settings in KINDS.items()]
    fuzz("model.rope_scaling", pytestconfig.getoption("--fuzz") // 2, make, override, (), known)


def test_every_family_is_walked():
    assert set(CONFIGS) == set(FAMILIES)
