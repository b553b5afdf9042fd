"""Settings that may change between a checkpoint and the run that resumes from it."""

import dataclasses
from pathlib import Path

import pytest

from fastjax.errors import ConfigError
from fastjax.runs.settings_changes import check_settings, result_changes
from tests.support.runs import config

WHERE = Path("c/7")


def settings(**sections):
    return dataclasses.asdict(config(**sections))


def test_equal_settings():
    old = settings()
    assert check_settings(WHERE, old, settings()) == []
    del old["preferences"]  # a checkpoint from before there was that section
    assert check_settings(WHERE, old, settings()) == []
    with pytest.raises(ConfigError, match="preferences.loss: expected None, got 'dpo'"):
        check_settings(WHERE, old, settings(preferences={"loss": "dpo"}))


def test_a_setting_that_an_earlier_version_did_not_have_had_its_default():
    old = settings()
    del old["training"]["group_by_length"], old["optimizer"]["muon_momentum"]
    assert check_settings(WHERE, old, settings()) == [] and result_changes(old, settings()) == {}
    with pytest.raises(ConfigError, match=r"training\.group_by_length: expected False, got True"):
        check_settings(WHERE, old, settings(training={"group_by_length": True}, data={"packing": False}))


def test_what_may_change_is_told():
    changed = settings(
        optimizer={"learning_rate": 0.5},
        training={"num_train_epochs": 3.0, "logging_steps": 1},
        output={"output_dir": "elsewhere", "save_steps": 5},
        model={"model_name": "moved"},
    )
    assert check_settings(WHERE, settings(), changed) == [
        "optimizer.learning_rate: 0.0002 → 0.5",
        "training.num_train_epochs: 1.0 → 3.0",
    ]


def test_another_accumulation_of_the_same_rows():
    old = settings(training={"per_device_train_batch_size": 8})
    new = settings(training={"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4})
    assert check_settings(WHERE, old, new) == [
        "training.per_device_train_batch_size: 8 → 2",
        "training.gradient_accumulation_steps: 1 → 4",
    ]
    with pytest.raises(ConfigError, match="the rows of a step: expected 8, got 4"):
        check_settings(WHERE, old, settings(training={"per_device_train_batch_size": 4}))


def test_other_copies_are_refused_where_they_hold_what_was_rounded_off():
    for exchange, refused in (("float32", False), ("int8", True)):
        old, new = (
            settings(
                training={"per_device_train_batch_size": rows},
                parallel={"data": 8 // rows, "gradient_exchange": exchange},
            )
            for rows in (2, 4)
        )
        if not refused:
            assert check_settings(WHERE, old, new, (4, 2))
            continue
        with pytest.raises(ConfigError, match="the copies of the model, which hold .*: expected 4, got 2"):
            check_settings(WHERE, old, new, (4, 2))
    with pytest.raises(ConfigError, match=r"parallel\.gradient_exchange: expected 'int8', got 'int4'"):
        check_settings(WHERE, old, settings(parallel={"gradient_exchange": "int4"}))


def test_what_makes_another_state_is_refused():
    with pytest.raises(ConfigError) as error:
        check_settings(WHERE, settings(), settings(lora={"r": 8}, model={"dtype": "float16"}, training={"seed": 1}))
    message = str(error.value)
    assert message.startswith("c/7 is a checkpoint of another configuration: model.dtype: expected None, got 'float16'")
    assert "lora.r: expected 16, got 8" in message and "training.seed: expected 3407, got 1" in message
