"""Settings of LLaMA-Factory's v1 form (hiyouga/LLaMA-Factory, src/llamafactory/v1/config).

A plugin is a section whose `name` chooses it: peft_config, quant_config, optim_config. The command says whether
preferences are learnt (sft, dpo), so that the file's data are asked: rows that a converter makes pairs are preferences.
"""

from pathlib import Path
from typing import Any

from convert.errors import shorten
from fastjax import strict_yaml
from fastjax.config_import import shared
from fastjax.config_import.job import Job, Tool
from fastjax.config_import.llama_factory import method
from fastjax.config_import.llama_factory_data import carry_preferences

#: A converter → the columns of the rows that it takes.
_CONVERTERS = {
    "alpaca": {name: name for name in ("instruction", "input", "output", "system")},
    "sharegpt": {"conversations": "conversations"},
    "pair": shared.PAIR,
    "none": {"messages": "messages"},
}


def _method(job: Job) -> None:
    """LoRA, full fine-tuning or that of some layers."""
    shared.base_model(job, "model", "revision")
    keys = ("quant_config.quantization_bit", "quant_config.name", "peft_config.target_modules", "peft_config.")
    method(job, "peft_config.name", "full", *keys)
    shared.wants(job, "peft_config.export_dir", job.take("peft_config.export_dir"), None, "`fastjax convert merge`")
    shared.wants(job, "model_class", job.take("model_class", str), "llm", "models of text only, of logits")
    shared.precision(job, {"bf16": "bfloat16"} if job.flag("bf16", default=True) else {}, param_dtype=False)


def _steps(job: Job) -> None:
    """Rows a step, the optimizer and the schedule, by default torch's AdamW and none."""
    rows, total = job.integer("micro_batch_size", 1), job.integer("global_batch_size")
    job.carry("micro_batch_size", "training.per_device_train_batch_size", rows)
    if total is not None:
        job.carry("global_batch_size", "training.gradient_accumulation_steps", max(1, total // rows), "of one device")
    name = job.choose("optim_config.name", ("adamw", "muon"), "adamw")
    job.carry("optim_config.name", "optimizer.name", name)
    decay, betas = (0.1, [0.9, 0.95]) if name == "muon" else (0.01, [])
    job.carry("optim_config.wd", "optimizer.weight_decay", job.number("optim_config.wd", decay))
    shared.betas(job, "optim_config.adamw_betas", betas)
    for key, only in {"optim_config.nesterov": True, "optim_config.ns_steps": 5}.items():
        shared.wants(job, key, job.take(key), only, "muon's updates are of the paper")
    job.choose("lr_scheduler_config.name", ("",), "", "no such plugin is known")
    job.carry("lr_scheduler_config.name", "optimizer.lr_scheduler_type", "constant", "the default: no schedule")
    dynamic = (job.take("batching_strategy", str) or "normal").startswith("dynamic")
    note = "so many tokens a step, without padding" if dynamic else "a batch is as long as its longest row"
    job.carry("batching_strategy", "data.packing", dynamic, note)


def _data(job: Job) -> None:
    pairs = False
    for key, setting in (("train_dataset", "data.train"), ("eval_dataset", "data.eval")):
        name = job.take(key, str)
        if name is None:
            continue
        listed = [_source(job, f"{key}.{label}", item) for label, item in _described(job, key, name).items()]
        pairs = pairs or any("chosen" in source["columns"] for source in listed)
        shared.write_data(job, key, listed, setting)
    if "data.train" not in job.carried:
        raise job.wrong("train_dataset", "a data set, or a YAML file that describes some", None)
    if pairs or job.values.get("pref_loss") is not None:
        carry_preferences(job, "dpo")
    else:
        job.carry("cutoff_len", "model.max_seq_length", job.integer("cutoff_len", 2048))


def _described(job: Job, key: str, name: str) -> dict[str, Any]:
    """The data sets that a name stands for: of a file in YAML, here or beside the settings, or one by itself."""
    if not name.endswith((".yaml", ".yml")):
        return {"path": {"path": name}}
    file = next((file for file in (Path(name), job.file.parent / name) if file.is_file()), None)
    if file is None:
        raise job.wrong(key, "a file that is here; fetch it from the hub, and name it", name)
    return shared.described(job, key, file, strict_yaml.parse)


def _source(job: Job, where: str, item: Any) -> dict[str, Any]:
    given = job.checked(where, item)
    path = job.checked(f"{where}.path", given.pop("path", None), str)
    converter = str(given.pop("converter", None) or "none")
    if converter not in _CONVERTERS:
        job.refused[f"{where}.converter"] = f"{shorten(converter, 80)}: there are {', '.join(_CONVERTERS)}"
    split, size = str(given.pop("split", "train")), given.pop("size", None)
    source = {"path": path, "split": split if size is None else f"{split}[:{size}]"}
    source |= {"streaming": given.pop("streaming", None) or None, "columns": _CONVERTERS.get(converter, {})}
    given.pop("source", None)  # local or on the hub: the path says it
    job.not_carried |= {f"{where}.{key}": "a data set's share is its split, such as train[:50%]" for key in given}
    return source


SETTINGS = {
    "lora": "peft_config.r:r peft_config.lora_alpha:lora_alpha peft_config.lora_dropout:lora_dropout "
    "peft_config.use_rslora:use_rslora peft_config.use_dora:use_dora peft_config.modules_to_save:modules_to_save",
    "optimizer": "learning_rate max_grad_norm optim_config.momentum:muon_momentum optim_config.adamw_eps:adam_epsilon",
    "training": "num_train_epochs max_steps logging_steps seed full_determinism:deterministic",
    "output": "output_dir save_steps save_total_limit",
    "parallel": "dp_size:data cp_size:context mp_replicate_size:data mp_shard_size:fsdp dist_config.ep_size:expert",
}

DEFAULTS = {"peft_config.r": 8, "peft_config.lora_alpha": 16, "peft_config.lora_dropout": 0.05, "learning_rate": 1e-4}
DEFAULTS |= {"num_train_epochs": 3, "output_dir": "outputs", "seed": 42}

_MARKS = "model_class train_dataset kernel_config dist_config peft_config quant_config optim_config"
_MARKS += " batching_strategy micro_batch_size"
_GROUPS = (_method, _steps, _data)

LLAMA_FACTORY_V1 = Tool("llama-factory-v1", _MARKS, _GROUPS, (SETTINGS,), DEFAULTS)
