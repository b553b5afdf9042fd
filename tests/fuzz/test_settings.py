"""YAML settings: the text damaged, its values replaced, and options of the command line."""

import json
import typing

import yaml

from fastjax import strict_yaml
from fastjax.commands.reference import SECTIONS
from fastjax.commands.settings import parse_train_config
from fastjax.errors import ConfigError
from fastjax.strict_yaml import YamlError
from tests.support import hostile
from tests.support.fuzz import fuzz

SETTINGS = {
    "model": {"model_name": "llama", "dtype": "bfloat16", "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "lora": {"r": 8, "rank_pattern": {"q_proj": 4}, "target_modules": ["q_proj", "v_proj"], "lora_dropout": 1e-2},
    "data": {"train": [{"path": "train.jsonl", "weight": 2.0, "columns": {"text": "t"}}], "eval": "eval.jsonl"},
    "optimizer": {"learning_rate": 1e-4, "no_decay": ["bias"]},
    "training": {"max_steps": 7, "seed": 3},
    "output": {"output_dir": "runs/one", "run_name": "a"},
    "parallel": {"data": 2, "fsdp": "auto", "gradient_exchange": "int8"},
    "preferences": {"loss": "orpo", "beta": 0.3},
}
RIGHT = yaml.safe_dump(SETTINGS)
SCALARS = (
    *("!!int ''", "!!python/object:os.system x", "!!binary '%'", "!!set {a}", "!!omap [1]", "!!timestamp x", "!x y"),
    *("2024-01-01", "0o17", "0x_", "0b", "1:30", "-.inf", ".nan", "1e999", "9" * 400, "1_0", "~", "=", "<<", "? a"),
    *("&a [*a]", "*b", "{<<: {a: 1}, b: 2}", "{<<: 3}", "{<<: [[1]]}", "{? [a]: b}", "{? {a: 1}: b}", "{a: 1, a: 2}"),
    *(
        "|\n    x\n   y",
        ">9\n  x",
        "'a",
        '"\\ud800"',
        '"\\UFFFFFFFF"',
        "%YAML 9.9",
        "--- a\n--- b",
        "\t",
        "@",
        "`",
        "[a,,b]",
    ),
    *("{}", "[]", "[[[", "- - - a", "a: b: c", "# x", "!", "!<x> y", "!!float x", "!!bool 3", "!!null x", "{~: ~}"),
)


def texts(draw, number):
    """A settings file."""
    kind = number % 3
    if kind == 0:
        return hostile.damaged_text(draw, RIGHT.encode())
    if kind == 1:
        return json.dumps(hostile.changed(draw, SETTINGS), indent=draw.choice((None, 1))).encode()
    lines = RIGHT.splitlines()
    for _ in range(draw.choice((1, 1, 2))):
        place = draw.randrange(len(lines))
        name, mark, _ = lines[place].partition(": ")
        lines[place] = name + (mark or draw.choice((" ", ": ", "\n"))) + draw.choice(SCALARS)
    return "\n".join(lines).encode()


def test_yaml(pytestconfig):
    def read(raw):
        text = raw.decode(errors="replace")
        if "%" not in text:  # directives
            assert strict_yaml.parse(text) is not Ellipsis
        else:
            strict_yaml.parse(text)

    fuzz("YAML", pytestconfig.getoption("--fuzz"), texts, read, (YamlError,), [RIGHT.encode()])


def test_settings(tmp_path, pytestconfig):
    file = tmp_path / "run.yaml"
    keys = [f"{section}.{key}" for section, kind in SECTIONS.items() for key in typing.get_type_hints(kind)]
    section_keys = [key.split(".", 1) for key in keys if not key.endswith("return")]

    def make(draw, number):
        if number % 4 < 2:
            return texts(draw, draw.randrange(3)), []
        if number % 4 == 2:
            settings = {name: dict(section) for name, section in SETTINGS.items()}
            for section, key in draw.sample(section_keys, draw.choice((1, 1, 2))):
                settings.setdefault(section, {})[key] = hostile.value(draw)
            return json.dumps(settings).encode(), []
        options = []
        for section, key in draw.sample(section_keys, draw.choice((1, 2))):
            value = draw.choice(SCALARS) if draw.random() < 0.5 else hostile.value(draw)
            value = value if isinstance(value, str) else json.dumps(value)
            options += draw.choice(([f"--{section}.{key}={value}"], [f"--{section}.{key}", value]))
        return RIGHT.encode(), options

    def read(given):
        raw, options = given
        file.write_bytes(raw)
        parse_train_config(["--config", str(file), *options])

    fuzz("settings", pytestconfig.getoption("--fuzz"), make, read, (ConfigError,), [(RIGHT.encode(), [])])
