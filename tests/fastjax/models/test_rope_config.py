"""Rotary scaling: read from both spellings, overridden, saved, and the length that it allows."""

import pytest

from convert.checkpoint import open_checkpoint
from convert.errors import ConvertError
from convert.families.mapping import read_config
from fastjax.errors import ConfigError
from fastjax.models.rope_override import with_rope_scaling
from tests.support import tiny

YARN = {"rope_type": "yarn", "factor": 3.0, "beta_fast": 9.0, "beta_slow": 2.0, "truncate": False}
LONGROPE = {"rope_type": "longrope", "short_factor": 8 * [1.5], "long_factor": [2.0, 3, 4, 5, 6, 7, 8, 9]}
PLAIN = tiny.config(rope_parameters={"rope_type": "default", "rope_theta": 321.0})


def old_spelling(config):
    """As before transformers 5: rope_theta and rope_scaling."""
    scaling = {name: value for name, value in config["rope_parameters"].items() if name != "rope_theta"}
    rest = {name: value for name, value in config.items() if name != "rope_parameters"}
    return rest | {"rope_theta": config["rope_parameters"]["rope_theta"], "rope_scaling": scaling}


@pytest.mark.parametrize(
    ("scaling", "max_position_embeddings", "reach"),
    [
        ({"rope_type": "default"}, 192, 192),
        ({"rope_type": "linear", "factor": 3.0}, 192, 576),  # such folders keep the original length
        ({"rope_type": "dynamic", "factor": 3.0}, 192, 576),
        (LONGROPE | {"original_max_position_embeddings": 64}, 192, 192),
        (YARN | {"original_max_position_embeddings": 64}, 192, 192),
        (YARN, 192, 576),
        ({name: value for name, value in tiny.ROPE.items() if name != "rope_theta"}, 192, 192),
    ],
)
def test_the_length_that_a_folder_allows(scaling, max_position_embeddings, reach):
    config = tiny.config(
        rope_parameters={"rope_theta": 321.0, **scaling}, max_position_embeddings=max_position_embeddings
    )
    parsed = read_config(config)
    assert parsed.max_length == reach
    assert read_config(old_spelling(config)) == parsed


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize(
    ("base", "scaling", "written", "reach"),
    [
        (PLAIN, {"rope_type": "linear", "factor": 4.0}, 192, 768),
        (PLAIN, YARN, 576, 576),
        (PLAIN, {"rope_type": "dynamic", "factor": 4.0}, 192, 768),
        (PLAIN, LONGROPE | {"factor": 2.0}, 384, 384),
        (tiny.CONFIG, {"rope_type": "dynamic", "factor": 4.0}, 32, 128),
        (PLAIN, {k: v for k, v in tiny.ROPE.items() if k != "original_max_position_embeddings"}, 1152, 1152),
        (tiny.CONFIG, {"rope_type": "linear", "factor": 4.0}, 32, 128),  # the model was pretrained on 32
        (tiny.CONFIG, {"type": "yarn", "factor": 8}, 256, 256),
        (tiny.CONFIG, {"rope_type": "default"}, 32, 32),
    ],
)
def test_an_override_replaces_the_scaling(base, scaling, written, reach, old):
    config = old_spelling(base) if old else base
    changed = with_rope_scaling(config, scaling)
    before, after = read_config(config).rope, read_config(changed)
    assert after.max_length == reach and changed["max_position_embeddings"] == written
    assert after.rope.theta == scaling.get("rope_theta", before.theta)
    assert after.rope.kind == scaling.get("rope_type", scaling.get("type"))
    assert after.rope.factor == scaling.get("factor", 1.0)
    assert ("rope_scaling" in changed) == old and ("rope_parameters" in changed) == (not old)
    untouched = set(config) - {"rope_parameters", "rope_scaling", "rope_theta", "max_position_embeddings"}
    assert all(changed[name] == config[name] for name in untouched)


def test_a_model_is_trained_and_saved_with_the_override(tmp_path):
    options = {"rope_scaling": {"rope_type": "linear", "factor": 5.0}, "max_seq_length": 160, "full_finetuning": True}
    model = tiny.model(tiny.shared_folder(), tiny.CONFIG, **options)
    model.save_pretrained(tmp_path / "saved")
    saved = open_checkpoint(tmp_path / "saved").config
    assert saved["rope_parameters"] == {"rope_type": "linear", "factor": 5.0, "rope_theta": 5000.0}
    assert saved["max_position_embeddings"] == 32
    again = tiny.model(tmp_path / "saved", None, max_seq_length=160)
    assert again.config == model.config


def test_rows_longer_than_the_model():
    # stretched from the 32 positions that the model was pretrained on, not from the 192 that its own scaling allows
    with pytest.raises(ConfigError, match=r"at most the model's 192 positions, got 200; .*yarn, factor: 7.0\}"):
        tiny.model(tiny.shared_folder(), tiny.CONFIG, max_seq_length=200)
    suggested = {"rope_type": "yarn", "factor": 7.0}
    assert tiny.model(tiny.shared_folder(), tiny.CONFIG, max_seq_length=200, rope_scaling=suggested)
    assert tiny.model(tiny.shared_folder(), tiny.CONFIG, max_seq_length=None).max_seq_length == 192


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"rope_type": "ntk", "factor": 2.0}, "rope_type: expected one of .*got 'ntk'"),
        ({"rope_type": "dynamic"}, r"dynamic scaling needs the numbers \['factor'\], wrong: \['factor'\]"),
        ({"rope_type": "longrope", "short_factor": 8 * [1.0]}, r"wrong: \['long_factor'\]"),
        ({"rope_type": "longrope", "short_factor": 8 * [1.0], "long_factor": 8 * [0]}, r"wrong: \['long_factor'\]"),
        ({"rope_type": "longrope", "short_factor": 8 * [1], "long_factor": 7 * [2]}, "long_factor: expected 8 numbers"),
        ({"rope_type": "linear"}, r"linear scaling needs the numbers \['factor'\], wrong: \['factor'\]"),
        ({"rope_type": "linear", "factor": -1.0}, r"wrong: \['factor'\]"),
        ({"rope_type": "linear", "factor": 2.0, "beta_fast": 3.0}, "linear scaling takes factor, got beta_fast"),
        ({"rope_type": "yarn", "factor": 2.0, "truncate": 1}, r"wrong: \['truncate'\]"),
        ({"rope_type": "llama3", "factor": 2.0}, "low_freq_factor"),
        ({"rope_type": "default", "factor": 2.0}, "expected a rope_type of .*for instance"),
        ({"factor": 2.0}, "expected a rope_type of .*for instance"),
        ({"rope_type": "linear", "factor": 2.0, "rope_theta": "high"}, "rope_theta: expected a positive number"),
    ],
)
def test_overrides_that_are_refused(scaling, message):
    with pytest.raises(ConfigError, match=message):
        tiny.model(tiny.shared_folder(), tiny.CONFIG, rope_scaling=scaling)


def test_a_folder_with_a_scaling_that_is_not_supported_is_refused():
    for scaling in ({"rope_type": "axial"}, {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}):
        with pytest.raises(ConvertError, match="rope_parameters"):
            read_config(tiny.config(rope_parameters={"rope_theta": 321.0, **scaling}))
