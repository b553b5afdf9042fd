"""Axolotl's settings (axolotl-ai-cloud/axolotl, src/axolotl/utils/schemas)."""

import re
from typing import Any

from fastjax.config_import import shared
from fastjax.config_import.axolotl_data import data, preferences
from fastjax.config_import.job import Job, Tool
from fastjax.config_import.reasons import KERNELS, LOG

#: What PEFT adapts where Axolotl names nothing, in Llama, Mistral, Qwen and Gemma.
_PEFT_TARGETS = ["q_proj", "v_proj"]

#: Plugins of Axolotl that change speed and memory alone.
_FAST = ("cut_cross_entropy", "liger", "kernels", "expert_parallel")

#: weight_dtype and activation_dtype of `qat` → weights and activations of training.qat.
_QAT: dict[str, tuple[str | None, str | None]] = {
    **{"int4 None": ("int4", None), "int4 int8": ("int4", "int8"), "mxfp4 None": ("mxfp4", None)},
    **{"nvfp4 None": ("nvfp4", None), "nvfp4 nvfp4": ("nvfp4", "nvfp4")},
    **dict.fromkeys(("float8_e4m3fn float8_e4m3fn", "fp8 fp8"), ("fp8-row", "fp8")),
}


def _base(job: Job) -> None:
    shared.base_model(job, "base_model", "revision_of_model")
    for key in ("base_model_config", "tokenizer_config"):
        why = "config.json and the tokenizer come from the base model's folder; put them there"
        shared.wants(job, key, job.take(key, str), job.values["base_model"], why)


def _method(job: Job) -> None:
    """LoRA, QLoRA or full fine-tuning; the base in 4, 8 or 16 bits."""
    adapter = job.choose("adapter", ("lora", "qlora", ""), "", "there are lora, qlora and none (full fine-tuning)")
    four, eight = job.flag("load_in_4bit"), job.flag("load_in_8bit")
    if not adapter:
        job.carry("adapter", "model.full_finetuning", True, "no adapter is named")
        job.carry("load_in_4bit", "model.load_in_4bit", False, "a base that is trained has 16 bits or more")
    else:
        four = four or adapter == "qlora"
        key, note = ("load_in_8bit", "the base in 16 bits instead of 8") if eight and not four else ("load_in_4bit", "")
        job.carry("adapter", "model.full_finetuning", False)
        job.carry(key, "model.load_in_4bit", four, note)
    targets = job.take("lora_target_modules")
    if job.flag("lora_target_linear") or targets == "all-linear":
        pass  # lora.target_modules: null is every projection
    elif isinstance(targets, str) or targets:
        job.carry("lora_target_modules", "lora.target_modules", targets)
    elif "lora_target_parameters" not in job.values:
        job.carry("lora_target_modules", "lora.target_modules", _PEFT_TARGETS, "PEFT's default")


def _rows(job: Job) -> None:
    """Rows a step."""
    total, rows = job.integer("batch_size"), job.integer("micro_batch_size") or 1
    job.carry("micro_batch_size", "training.per_device_train_batch_size", rows)
    if total is not None and job.values.get("gradient_accumulation_steps") is None:
        job.carry("batch_size", "training.gradient_accumulation_steps", max(1, total // rows))


def _schedule(job: Job) -> None:
    lowest = job.number("cosine_min_lr_ratio")
    if lowest is not None and lowest < 1:  # 1: it does not fall, which is the schedule constant
        job.carry("cosine_min_lr_ratio", "optimizer.min_lr_ratio", lowest)
    shared.schedule(job, "lr_scheduler", "lr_scheduler_kwargs", default="cosine")
    shared.warmup(job, "warmup_steps", "warmup_ratio")
    constant = job.values.get("lr_scheduler") == "constant"
    if not constant and job.values.get("warmup_steps") is None and job.values.get("warmup_ratio") is None:
        job.carry("warmup_ratio", "optimizer.warmup_ratio", 0.03, "axolotl's default, at most 100 steps there")
    shared.optimizer(job, "optimizer")


def _precision(job: Job) -> None:
    flags = {"bf16": "bfloat16", "bfloat16": "bfloat16", "fp16": "float16", "float16": "float16", "float32": "float32"}
    shared.precision(job, flags, param_dtype=job.values.get("adapter") is None)
    if job.values.get("bf16") is False and "model.dtype" not in job.carried:
        job.carry("bf16", "model.dtype", "float32", "no 16-bit dtype is named")


def _checkpoints(job: Job) -> None:
    """When to save and to evaluate."""
    for kind, setting in (("save", "output.save_steps"), ("eval", "training.eval_steps")):
        shared.cadence(job, f"{kind}_steps", setting)
        strategy = job.choose(f"{kind}_strategy", ("no", "steps", "epoch", "best", ""), "")
        times = job.number(f"{kind}s_per_epoch")
        if times and setting not in job.carried:
            _per_epoch(job, f"{kind}s_per_epoch", times, setting)
        if strategy == "best":
            job.not_carried[f"{kind}_strategy"] = "output.load_best_model_at_end keeps the best checkpoint"
        elif setting not in job.carried and (strategy == "epoch" or (strategy == "" and kind == "save")):
            job.carry(f"{kind}_strategy", setting, "epoch")


def _per_epoch(job: Job, key: str, times: float, setting: str) -> None:
    """So many saves or evaluations an epoch: there, a share of the steps of num_epochs, unless that is all of them."""
    epochs = job.to_number("num_epochs", job.values.get("num_epochs") or 1)
    if times <= 0 or epochs <= 0:
        raise job.wrong(key if times <= 0 else "num_epochs", "a number above 0", times if times <= 0 else epochs)
    if times == 1 and not job.values.get("max_steps"):
        job.carry(key, setting, "epoch")
    elif times * epochs > 1:
        job.carry(key, setting, 1 / (times * epochs))


def _trackers(job: Job) -> None:
    if job.flag("use_tensorboard"):
        job.carry("use_tensorboard", "output.report_to", ["tensorboard"])
    wanted, project, entity = job.take("use_wandb"), job.take("wandb_project", str), job.take("wandb_entity", str)
    if wanted or (wanted is None and project):
        job.carry_more("use_wandb" if wanted else "wandb_project", "output.report_to", ["wandb"])
        job.carry_given("wandb_project", "output.project", project or None)
        job.carry_given("wandb_entity", "output.entity", entity or None)
    job.carry_given("wandb_name", "output.run_name", job.take("wandb_name", str) or None)


def _tokens(job: Job) -> None:
    """New tokens and special ones; rows are filled without a token, and none is unknown."""
    tokens = job.take("tokens", list[Any] | dict[str, Any])
    given = [("special_tokens", role, value) for role, value in job.mapping("special_tokens").items()]
    if isinstance(tokens, dict):
        given += [("tokens", role, value) for role, value in tokens.items()]
    special = {}
    for section, role, value in given:
        where = f"{section}.{role}"
        if role in ("pad_token", "unk_token") or not value:
            job.not_needed[where] = "rows are filled without one, and no part of a text is unknown"
        elif role == "additional_special_tokens":
            job.carry(where, "model.new_tokens", value)
        elif role in ("bos_token", "eos_token"):
            special[where] = (role, value)
        else:
            job.not_carried[where] = "model.special_tokens_map has bos_token and eos_token"
    if special:
        job.carry(", ".join(special), "model.special_tokens_map", dict(special.values()))
    if isinstance(tokens, list) and tokens:
        job.carry_more("tokens", "model.new_tokens", tokens)


def _qat(job: Job) -> None:
    if given := job.mapping("qat"):
        wanted = f"{given.get('weight_dtype')} {given.get('activation_dtype')}"
        weights, activations = (None, None) if given.get("quantize_embedding") else _QAT.get(wanted, (None, None))
        size, start = given.get("group_size") or 32, given.get("fake_quant_after_n_steps")
        shared.fake_quantisation(job, "qat", weights, size, activations, start)


def _plugins(job: Job) -> None:
    """Plugins; the keys of those that make training faster stand in the table."""
    for name in job.names("plugins"):
        short = re.sub(r"^axolotl\.integrations\.", "", name)
        if short.startswith(_FAST):
            job.not_needed[f"plugins: {short}"] = KERNELS
        elif short.startswith("swanlab"):
            job.not_carried[f"plugins: {short}"] = LOG
        else:
            job.refused[f"plugins: {short}"] = "there are no plugins, and this one may change what is trained"


def _config(job: Job) -> None:
    """Changes of config.json."""
    changes = {**job.mapping("overrides_of_model_config"), **job.mapping("model_config")}
    rope = job.mapping("rope_scaling") or job.checked("rope_scaling", changes.pop("rope_scaling", {}))
    if rope:
        renamed = {"rope_type" if key == "type" else key: value for key, value in rope.items()}
        job.carry("rope_scaling", "model.rope_scaling", renamed)
    if changes.pop("output_router_logits", False):
        factor = job.to_number("model_config.router_aux_loss_coef", changes.pop("router_aux_loss_coef", 0.001))
        note = "config.json's own factor there, most often 0.001 or 0.02"
        job.carry("model_config.output_router_logits", "training.router_aux_loss_coef", factor, note)
    for key in changes:
        job.refused[f"model_config.{key}"] = "config.json comes from the base model's folder; set it there"


def _unfrozen(job: Job) -> None:
    """The weights that full fine-tuning changes; a model beside a vision tower is all that there is here."""
    names = job.names("unfrozen_parameters")
    if not names:
        return
    if all(re.match(r"\^?(model\.)?(language_model|lm_head|embed_tokens)", name) for name in names):
        job.not_needed["unfrozen_parameters"] = "the language model, all that is read"
    elif "model.full_finetuning" in job.carried and job.carried["model.full_finetuning"].value:
        job.carry("unfrozen_parameters", "model.unfrozen_parameters", names)
    else:
        job.refused["unfrozen_parameters"] = "weights that are trained beside an adapter are lora.modules_to_save"


SETTINGS = {
    "model": "sequence_len:max_seq_length",
    "lora": "lora_r:r lora_alpha lora_modules_to_save:modules_to_save lora_target_parameters:target_parameters "
    "lora_rank_pattern:rank_pattern lora_alpha_pattern:alpha_pattern lora_layers_to_transform:layers_to_transform "
    "peft_layers_to_transform:layers_to_transform peft_use_dora:use_dora peft_use_rslora:use_rslora "
    "peft_init_lora_weights:init_lora_weights peft_trainable_token_indices:trainable_token_indices "
    "peft_ensure_weight_tying:ensure_weight_tying lora_model_dir:adapter",
    "optimizer": "embedding_lr:embedding_learning_rate adam_eps:adam_epsilon",
    "training": "gradient_accumulation_steps num_epochs:num_train_epochs max_steps "
    "eval_batch_size:per_device_eval_batch_size early_stopping_patience noisy_embedding_alpha:neftune_noise_alpha",
    "data": "chat_template_kwargs dataset_exact_deduplication:deduplicate",
    "output": "output_dir auto_resume_from_checkpoints:resume",
    "parallel": "dp_replicate_size:data dp_shard_size:fsdp context_parallel_size:context "
    "sequence_parallel_degree:context tensor_parallel_size:tensor expert_parallel_size:expert",
}

DEFAULTS = {"sequence_len": 512, "lora_r": 8, "lora_alpha": 8, "output_dir": "./model-out"}

_GROUPS = [_base, _method, _rows, _schedule, _precision, _checkpoints, _trackers, preferences, data]
_GROUPS += [_tokens, _qat, _plugins, _config, _unfrozen]

_MARKS = "base_model sequence_len micro_batch_size num_epochs datasets sample_packing pretraining_dataset"

AXOLOTL = Tool("axolotl", _MARKS, _GROUPS, (shared.SETTINGS, SETTINGS), DEFAULTS)
