"""The walk over a tool's file: groups of keys first, then its table, then what stands in no run of its kind."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from convert.errors import shorten
from fastjax.config_import.job import Job
from fastjax.config_import.table import Tool
from fastjax.errors import ConfigError

#: Settings that need held-out data.
_OF_EVALUATION = (
    "training.eval_steps",
    "training.per_device_eval_batch_size",
    "training.early_stopping_patience",
    "training.early_stopping_threshold",
    "output.load_best_model_at_end",
)
_SO_HERE = "so it is here"
#: Of a key that a group has read and made nothing of.
_NOTHING = "it is as here, off, or said by another key"


def import_settings(tool: Tool, content: Mapping[Any, Any], file: Path) -> Job:
    """Carry a tool's settings over.

    Args:
        tool: the tool.
        content: its file, parsed.
        file: the file's name.

    Returns:
        The report: each key with the setting or the reason that it has here.

    Raises:
        ConfigError: keys that change the result and have no equivalent, or values that the tool itself could not take.
    """
    content = tool.read(content, file)
    job = Job(tool, file, dict(_flat(content)))
    for group in tool.groups:
        group(job)
    for key, (setting, default, _) in tool.settings.items():
        if default is not None and job.values.get(key) is None and setting not in job.carried:
            job.carry(key, setting, default)
    for key, value in content.items():
        _pass(job, str(key), value)
    _reconcile(job)
    if job.refused:
        reasons = "; ".join(f"{shorten(key, 80)}: {reason}" for key, reason in job.refused.items())
        raise ConfigError(f"{file}: cannot be carried over: {' '.join(reasons.split())}")
    return job


def _flat(content: Mapping[Any, Any], outer: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in content.items():
        yield f"{outer}{key}", value
        if isinstance(value, Mapping):
            yield from _flat(value, f"{outer}{key}.")


def _pass(job: Job, key: str, value: Any) -> None:
    """Account for a key by the table, or as one that a group has taken and found to change nothing."""
    if key in job.taken:
        if not job.accounted(key):
            job.not_needed[key] = _NOTHING
        return
    to = job.tool.settings.get(key)
    found = job.tool.reasons.get(key) or next(
        (row for name, row in job.tool.reasons.items() if name.endswith("*") and key.startswith(name[:-1])), None
    )
    inside = any(name.startswith(f"{key}.") for name in (*job.tool.settings, *job.tool.reasons, *job.taken))
    if isinstance(value, Mapping) and value and to is None and found is None and inside:
        for name, item in value.items():
            _pass(job, f"{key}.{name}", item)
    elif value is None:
        if key not in (line.key for line in job.carried.values()):
            job.not_needed[key] = "null: the default"
    elif to is not None:
        read = {"": lambda: value, "number": lambda: job.to_number(key, value), "names": lambda: job.names(key)}
        if (carried := read[to.kind]()) or to.kind != "names":
            job.carry(key, to.setting, carried)
        else:
            job.not_needed[key] = _NOTHING
    elif found is None:
        job.not_carried[key] = f"unknown to this import; no setting of {job.tool.name} that it knows"
    else:
        where, reason = found
        off = value in job.tool.harmless[key] if key in job.tool.harmless else not value
        harmless = off and where != "not_needed"
        getattr(job, "not_needed" if harmless else where)[key] = _SO_HERE if harmless else reason


def _reconcile(job: Job) -> None:
    """Drop settings that stand in no run of this kind: of an adapter, or of an evaluation, that there is not."""
    full = job.carried.get("model.full_finetuning")
    dropped = {}
    if full is not None and full.value:
        dropped = {name: "every weight is trained, there is no adapter" for name in job.carried if name[:5] == "lora."}
    elif "lora.adapter" in job.carried:
        kept = ("lora.adapter", "lora.lora_dropout")
        others = [name for name in job.carried if name[:5] == "lora." and name not in kept]
        dropped = dict.fromkeys(others, "the adapter to start from brings its own")
    for setting, reason in dropped.items():
        line = job.carried.pop(setting)
        if line.key in job.values:
            job.not_needed[line.key] = reason
    streamed = "data.train" in job.carried and any(
        isinstance(source, dict) and source.get("streaming") for source in job.carried["data.train"].value
    )
    packed = "data.packing" not in job.carried or job.carried["data.packing"].value
    if (packed or streamed) and (line := job.carried.pop("training.group_by_length", None)) is not None:
        job.not_needed[line.key] = "packed rows waste no slots" if packed else "streamed rows come in their order"
    for setting in ("training.eval_steps", "output.save_steps"):
        if streamed and setting in job.carried and job.carried[setting].value == "epoch":
            line = job.carried.pop(setting)
            if line.key in job.values:
                job.not_carried[line.key] = f"the end of an epoch is not known of streamed data; {setting} takes steps"
    if not {"data.eval", "data.val_set_size"} & set(job.carried):
        for setting in _OF_EVALUATION:
            if (line := job.carried.pop(setting, None)) is not None and line.key in job.values:
                job.not_carried[line.key] = f"{setting} needs data.eval or data.val_set_size, and there is neither"
