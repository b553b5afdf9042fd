"""Hints for misspelt and misplaced settings."""

import difflib
from collections.abc import Collection

from convert.errors import shorten
from fastjax.commands.reference import SECTIONS
from fastjax.config_import import TOOLS
from fastjax.options import hints_of

#: Settings → their names elsewhere, beside those in the tables of `config_import`.
_NAMES = {
    "data.chat_template": ("template",),
    "data.eval": ("eval_dataset",),
    "data.train": ("dataset", "datasets", "train_dataset"),
    "data.val_set_size": ("val_size",),
    "lora.lora_alpha": ("alpha",),
    "lora.lora_dropout": ("dropout",),
    "lora.r": ("rank", "lora_rank"),
    "lora.target_modules": ("target",),
    "model.dtype": ("bf16", "fp16"),
    "model.max_seq_length": ("max_length", "max_seq_len", "seq_len"),
    "model.model_name": ("model", "model_name_or_path", "base_model"),
    "model.use_gradient_checkpointing": ("gradient_checkpointing",),
    "optimizer.adam_beta1": ("beta1",),
    "optimizer.adam_beta2": ("beta2",),
    "optimizer.adam_epsilon": ("eps",),
    "optimizer.learning_rate": ("lr",),
    "optimizer.lr_scheduler_type": ("lr_scheduler", "scheduler"),
    "optimizer.max_grad_norm": ("grad_clip",),
    "optimizer.name": ("optim", "optimizer"),
    "optimizer.warmup_ratio": ("warmup",),
    "optimizer.weight_decay": ("wd",),
    "training.gradient_accumulation_steps": ("grad_accum", "gradient_accumulation"),
    "training.label_smoothing_factor": ("label_smoothing",),
    "training.max_steps": ("steps",),
    "training.num_train_epochs": ("epochs",),
    "training.per_device_train_batch_size": ("batch_size", "micro_batch_size"),
}


def unknown(key: str) -> str:
    """The message of a setting that there is not.

    Args:
        key: section.key, or a section, as it was given.
    """
    shown, (section, _, field) = shorten(key, 80), key[:80].rpartition(".")
    if (meant := _meant(section, field)) is not None:
        return f"{shown}: unknown; did you mean {meant}? `fastjax train --help` lists all settings"
    if section in SECTIONS:
        return f"{shown}: unknown; expected one of the keys of {section}: {', '.join(hints_of(SECTIONS[section]))}"
    return f"{shown}: unknown; expected one of the sections: {', '.join(SECTIONS)}"


def of_another_tool(keys: Collection[str]) -> str | None:
    """The tool of `config_import` whose settings the keys of a file are; None: of none, or of several.

    Args:
        keys: the outermost.
    """
    counts = {name: sum(mark in keys for mark in tool.marks.split()) for name, tool in TOOLS.items()}
    best = [name for name, count in counts.items() if count and count == max(counts.values())]
    return best[0] if len(best) == 1 else None


def _meant(section: str, field: str) -> str | None:
    """The setting or section that an unknown one most likely stands for; None: there is none."""
    if meant := next((setting for setting, names in _NAMES.items() if field in names), None):
        return meant
    known = [f"{name}.{key}" for name, kind in SECTIONS.items() for key in hints_of(kind)]
    if elsewhere := [setting for setting in known if setting.endswith(f".{field}")]:
        return elsewhere[0]
    names = {setting.partition(".")[2]: setting for setting in known}
    either = () if section else [*SECTIONS, *names]
    if close := difflib.get_close_matches(field, either, n=1, cutoff=0.75):
        return names.get(close[0], close[0])
    keys = hints_of(SECTIONS[section]) if section in SECTIONS else ()
    if close := difflib.get_close_matches(field, keys, n=1):
        return f"{section}.{close[0]}"
    if carried := next((tool.becomes[field] for tool in TOOLS.values() if field in tool.becomes), None):
        return carried
    return next((names[name] for name in difflib.get_close_matches(field, names, n=1)), None)
