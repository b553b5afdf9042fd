"""Axolotl's settings (axolotl-ai-cloud/axolotl, src/axolotl/utils/schemas)."""

import re
from typing import Any

from fastjax.config_import import shared
from fastjax.config_import.axolotl_data import data, preferences
from fastjax.config_import.job import Job, Tool
from fastjax.config_import.shared import (
    FLOAT8,
    KERNELS,
    OTHER,
    PARALLEL,
    RECOMPUTE,
    REFERENCE,
    cadence,
    fake_quantisation,
    optimizer,
    precision,
    schedule,
    warmup,
)

_LOG = "no such tracker; output.report_to has tensorboard and wandb"

#: What PEFT adapts where Axolotl names nothing, in Llama, Mistral, Qwen and Gemma.
_PEFT_TARGETS = ["q_proj", "v_proj"]

#: Plugins of Axolotl that change speed and memory alone.
_FAST = ("cut_cross_entropy", "liger", "kernels", "expert_parallel")

#: weight_dtype and activation_dtype of `qat` → weights and activations of training.qat.
_QAT: dict[str, tuple[str | None, str | None]] = {
    "int4 None": ("int4", None),
    "int4 int8": ("int4", "int8"),
    "nvfp4 None": ("nvfp4", None),
    "nvfp4 nvfp4": ("nvfp4", "nvfp4"),
    "mxfp4 None": ("mxfp4", None),
    "float8_e4m3fn float8_e4m3fn": ("fp8-row", "fp8"),
    "fp8 fp8": ("fp8-row", "fp8"),
}


def _base(job: Job) -> None:
    shared.base_model(job, "base_model", "revision_of_model")
    for key in ("base_model_config", "tokenizer_config"):
        why = "config.json and the tokenizer come from the base model's folder; put them there"
        shared.wants(job, key, job.take(key, str), job.values["base_model"], why)


def _method(job: Job) -> None:
    """LoRA, QLoRA or full fine-tuning; the base in 4, 8 or 16 bits."""
    adapter, four = job.take("adapter", str), job.flag("load_in_4bit")
    if adapter not in (None, "lora", "qlora"):
        job.refused["adapter"] = "there are lora, qlora and none (full fine-tuning)"
    elif adapter is None:
        job.carry("adapter", "model.full_finetuning", True, "no adapter is named")
        job.carry("load_in_4bit", "model.load_in_4bit", False, "a base that is trained has 16 bits or more")
    else:
        job.carry("adapter", "model.full_finetuning", False)
        job.carry("load_in_4bit", "model.load_in_4bit", four or adapter == "qlora")
    if job.flag("load_in_8bit"):
        job.not_carried["load_in_8bit"] = "no base in 8 bits: it stays in 16; model.load_in_4bit: true takes a quarter"
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
    steps = job.integer("gradient_accumulation_steps")
    job.carry("micro_batch_size", "training.per_device_train_batch_size", rows)
    if steps is None and total is not None:
        job.carry("batch_size", "training.gradient_accumulation_steps", max(1, total // rows))
    job.carry_given("gradient_accumulation_steps", "training.gradient_accumulation_steps", steps)


def _schedule(job: Job) -> None:
    schedule(job, "lr_scheduler", "lr_scheduler_kwargs", default="cosine")
    warmup(job, "warmup_steps", "warmup_ratio")
    given = [job.values.get(key) for key in ("warmup_steps", "warmup_ratio")]
    if given == [None, None] and job.values.get("lr_scheduler") != "constant":
        note = f"{job.tool.name}'s default, at most 100 steps there"
        job.carry("warmup_ratio", "optimizer.warmup_ratio", 0.03, note)
    optimizer(job, "optimizer")


def _precision(job: Job) -> None:
    flags = {"bf16": "bfloat16", "bfloat16": "bfloat16", "fp16": "float16", "float16": "float16", "float32": "float32"}
    precision(job, flags, param_dtype=job.values.get("adapter") is None)
    if job.values.get("bf16") is False and "model.dtype" not in job.carried:
        job.carry("bf16", "model.dtype", "float32", "no 16-bit dtype is named")


def _checkpoints(job: Job) -> None:
    """When to save and to evaluate."""
    for kind, setting in (("save", "output.save_steps"), ("eval", "training.eval_steps")):
        cadence(job, f"{kind}_steps", setting)
        strategy, times = job.take(f"{kind}_strategy", str), job.number(f"{kind}s_per_epoch")
        if times and setting not in job.carried:
            _per_epoch(job, f"{kind}s_per_epoch", times, setting)
        if strategy == "best":
            job.not_carried[f"{kind}_strategy"] = "output.load_best_model_at_end keeps the best checkpoint"
        elif setting in job.carried or strategy in ("steps", "no"):
            pass
        elif strategy == "epoch" or (strategy is None and kind == "save"):
            job.carry(f"{kind}_strategy", setting, "epoch")
        elif strategy is not None:
            raise job.wrong(f"{kind}_strategy", "no, steps, epoch or best", strategy)


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
    tokens = job.take("tokens", list[Any] | dict[str, Any])
    given = {f"special_tokens.{key}": value for key, value in job.mapping("special_tokens").items()}
    if isinstance(tokens, dict):
        given |= {f"tokens.{key}": value for key, value in tokens.items()}
    for where, value in given.items():
        if where.endswith(".pad_token") or not value:
            job.not_needed[where] = "rows are filled without one"
        elif where.endswith(".additional_special_tokens"):
            job.carry(where, "model.new_tokens", value)
        else:
            reason = "the tokenizer's own is taken; another is set in the folder's tokenizer_config.json"
            job.not_carried[where] = reason
    if isinstance(tokens, list) and tokens:
        job.carry_more("tokens", "model.new_tokens", tokens)


def _qat(job: Job) -> None:
    given = job.mapping("qat")
    if given:
        wanted = [None if given.get(key) is None else str(given[key]) for key in ("weight_dtype", "activation_dtype")]
        embedding = given.get("quantize_embedding")
        weights, activations = (None, None) if embedding else _QAT.get(" ".join(map(str, wanted)), (None, None))
        size, start = given.get("group_size") or 32, given.get("fake_quant_after_n_steps")
        fake_quantisation(job, "qat", weights, size, activations, start)


def _plugins(job: Job) -> None:
    """Plugins; the keys of those that make training faster stand in the table."""
    for name in job.names("plugins"):
        short = re.sub(r"^axolotl\.integrations\.", "", name)
        if short.startswith(_FAST):
            job.not_needed[f"plugins: {short}"] = KERNELS
        elif short.startswith("swanlab"):
            job.not_carried[f"plugins: {short}"] = _LOG
        else:
            job.refused[f"plugins: {short}"] = "there are no plugins, and this one may change what is trained"


def _rope(job: Job) -> None:
    changes = {**job.mapping("overrides_of_model_config"), **job.mapping("model_config")}
    rope = job.mapping("rope_scaling") or job.checked("rope_scaling", changes.pop("rope_scaling", {}))
    if rope:
        renamed = {"rope_type" if key == "type" else key: value for key, value in rope.items()}
        job.carry("rope_scaling", "model.rope_scaling", renamed)
    for key in changes:
        job.refused[f"model_config.{key}"] = (
            "training.router_aux_loss_coef adds the load-balancing loss; leave the key out"
            if key == "output_router_logits"
            else "config.json comes from the base model's folder; set it there"
        )


SETTINGS = {
    "model": "sequence_len:max_seq_length",
    "lora": "lora_r:r lora_alpha lora_modules_to_save:modules_to_save lora_target_parameters:target_parameters "
    "lora_rank_pattern:rank_pattern lora_alpha_pattern:alpha_pattern lora_layers_to_transform:layers_to_transform "
    "peft_layers_to_transform:layers_to_transform peft_use_dora:use_dora peft_use_rslora:use_rslora "
    "peft_init_lora_weights:init_lora_weights peft_trainable_token_indices:trainable_token_indices "
    "peft_ensure_weight_tying:ensure_weight_tying lora_model_dir:adapter",
    "optimizer": "embedding_lr:embedding_learning_rate cosine_min_lr_ratio:min_lr_ratio adam_eps:adam_epsilon",
    "training": "num_epochs:num_train_epochs max_steps eval_batch_size:per_device_eval_batch_size "
    "early_stopping_patience noisy_embedding_alpha:neftune_noise_alpha",
    "data": "chat_template_kwargs",
    "output": "output_dir auto_resume_from_checkpoints:resume",
    "parallel": "dp_replicate_size:data dp_shard_size:fsdp context_parallel_size:context "
    "sequence_parallel_degree:context tensor_parallel_size:tensor expert_parallel_size:expert",
}

DEFAULTS = {"sequence_len": 512, "lora_r": 8, "lora_alpha": 8, "output_dir": "./model-out"}

NOT_NEEDED = {
    "config.json and the tokenizer's files say it": "model_type tokenizer_type tokenizer_use_fast tokenizer_legacy "
    "is_falcon_derived_model is_llama_derived_model is_mistral_derived_model is_qwen_derived_model",
    "no code of a model's folder is run": "trust_remote_code",
    RECOMPUTE: "gradient_checkpointing gradient_checkpointing_kwargs activation_offloading selective_checkpointing",
    KERNELS: "flash_attention xformers_attention sdp_attention flex_attention attn_implementation eager_attention "
    "flash_attn_* flex_attn_* liger_* cut_cross_entropy chunked_cross_entropy* torch_compile* lora_mlp_kernel "
    "lora_qkv_kernel lora_o_kernel lora_embedding_kernel use_kernels use_scattermoe use_sonicmoe fused_attn_kernel "
    "experts_implementation dpo_padding_free dpo_use_logits_to_keep dpo_use_liger_kernel",
    "model.load_in_4bit holds experts in NF4 too": "quantize_moe_experts",
    PARALLEL: "use_ray ray_* deepspeed fsdp fsdp_config fsdp_version ddp* deepcompile fsdp_final_state_dict_type "
    "device device_map local_rank",
    "products are in model.dtype; in float32 they are never in TF32": "tf32",
    "prepared data are kept in data.cache_dir": "dataset_prepared_path dataset_processes dataset_num_proc "
    "dataset_keep_in_memory dataloader_*",
    "a batch is as long as its longest row": "pad_to_sequence_len pad_to_multiple_of",
    "as in training": "eval_sample_packing sample_packing_* eval_sequence_len",
    "the template marks the ends of turns": "eot_tokens tokenizer_save_jinja_files",
    "nothing to set": "strict debug gc_steps remove_unused_columns",
    "the metrics have it": "include_tokens_per_second",
    "rows are shuffled": "shuffle_before_merging_datasets",
    "projections are linear layers, where PEFT leaves it out": "lora_fan_in_fan_out",
    "weights are streamed": "low_cpu_mem_usage lora_on_cpu qlora_sharded_model_loading",
    "the result is safetensors, a checkpoint whole": "save_safetensors save_only_model",
    "model.new_tokens does it": "resize_token_embeddings_to_32x mean_resizing_embeddings",
    "model.mlp_chunk: auto does so for long rows": "tiled_mlp",
    REFERENCE: "precompute_ref_log_probs",
    OTHER: "rl_beta orpo_alpha simpo_gamma cpo_alpha kto_* trl dpo_label_smoothing",
    "a loss that is not finite ends the run, a spike is in the report": "loss_watchdog_threshold "
    "loss_watchdog_patience",
}

NOT_CARRIED = {
    "data.train takes sections with streaming: true": "streaming",
    "rows are always shuffled": "shuffle_merged_datasets",
    "NF4 has quantised scales, as with bnb_4bit_use_double_quant": "bnb_config_kwargs",
    "preferences.max_length limits prompt and answer together": "max_prompt_len",
    "`fastjax generate` answers prompts": "dpo_generate_during_eval",
    "wandb reads it from its environment variables (WANDB_MODE, WANDB_RUN_ID)": "wandb_*",
    _LOG: "mlflow* use_mlflow comet_* use_comet swanlab* use_swanlab trackio* use_trackio use_otel_metrics otel_*",
    "nothing is uploaded; output.output_dir has the result": "hub_* push_dataset_to_hub hf_use_auth_token",
    "`fastjax train --resume` goes on from this program's own checkpoints": "resume_from_checkpoint",
}

REFUSED = {
    "rows are not deduplicated; do so beforehand": "dataset_exact_deduplication",
    "no cross-entropy is added to a loss of preferences": "rpo_alpha",
    "the loss is that of the paper": "dpo_use_weighting dpo_norm_loss dpo_loss_weights",
    "rl names the loss: dpo, ipo": "dpo_loss_type",
    "reward models are not carried over; write preferences.loss: reward for one score a text": "reward_model "
    "process_reward_model",
    "models of text only": "processor_type image_size freeze_mm_modules",
    "no bases in GPTQ; 16 bits, NF4, FP8 and compressed-tensors there are": "gptq",
    FLOAT8: "fp8",
    "adapters start as lora.init_lora_weights says": "loftq peft",
    "no ReLoRA": "relora*",
    "no LISA": "lisa_*",
    "every weight is trained, or an adapter and lora.modules_to_save": "unfrozen_parameters",
    "layers are those of config.json": "peft_layer_replication",
    "one learning rate for all, and LoRA+": "lr_groups optim_args optim_target_modules",
    "the warm-up is linear, then cosine falls": "lr_quadratic_warmup cosine_constant_lr_ratio",
    "no such schedule": "jagged_restart_* embedding_lr_scale",
    "no system message is added; put it into the rows": "default_system_message",
    "the tokenizer's files say which token has which id; change them there": "added_tokens_overrides",
    "positions are those of the rows": "use_pose",
    "the loss is cross-entropy": "use_eaft",
    "short rows are not dropped; do so beforehand": "min_sample_len",
    "rows are shuffled": "curriculum_sampling",
    "the base model's weights are those of its folder": "reinit_weights",
    "attention is the model's own": "s2_attention",
    "the model is that of config.json": "scaling_softmax num_labels",
}

AXOLOTL = Tool(
    "axolotl",
    "base_model sequence_len micro_batch_size num_epochs datasets sample_packing pretraining_dataset",
    (
        *(_base, _method, _rows, _schedule, _precision, _checkpoints, _trackers, preferences),
        *(data, _tokens, _qat, _plugins, _rope),
    ),
    (shared.SETTINGS, SETTINGS),
    DEFAULTS,
    NOT_NEEDED,
    NOT_CARRIED,
    REFUSED,
    {"shuffle_merged_datasets": (True,), "dpo_loss_type": (None, [], ["sigmoid"])},
)
