"""adapter_config.json: damaged, and with values put in; what is read finds its targets and is written again."""

import dataclasses
import json
import math

from convert.adapter_config import AdapterConfig, config_from_json, config_to_json, scaling, targets
from convert.errors import ConvertError
from convert.files import read_json
from tests.support import hostile
from tests.support.fuzz import fuzz

MODULES = ("model.layers.11.self_attn.q_proj", "model.layers.2.mlp.up_proj", "model.embed_tokens", "lm_head")
BASE = config_to_json(AdapterConfig(target_modules=["q_proj", "up_proj"])) | {
    "rank_pattern": {"q_proj": 4},
    "alpha_pattern": {r".*\.up_proj": 3.5},
    "modules_to_save": ["lm_head"],
    "layers_to_transform": [2, 11],
    "layers_pattern": "layers",
    "exclude_modules": ["vision"],
    "trainable_token_indices": {"embed_tokens": [1, 2]},
    "loftq_config": {},
    "lora_bias": False,
}
EXPRESSIONS = (
    "(a",
    "*",
    r"\d{99999999999}",
    "(?P<a>x)(?P<a>y)",
    "(" * 150 + ")" * 150,
    "(?i)Q",
    r"(x+x+)+y",
    "[[a]&&b]",
)


def test_adapter_configs(tmp_path, pytestconfig, monkeypatch):
    monkeypatch.setattr("convert.patterns.MATCH_SECONDS", 0.1)
    file = tmp_path / "adapter_config.json"
    fields = [field.name for field in dataclasses.fields(AdapterConfig)]

    def make(draw, number):
        if number % 4 == 0:
            return hostile.damaged_text(draw, json.dumps(BASE).encode())
        tree = dict(BASE)
        for name in draw.sample([*BASE, *fields, "unknown"], draw.choice((0, 1, 2))):
            tree[name] = hostile.value(draw)
        if draw.random() < 0.2:
            text = draw.choice((*EXPRESSIONS, hostile.text(draw)))
            name = draw.choice(
                ("target_modules", "target_parameters", "exclude_modules", "modules_to_save", "rank_pattern")
            )
            tree |= {name: draw.choice((text, [text], {text: 3}))}
        return json.dumps(tree if number % 4 == 1 else hostile.changed(draw, tree)).encode()

    def read(raw):
        file.write_bytes(raw)
        config = config_from_json(read_json(file), file)
        for module in MODULES:
            if targets(config, module):
                assert math.isfinite(scaling(config, module))
        json.dumps(config_to_json(config), allow_nan=False).encode()

    known = [json.dumps(BASE).encode()]
    fuzz("adapter_config.json", pytestconfig.getoption("--fuzz"), make, read, (ConvertError,), known)
