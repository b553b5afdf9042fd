"""Values out of range are refused with their full name, what was expected and what was given."""

import dataclasses
import json
import re
import types
import typing
from typing import Any, Literal

import pytest

from fastjax.data import DataSource
from fastjax.errors import ConfigError
from fastjax.training.config import (
    DataSection,
    LoraSection,
    ModelSection,
    OptimizerConfig,
    OutputSection,
    QATSettings,
    TrainConfig,
    TrainingSection,
)

SECTIONS = {
    "model": ModelSection,
    "lora": LoraSection,
    "data": DataSection,
    "optimizer": OptimizerConfig,
    "training": TrainingSection,
    "output": OutputSection,
}


@pytest.mark.parametrize(
    ("section", "field", "value"),
    [
        ("model", "max_seq_length", 1),
        ("lora", "r", 0),
        ("lora", "lora_dropout", 1.0),
        ("optimizer", "learning_rate", 0.0),
        ("optimizer", "learning_rate", float("nan")),
        ("optimizer", "warmup_ratio", 1.0),
        ("optimizer", "warmup_steps", -1),
        ("optimizer", "weight_decay", -0.1),
        ("optimizer", "adam_beta2", 1.0),
        ("optimizer", "adam_epsilon", 0.0),
        ("optimizer", "max_grad_norm", -1.0),
        ("training", "max_steps", 0),
        ("training", "gradient_accumulation_steps", 0),
        ("training", "eval_steps", 0),
        ("training", "eval_steps", 2.5),
        ("training", "num_train_epochs", 0.0),
        ("training", "seed", -1),
        ("output", "profile_steps", [3]),
        ("output", "profile_steps", [4, 3]),
        ("output", "profile_steps", [0, 3]),
        ("output", "profile_rank", 1),
    ],
)
def test_out_of_range(section, field, value):
    needed = {"model": {"model_name": "m"}, "output": {"output_dir": "o"}}.get(section, {})
    with pytest.raises(ConfigError, match=rf"^{section}\.{field}: expected .*, got {re.escape(repr(value))}$"):
        SECTIONS[section](**needed, **{field: value})


HOSTILE = [
    *(None, float("inf"), float("nan"), 1e308, -1e308, 2**70, -(2**70), 10**18, 10**5000, True, "", "a\0b", "\ud800"),
    *("x" * 10**6, [], {}, [None], ["a\0b"], [2**70], [float("nan")], ["x"] * 10**4, {"a": float("inf")}, {1: 2}, b"a"),
    *([{"path": "a"}], [{"path": "a\0b"}], [{"path": "a", "weight": float("nan")}], {"q_proj": 10**18}, object()),
    *([DataSource("a", weight=1)], ("a", "b"), {"weights": "nf4"}, QATSettings("nf4"), [{"path": 3}], [{1: 2}]),
]


def fits(value, kind):
    """Whether a value is of a kind: the reference of what the sections take."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return True
    if origin is Literal:
        return isinstance(value, str) and value in arguments
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, argument) for argument in arguments)
    if origin is list:
        return isinstance(value, list | tuple) and all(fits(item, arguments[0]) for item in value)
    if origin is dict:
        return isinstance(value, dict) and all(
            fits(key, arguments[0]) and fits(item, arguments[1]) for key, item in value.items()
        )
    if isinstance(value, bool) and kind is not bool:
        return False
    return isinstance(value, (int, float) if kind is float else kind)


@pytest.mark.parametrize("section", SECTIONS)
def test_hostile_values(section):
    """A value that is taken fits the annotation, is finite and can be written; all others are refused, in short."""
    kind = SECTIONS[section]
    hints = typing.get_type_hints(kind)
    needed = {field.name: "a" for field in dataclasses.fields(kind) if field.default is field.default_factory}
    refused = 0
    for name in hints:
        for value in HOSTILE:
            try:
                made = kind(**(needed | {name: value}))
            except ConfigError as error:
                assert name in str(error) and len(str(error)) < 400
                refused += 1
            else:
                assert fits(getattr(made, name), hints[name])
                written = json.dumps(dataclasses.asdict(made), allow_nan=False, ensure_ascii=False)
                assert "\\u0000" not in written and written.encode() and "\ud800" not in written
    assert refused > 15 * len(hints)


def test_sizes_of_a_run_are_bounded():
    with pytest.raises(ConfigError, match=r"at most 67108864 tokens a step \(.*\), got 137438953472"):
        TrainConfig(
            ModelSection("m", max_seq_length=2**20),
            DataSection("d"),
            OutputSection("o"),
            training=TrainingSection(per_device_train_batch_size=2**16, gradient_accumulation_steps=2),
        )
    with pytest.raises(ConfigError, match="lora.rank_pattern: expected a mapping from strings to integers from 1"):
        LoraSection(rank_pattern={"q_proj": 10**9})


def test_contradictions():
    with pytest.raises(ConfigError, match=r"output\.entity: expected none without wandb in output\.report_to"):
        OutputSection("o", report_to=["tensorboard"], entity="team")
    with pytest.raises(ConfigError, match=r"output\.resume and output\.overwrite_output_dir: expected one of them"):
        OutputSection("o", overwrite_output_dir=True, resume=True)
    with pytest.raises(ConfigError, match=r"warmup_steps \(3\) and optimizer.warmup_ratio \(0.1\) are both set"):
        OptimizerConfig(warmup_steps=3, warmup_ratio=0.1)
    whole = ModelSection("m", full_finetuning=True, load_in_4bit=False)
    with pytest.raises(ConfigError, match="lora: expected no such section"):
        TrainConfig(whole, DataSection("d"), OutputSection("o"), lora=LoraSection(r=4))
    with pytest.raises(ConfigError, match="training.eval_steps: expected data.eval or data.val_set_size with it"):
        TrainConfig(ModelSection("m"), DataSection("d"), OutputSection("o"), training=TrainingSection(eval_steps=5))


def test_rows_are_grouped_by_length_alone():
    def config(data):
        training = TrainingSection(group_by_length=True, max_steps=9)
        return TrainConfig(ModelSection("m"), data, OutputSection("o"), training=training)

    assert config(DataSection("d", packing=False)).training.group_by_length
    for message, data in (
        ("without data.packing: false", DataSection("d")),
        ("for streamed data", DataSection([DataSource("a", streaming=True)], packing=False)),
    ):
        with pytest.raises(ConfigError, match=rf"training\.group_by_length: expected false {message}, got true"):
            config(data)


def test_streamed_data_have_no_epochs():
    data = DataSection([DataSource("a", streaming=True)])
    with pytest.raises(
        ConfigError, match=r"output\.save_steps: expected a number of steps, or a share of them, for str"
    ):
        TrainConfig(
            ModelSection("m"), data, OutputSection("o", save_steps="epoch"), training=TrainingSection(max_steps=9)
        )


def test_an_adapter_to_start_from_has_its_own_settings():
    assert LoraSection(adapter="folder", lora_dropout=0.1).adapter == "folder"
    with pytest.raises(ConfigError, match=r"lora\.adapter: expected no settings .* got lora\.r, lora\.use_dora$"):
        LoraSection(adapter="folder", r=8, use_dora=True)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            {"val_set_size": 0},
            "val_set_size: expected a whole number from 1 or a share between 0 and 1 or null, got 0",
        ),
        ({"val_set_size": 1.5}, "val_set_size: expected a whole number from 1"),
        ({"val_set_size": 5, "eval": "b.jsonl"}, "val_set_size: expected null beside data.eval, got 5"),
        ({"val_set_size": 5, "train": [DataSource("a", streaming=True)]}, "expected null beside streaming: true"),
    ],
)
def test_what_is_held_out_is_named_once(data, message):
    with pytest.raises(ConfigError, match=message):
        DataSection(**{"train": "a.jsonl", **data})
