"""Axolotl's settings (axolotl-ai-cloud/axolotl, src/axolotl/utils/schemas)."""

import re
from typing import Any

from fastjax.config_import.axolotl_data import data
from fastjax.config_import.axolotl_preferences import preferences
from fastjax.config_import.common import (
    FLOAT8,
    KERNELS,
    PARALLEL,
    RECOMPUTE,
    cadence,
    optimizer,
    precision,
    schedule,
    warmup,
)
from fastjax.config_import.job import Job, Row, Tool
from fastjax.config_import.preferences import OTHER, REFERENCE
from fastjax.config_import.rows import among, lost, refused, to, to_list, to_number, unneeded

_REWARD = "reward models are not carried over; write preferences.loss: reward for one score a text"
_MULTIMODAL = "models of text only"
_LOG = "no such tracker; output.report_to has tensorboard and wandb"
_HUB = "nothing is uploaded; output.output_dir has the result"
_WANDB = "wandb reads it from its environment variables (WANDB_MODE, WANDB_RUN_ID)"

#: What PEFT adapts where Axolotl names nothing, in Llama, Mistral, Qwen and Gemma.
_PEFT_TARGETS = ["q_proj", "v_proj"]

#: Plugins of Axolotl that change speed and memory alone.
_FAST = ("cut_cross_entropy", "liger", "kernels", "expert_parallel")

#: (weight_dtype, activation_dtype) of `qat` → weights and activations of training.qat.
_QAT = {
    ("int4", None): ("int4", None),
    ("int4", "int8"): ("int4", "int8"),
    ("nvfp4", None): ("nvfp4", None),
    ("nvfp4", "nvfp4"): ("nvfp4", "nvfp4"),
    ("mxfp4", None): ("mxfp4", None),
    ("float8_e4m3fn", "float8_e4m3fn"): ("fp8-row", "fp8"),
    ("fp8", "fp8"): ("fp8-row", "fp8"),
}

#: In torchao 0.18 fake quantisation by token has no symmetric form (NotImplementedError).
_TOKENS = "int8 inputs are symmetric here, a scale a token; torchao's fake quantiser has a zero point besides"


def _base(job: Job) -> None:
    name, revision = job.text("base_model"), job.text("revision_of_model")
    if name is None:
        raise job.wrong("base_model", "a folder or a name on the hub", name)
    if revision is None:
        job.carry("base_model", "model.model_name", name)
    else:
        job.carry("base_model, revision_of_model", "model.model_name", f"{name}@{revision}")
    for key in ("base_model_config", "tokenizer_config"):
        if (other := job.text(key)) == name:
            job.not_needed[key] = "the base model's own"
        elif other is not None:
            job.refused[key] = "config.json and the tokenizer come from the base model's folder; put them there"


def _method(job: Job) -> None:
    """LoRA, QLoRA or full fine-tuning; the base in 4, 8 or 16 bits."""
    adapter = job.text("adapter")
    four, eight = job.flag("load_in_4bit"), job.flag("load_in_8bit")
    if adapter not in (None, "lora", "qlora"):
        job.refused["adapter"] = "there are lora, qlora and none (full fine-tuning)"
    elif adapter is None:
        job.carry("adapter", "model.full_finetuning", True, "no adapter is named")
        job.carry("load_in_4bit", "model.load_in_4bit", False, "a base that is trained has 16 bits or more")
    else:
        job.carry("adapter", "model.full_finetuning", False)
        job.carry("load_in_4bit", "model.load_in_4bit", four or adapter == "qlora")
    if eight:
        job.not_carried["load_in_8bit"] = "no base in 8 bits: it stays in 16; model.load_in_4bit: true takes a quarter"
    elif "load_in_8bit" in job.taken:
        job.not_needed["load_in_8bit"] = "so it is here"
    targets, linear = job.take("lora_target_modules"), job.flag("lora_target_linear")
    if linear or targets == "all-linear":
        for key in ("lora_target_linear", "lora_target_modules"):
            if key in job.taken:
                job.not_needed[key] = "lora.target_modules: null is every projection"
    elif isinstance(targets, str) or targets:
        job.carry("lora_target_modules", "lora.target_modules", targets)
    elif "lora_target_parameters" not in job.values:
        job.carry("lora_target_modules", "lora.target_modules", _PEFT_TARGETS, "PEFT's default")
    if "lora_target_linear" in job.taken and not linear:
        job.not_needed["lora_target_linear"] = "off"


def _length(job: Job) -> None:
    """Rows a step."""
    total, rows = job.integer("batch_size"), job.integer("micro_batch_size") or 1
    steps = job.integer("gradient_accumulation_steps")
    job.carry("micro_batch_size", "training.per_device_train_batch_size", rows)
    if steps is not None:
        job.carry("gradient_accumulation_steps", "training.gradient_accumulation_steps", steps)
    elif total is not None:
        job.carry("batch_size", "training.gradient_accumulation_steps", max(1, total // rows))
    if total is not None and steps is not None:
        job.not_needed["batch_size"] = "gradient_accumulation_steps says it"


def _schedule(job: Job) -> None:
    schedule(job, "lr_scheduler", "lr_scheduler_kwargs", default="cosine")
    warmup(job, "warmup_steps", "warmup_ratio")
    if job.values.get("warmup_steps") is None and job.values.get("warmup_ratio") is None:
        if job.values.get("lr_scheduler") != "constant":
            note = f"{job.tool.name}'s default, at most 100 steps there"
            job.carry("warmup_ratio", "optimizer.warmup_ratio", 0.03, note)
    optimizer(job, "optimizer")


def _precision(job: Job) -> None:
    flags = (("bf16", "bfloat16"), ("bfloat16", "bfloat16"), ("fp16", "float16"), ("float16", "float16"))
    precision(job, (*flags, ("float32", "float32")), param_dtype=job.values.get("adapter") is None)
    if job.values.get("bf16") is False and "model.dtype" not in job.carried:
        del job.not_needed["bf16"]
        job.carry("bf16", "model.dtype", "float32", "no 16-bit dtype is named")


def _checkpoints(job: Job) -> None:
    """When to save and to evaluate."""
    for kind, per_epoch in (("save", "saves_per_epoch"), ("eval", "evals_per_epoch")):
        setting = {"save": "output.save_steps", "eval": "training.eval_steps"}[kind]
        cadence(job, f"{kind}_steps", setting)
        strategy, times = job.text(f"{kind}_strategy"), job.number(per_epoch)
        if times and setting not in job.carried:
            _per_epoch(job, per_epoch, times, setting)
        elif times is not None:
            job.not_needed[per_epoch] = f"{kind}_steps says it" if times else "none, as here"
        if strategy == "best":
            job.not_carried[f"{kind}_strategy"] = "output.load_best_model_at_end keeps the best checkpoint"
        elif setting in job.carried or strategy in ("steps", "no"):
            if strategy is not None:
                job.not_needed[f"{kind}_strategy"] = f"{setting} says it"
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
    else:
        job.not_needed[key] = "less than once in the run"


def _trackers(job: Job) -> None:
    wanted = job.take("use_wandb")
    place = {name: job.text(f"wandb_{name}") for name in ("project", "entity")}
    used = wanted or (wanted is None and place["project"])
    if used:
        job.carry("use_wandb" if wanted else "wandb_project", "output.report_to", ["wandb"])
    for name, value in place.items():
        if value and used:
            job.carry(f"wandb_{name}", f"output.{name}", value)
        elif value:
            job.not_needed[f"wandb_{name}"] = "wandb is not used"
    if wanted is False:
        job.not_needed["use_wandb"] = "off"
    if job.flag("use_tensorboard"):
        earlier = job.carried.get("output.report_to")
        keys = ["use_tensorboard"] if earlier is None else [earlier.key, "use_tensorboard"]
        kinds = ["tensorboard"] if earlier is None else ["tensorboard", *earlier.value]
        job.carry(", ".join(keys), "output.report_to", kinds, "" if earlier is None else earlier.note)
    elif "use_tensorboard" in job.taken:
        job.not_needed["use_tensorboard"] = "off"
    if name := job.text("wandb_name"):
        job.carry("wandb_name", "output.run_name", name)


def _tokens(job: Job) -> None:
    tokens = job.take("tokens")
    old = job.to_mapping("tokens", tokens) if isinstance(tokens, dict) else {}
    given = {f"special_tokens.{key}": value for key, value in job.mapping("special_tokens").items()}
    for where, value in (given | {f"tokens.{key}": value for key, value in old.items()}).items():
        if where.endswith(".pad_token") or not value:
            job.not_needed[where] = "rows are filled without one"
        elif where.endswith(".additional_special_tokens"):
            job.carry(where, "model.new_tokens", value)
        else:
            job.not_carried[where] = (
                "the tokenizer's own is taken; another is set in the folder's tokenizer_config.json"
            )
    if isinstance(tokens, list) and tokens:
        earlier = job.carried.get("model.new_tokens")
        key = "tokens" if earlier is None else f"{earlier.key}, tokens"
        job.carry(key, "model.new_tokens", [*([] if earlier is None else earlier.value), *tokens])
    elif tokens is not None and not isinstance(tokens, dict):
        raise job.wrong("tokens", "a list of strings", tokens)


def _qat(job: Job) -> None:
    given = job.mapping("qat")
    if not given:
        return
    wanted = tuple(None if given.get(key) is None else str(given[key]) for key in ("weight_dtype", "activation_dtype"))
    size = given.get("group_size") or 32
    weights, activations = _QAT.get(wanted, ("", None))  # pyright: ignore[reportArgumentType]
    if not weights or (weights == "int4" and size not in (32, 128)) or given.get("quantize_embedding"):
        job.refused["qat"] = "training.qat has int4 in groups of 32 or 128 (inputs in int8), fp8, nvfp4 and mxfp4"
        return
    section: dict[str, Any] = {"weights": f"int4-{size}" if weights == "int4" else weights}
    if activations is not None:
        section["activations"] = activations
    if given.get("fake_quant_after_n_steps"):
        section["start_step"] = given["fake_quant_after_n_steps"]
    job.carry("qat", "training.qat", section, _TOKENS if activations == "int8" else "")


def _plugins(job: Job) -> None:
    """Plugins; the keys of those that make training faster stand in the table."""
    for name in job.names("plugins") or []:
        short = re.sub(r"^axolotl\.integrations\.", "", name)
        if any(short.startswith(fast) for fast in _FAST):
            job.not_needed[f"plugins: {short}"] = KERNELS
        elif short.startswith("swanlab"):
            job.not_carried[f"plugins: {short}"] = _LOG
        else:
            job.refused[f"plugins: {short}"] = "there are no plugins, and this one may change what is trained"


def _rope(job: Job) -> None:
    changes = {**job.mapping("overrides_of_model_config"), **job.mapping("model_config")}
    rope = job.mapping("rope_scaling") or job.to_mapping("rope_scaling", changes.pop("rope_scaling", {}))
    if rope:
        renamed = {"rope_type" if key == "type" else key: value for key, value in rope.items()}
        job.carry("rope_scaling", "model.rope_scaling", renamed)
    for key in changes:
        job.refused[f"model_config.{key}"] = (
            "training.router_aux_loss_coef adds the load-balancing loss; leave the key out"
            if key == "output_router_logits"
            else "config.json comes from the base model's folder; set it there"
        )


_ROWS: dict[str, Row] = {
    "sequence_len": to("model.max_seq_length", 512),
    "lora_r": to("lora.r", 8),
    "lora_alpha": to("lora.lora_alpha", 8),
    "lora_dropout": to_number("lora.lora_dropout"),
    "lora_modules_to_save": to_list("lora.modules_to_save"),
    "lora_target_parameters": to_list("lora.target_parameters"),
    "lora_rank_pattern": to("lora.rank_pattern"),
    "lora_alpha_pattern": to("lora.alpha_pattern"),
    "lora_layers_to_transform": to("lora.layers_to_transform"),
    "peft_layers_to_transform": to("lora.layers_to_transform"),
    "peft_use_dora": to("lora.use_dora"),
    "peft_use_rslora": to("lora.use_rslora"),
    "peft_init_lora_weights": to("lora.init_lora_weights"),
    "peft_trainable_token_indices": to("lora.trainable_token_indices"),
    "peft_ensure_weight_tying": to("lora.ensure_weight_tying"),
    "lora_model_dir": to("lora.adapter"),
    "loraplus_lr_ratio": to_number("optimizer.loraplus_lr_ratio"),
    "loraplus_lr_embedding": to_number("optimizer.embedding_learning_rate"),
    "embedding_lr": to_number("optimizer.embedding_learning_rate"),
    "learning_rate": to_number("optimizer.learning_rate"),
    "cosine_min_lr_ratio": to_number("optimizer.min_lr_ratio"),
    "weight_decay": to_number("optimizer.weight_decay"),
    "max_grad_norm": to_number("optimizer.max_grad_norm"),
    "adam_beta1": to_number("optimizer.adam_beta1"),
    "adam_beta2": to_number("optimizer.adam_beta2"),
    "adam_epsilon": to_number("optimizer.adam_epsilon"),
    "adam_eps": to_number("optimizer.adam_epsilon"),
    "num_epochs": to_number("training.num_train_epochs"),
    "max_steps": to("training.max_steps"),
    "eval_batch_size": to("training.per_device_eval_batch_size"),
    "logging_steps": to("training.logging_steps"),
    "early_stopping_patience": to("training.early_stopping_patience"),
    "neftune_noise_alpha": to_number("training.neftune_noise_alpha"),
    "noisy_embedding_alpha": to_number("training.neftune_noise_alpha"),
    "label_smoothing_factor": to_number("training.label_smoothing_factor"),
    "seed": to("training.seed"),
    "output_dir": to("output.output_dir", "./model-out"),
    "save_total_limit": to("output.save_total_limit"),
    "load_best_model_at_end": to("output.load_best_model_at_end"),
    "dp_replicate_size": to("parallel.data"),
    "dp_shard_size": to("parallel.fsdp"),
    "context_parallel_size": to("parallel.context"),
    "sequence_parallel_degree": to("parallel.context"),
    "tensor_parallel_size": to("parallel.tensor"),
    "expert_parallel_size": to("parallel.expert"),
    # What changes nothing.
    **dict.fromkeys(("model_type", "tokenizer_type"), unneeded("config.json and the tokenizer's files say it")),
    **dict.fromkeys(("tokenizer_use_fast", "tokenizer_legacy"), unneeded("the tokenizer's files say it")),
    **dict.fromkeys(
        ("is_falcon_derived_model", "is_llama_derived_model", "is_mistral_derived_model", "is_qwen_derived_model"),
        unneeded("config.json says it"),
    ),
    "trust_remote_code": unneeded("no code of a model's folder is run"),
    **dict.fromkeys(("gradient_checkpointing", "gradient_checkpointing_kwargs"), unneeded(RECOMPUTE)),
    **dict.fromkeys(("activation_offloading", "selective_checkpointing"), unneeded(RECOMPUTE)),
    **dict.fromkeys(("flash_attention", "xformers_attention", "sdp_attention", "flex_attention"), unneeded(KERNELS)),
    **dict.fromkeys(("attn_implementation", "eager_attention", "flash_attn_*", "flex_attn_*"), unneeded(KERNELS)),
    **dict.fromkeys(("liger_*", "cut_cross_entropy", "chunked_cross_entropy*", "torch_compile*"), unneeded(KERNELS)),
    **dict.fromkeys(
        ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "lora_embedding_kernel"), unneeded(KERNELS)
    ),
    **dict.fromkeys(("use_kernels", "use_scattermoe", "use_sonicmoe", "experts_implementation"), unneeded(KERNELS)),
    "fused_attn_kernel": unneeded(KERNELS),
    "quantize_moe_experts": unneeded("model.load_in_4bit holds experts in NF4 too"),
    **dict.fromkeys(("use_ray", "ray_*"), unneeded(PARALLEL)),
    "streaming": lost("data.train takes sections with streaming: true"),
    "tf32": unneeded("products are in model.dtype; in float32 they are never in TF32"),
    **dict.fromkeys(("deepspeed", "fsdp", "fsdp_config", "fsdp_version", "ddp*", "deepcompile"), unneeded(PARALLEL)),
    **dict.fromkeys(("fsdp_final_state_dict_type", "device", "device_map", "local_rank"), unneeded(PARALLEL)),
    **dict.fromkeys(
        ("dataset_prepared_path", "dataset_processes", "dataset_num_proc", "dataset_keep_in_memory", "dataloader_*"),
        unneeded("prepared data are kept in data.cache_dir"),
    ),
    **dict.fromkeys(
        ("pad_to_sequence_len", "pad_to_multiple_of"), unneeded("every row has model.max_seq_length tokens")
    ),
    **dict.fromkeys(("eval_sample_packing", "sample_packing_*", "eval_sequence_len"), unneeded("as in training")),
    **dict.fromkeys(("eot_tokens", "tokenizer_save_jinja_files"), unneeded("the template marks the ends of turns")),
    **dict.fromkeys(("strict", "debug", "gc_steps", "remove_unused_columns"), unneeded("nothing to set")),
    **dict.fromkeys(
        ("low_cpu_mem_usage", "lora_on_cpu", "qlora_sharded_model_loading"), unneeded("weights are streamed")
    ),
    **dict.fromkeys(("save_safetensors", "save_only_model"), unneeded("the result is safetensors, a checkpoint whole")),
    **dict.fromkeys(
        ("resize_token_embeddings_to_32x", "mean_resizing_embeddings"), unneeded("model.new_tokens does it")
    ),
    "tiled_mlp": unneeded("model.mlp_chunk: auto does so for long rows"),
    "precompute_ref_log_probs": unneeded(REFERENCE),
    **dict.fromkeys(("dpo_padding_free", "dpo_use_logits_to_keep", "dpo_use_liger_kernel"), unneeded(KERNELS)),
    **dict.fromkeys(("rl_beta", "orpo_alpha", "simpo_gamma", "cpo_alpha", "kto_*"), unneeded(OTHER)),
    **dict.fromkeys(("trl", "dpo_label_smoothing"), unneeded(OTHER)),
    "loss_watchdog_threshold": unneeded("a loss that is not finite ends the run, a spike is in the report"),
    "loss_watchdog_patience": unneeded("a loss that is not finite ends the run, a spike is in the report"),
    "include_tokens_per_second": unneeded("the metrics have it"),
    "shuffle_merged_datasets": lost("rows are always shuffled", among(True)),
    "shuffle_before_merging_datasets": unneeded("rows are shuffled"),
    "bnb_config_kwargs": lost("NF4 has quantised scales, as with bnb_4bit_use_double_quant"),
    # What is not there.
    "max_prompt_len": lost("preferences.max_length limits prompt and answer together"),
    "dpo_generate_during_eval": lost("`fastjax generate` answers prompts"),
    "wandb_*": lost(_WANDB),
    **dict.fromkeys(("mlflow*", "use_mlflow", "comet_*", "use_comet", "swanlab*", "use_swanlab"), lost(_LOG)),
    **dict.fromkeys(("trackio*", "use_trackio", "use_otel_metrics", "otel_*"), lost(_LOG)),
    **dict.fromkeys(("hub_*", "push_dataset_to_hub", "hf_use_auth_token"), lost(_HUB)),
    "resume_from_checkpoint": lost("`fastjax train --resume` goes on from this program's own checkpoints"),
    "auto_resume_from_checkpoints": to("output.resume"),
    "group_by_length": to("training.group_by_length"),
    "dataset_exact_deduplication": refused("rows are not deduplicated; do so beforehand"),
    # What would make the result another.
    "rpo_alpha": refused("no cross-entropy is added to a loss of preferences"),
    **dict.fromkeys(
        ("dpo_use_weighting", "dpo_norm_loss", "dpo_loss_weights"), refused("the loss is that of the paper")
    ),
    "dpo_loss_type": refused("rl names the loss: dpo, ipo", among(None, [], ["sigmoid"])),
    **dict.fromkeys(("reward_model", "process_reward_model"), refused(_REWARD)),
    **dict.fromkeys(("processor_type", "image_size", "freeze_mm_modules"), refused(_MULTIMODAL)),
    "gptq": refused("no bases in GPTQ; 16 bits, NF4, FP8 and compressed-tensors there are"),
    "fp8": refused(FLOAT8),
    "loftq": refused("adapters start as lora.init_lora_weights says"),
    "peft": refused("adapters start as lora.init_lora_weights says"),
    "relora*": refused("no ReLoRA"),
    "lisa_*": refused("no LISA"),
    "unfrozen_parameters": refused("every weight is trained, or an adapter and lora.modules_to_save"),
    "peft_layer_replication": refused("layers are those of config.json"),
    "lora_fan_in_fan_out": unneeded("projections are linear layers, where PEFT leaves it out"),
    **dict.fromkeys(
        ("lr_groups", "optim_args", "optim_target_modules"), refused("one learning rate for all, and LoRA+")
    ),
    **dict.fromkeys(
        ("lr_quadratic_warmup", "cosine_constant_lr_ratio"), refused("the warm-up is linear, then cosine falls")
    ),
    **dict.fromkeys(("jagged_restart_*", "embedding_lr_scale"), refused("no such schedule")),
    "default_system_message": refused("no system message is added; put it into the rows"),
    "chat_template_kwargs": to("data.chat_template_kwargs"),
    "added_tokens_overrides": refused("the tokenizer's files say which token has which id; change them there"),
    "use_pose": refused("positions are those of the rows"),
    "use_eaft": refused("the loss is cross-entropy"),
    "min_sample_len": refused("short rows are not dropped; do so beforehand"),
    "curriculum_sampling": refused("rows are shuffled"),
    "reinit_weights": refused("the base model's weights are those of its folder"),
    "s2_attention": refused("attention is the model's own"),
    **dict.fromkeys(("scaling_softmax", "num_labels"), refused("the model is that of config.json")),
}

AXOLOTL = Tool(
    "axolotl",
    (
        "base_model",
        "sequence_len",
        "micro_batch_size",
        "num_epochs",
        "datasets",
        "sample_packing",
        "pretraining_dataset",
    ),
    _ROWS,
    (
        *(_base, _method, _length, _schedule, _precision, _checkpoints, _trackers, preferences),
        *(data, _tokens, _qat, _plugins, _rope),
    ),
)
