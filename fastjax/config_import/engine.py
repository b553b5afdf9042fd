"""The walk over a tool's file: groups of keys first, then its table, then what stands in no run of its kind."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from convert.errors import shorten
from fastjax.config_import.job import Job, Tool, flat, kind_of
from fastjax.config_import.needs import note_needs
from fastjax.config_import.reasons import HARMLESS, REASONS, reason_of
from fastjax.errors import ConfigError
from fastjax.options import fits

#: Settings that need held-out data.
_EVALUATING = "eval_steps", "per_device_eval_batch_size", "early_stopping_patience", "early_stopping_threshold"
_OF_EVALUATION = (*(f"training.{name}" for name in _EVALUATING), "output.load_best_model_at_end")
#: Settings of an adapter that a run has beside one to start from.
_WITH_AN_ADAPTER = ("lora.adapter", "lora.lora_dropout")
_SO_HERE = "so it is here"
#: Of a key that a group has read and made nothing of.
_NOTHING = "it is as here, off, or said by another key"


def import_settings(tool: Tool, content: Mapping[Any, Any], file: Path) -> Job:
    """Carry the settings of a tool's file over, and report each key with the setting or the reason that it has here.

    Raises:
        ConfigError: keys that change the result and have no equivalent, or values that the tool itself could not take.
    """
    content = tool.read(content, file)
    job = Job(tool, file, dict(flat(content)))
    for group in tool.groups:
        group(job)
    for key, default in tool.defaults.items():
        if job.values.get(key) is None and (setting := tool.becomes[key]) not in job.carried:
            job.carry(key, setting, default)
    for key, value in content.items():
        _pass(job, str(key), value)
    _reconcile(job)
    if job.refused:
        reasons = "; ".join(f"{shorten(key, 80)}: {reason}" for key, reason in job.refused.items())
        raise ConfigError(f"{file}: cannot be carried over: {' '.join(reasons.split())}")
    note_needs(job)
    return job


def _pass(job: Job, key: str, value: Any) -> None:
    """Account for a key by the table, or as one that a group has taken and found to change nothing."""
    if key in job.taken:
        if not job.accounted(key):
            job.not_needed[key] = _NOTHING
        return
    setting = job.tool.becomes.get(key)
    reason = reason_of(key)
    inside = any(name.startswith(f"{key}.") for name in (*job.tool.becomes, *REASONS, *job.taken))
    if isinstance(value, Mapping) and value and setting is None and reason is None and inside:
        for name, item in value.items():
            _pass(job, f"{key}.{name}", item)
    elif value is None:
        if key not in (line.key for line in job.carried.values()):
            job.not_needed[key] = "null: the default"
    elif setting is not None:
        job.carry_given(key, setting, carried := _value(job, key, setting, value))
        if carried is None:
            job.not_needed[key] = _NOTHING
    elif reason is None:
        job.not_carried[key] = f"unknown to this import; no setting of {job.tool.name} that it knows"
    else:
        where, why = reason
        off = value in HARMLESS[key] if key in HARMLESS else not value
        harmless = off and where != "not_needed"
        getattr(job, "not_needed" if harmless else where)[key] = _SO_HERE if harmless else why


def _value(job: Job, key: str, setting: str, value: Any) -> Any:
    """A value, as which a setting of numbers or of names takes a text too; None: it names nothing."""
    kind = kind_of(setting)
    if fits(["name"], kind):
        return job.names(key) or None
    numbers = isinstance(value, str) and not fits(value, kind) and (fits(0.5, kind) or fits(2, kind))
    return job.to_number(key, value) if numbers else value


def _reconcile(job: Job) -> None:
    """Drop settings that stand in no run of this kind: of an adapter, or of an evaluation, that there is not."""
    values = {setting: line.value for setting, line in job.carried.items()}

    def drop(setting: str, keys: dict[str, str], reason: str) -> None:
        line = job.carried.pop(setting, None)
        if line is not None and line.key in job.values:
            keys[line.key] = reason

    for setting in values:
        if setting.startswith("lora.") and values.get("model.full_finetuning"):
            drop(setting, job.not_needed, "every weight is trained, there is no adapter")
        elif setting.startswith("lora.") and "lora.adapter" in values and setting not in _WITH_AN_ADAPTER:
            drop(setting, job.not_needed, "the adapter to start from brings its own")
    streamed = any(source.get("streaming") for source in values.get("data.train", ()))
    if values.get("data.packing", True):
        drop("training.group_by_length", job.not_needed, "packed rows have next to no padding")
    elif streamed:
        drop("training.group_by_length", job.not_needed, "streamed rows come in their order")
    for setting in ("training.eval_steps", "output.save_steps"):
        if streamed and values.get(setting) == "epoch":
            drop(setting, job.not_carried, f"the end of an epoch is not known of streamed data; {setting} takes steps")
    if not {"data.eval", "data.val_set_size"} & set(values):
        lost = streamed and any("held-out" in why for why in job.not_carried.values())
        for setting in _OF_EVALUATION:
            drop(setting, job.not_carried if lost else job.not_needed, "no held-out data, so nothing is evaluated")
