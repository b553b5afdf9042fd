"""The sentence for a value that no config.json should hold; tests/fuzz walks over all fields and values."""

import numpy as np
import pytest

from convert.errors import ConvertError
from convert.families.mapping import read_config
from convert.model.rope import BY_LENGTH
from fastjax.models.rotary import frequencies_by_length
from tests.support import families


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_size": float("inf")}, "config.json: hidden_size: expected a positive integer, got inf"),
        ({"rms_norm_eps": float("nan")}, "config.json: rms_norm_eps: expected a number >= 0 and below 1e30, got nan"),
        ({"vocab_size": 2**70}, "config.json: vocab_size: expected a positive integer below 2³¹, got 11805"),
        (
            {"rope_parameters": {}, "rope_theta": [1]},
            r"config.json: rope_theta: expected a positive number, got \[1\]",
        ),
        ({"rope_parameters": "linear"}, "config.json: rope_parameters: expected an object or null, got 'linear'"),
        ({"rope_parameters": {"rope_type": 3}}, "config.json: rope_parameters.rope_type: expected a string, got 3"),
        ({"hidden_act": ["silu"]}, r"config.json: hidden_act: expected one of \[.*\], got \['silu'\]"),
        ({"layer_types": [[]]}, "config.json: layer_types: expected 3 of full_attention and sliding_attention"),
        ({"attention_dropout": 1}, "config.json: attention_dropout: expected a number from 0 to below 1, got 1"),
        ({"num_hidden_layers": 2**62}, "config.json: num_hidden_layers: expected"),
    ],
)
def test_the_sentence_names_file_field_expected_and_got(fields, message):
    with pytest.raises(ConvertError, match=f"^{message}"):
        read_config(families.LLAMA | fields)


def test_frequencies_by_length_of_the_smallest_heads():
    for kind in BY_LENGTH:
        lists = {name: 2 * [1.0] for name in ("short_factor", "long_factor") if kind == "longrope"}
        rope = {"rope_type": kind, "rope_theta": 300.0, "factor": 2.0, **lists}
        parsed = read_config(families.LLAMA | {"head_dim": 4, "rope_parameters": rope})
        lengths = np.full((1, 2), 400, np.int32)
        assert np.isfinite(np.asarray(frequencies_by_length(parsed.rope, 4, lengths))).all()
    with pytest.raises(ConvertError, match="4 or more, got 2"):
        rope = {"rope_type": "dynamic", "rope_theta": 300.0, "factor": 2.0}
        read_config(families.LLAMA | {"head_dim": 2, "rope_parameters": rope})
