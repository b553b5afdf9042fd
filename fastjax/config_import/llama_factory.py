"""LLaMA-Factory's settings (hiyouga/LLaMA-Factory, src/llamafactory/hparams).

What its own arguments do not name are transformers' TrainingArguments, with their defaults.
"""

from typing import Any

from convert.errors import shorten
from fastjax.config_import.common import (
    FLOAT8,
    KERNELS,
    NAMES,
    PARALLEL,
    RECOMPUTE,
    TRACKERS,
    cadence,
    optimizer,
    precision,
    schedule,
    warmup,
)
from fastjax.config_import.job import Job, Row, Tool
from fastjax.config_import.llama_factory_data import data
from fastjax.config_import.llama_factory_preferences import STAGES, preferences
from fastjax.config_import.preferences import OTHER
from fastjax.config_import.rows import among, lost, refused, to, to_list, to_number, unneeded

_LOSS = "the loss is cross-entropy"
_METHOD = "an adapter (lora) or every weight (full) is trained"
_MULTIMODAL = "models of text only"
_SWANLAB = "no such tracker; output.report_to has tensorboard and wandb"


def _base(job: Job) -> None:
    name, revision = job.text("model_name_or_path"), job.text("model_revision")
    if name is None:
        raise job.wrong("model_name_or_path", "a folder or a name on the hub", name)
    pinned = revision not in (None, "main")
    job.carry("model_name_or_path", "model.model_name", f"{name}@{revision}" if pinned else name)
    if revision is not None:
        job.not_needed["model_revision"] = "it is part of model.model_name" if pinned else "the hub's default"
    tokens = [token for key in ("add_tokens", "add_special_tokens") for token in job.names(key) or []]
    if tokens:
        keys = [key for key in ("add_tokens", "add_special_tokens") if key in job.taken]
        job.carry(", ".join(keys), "model.new_tokens", list(dict.fromkeys(tokens)))
    if job.flag("split_special_tokens"):
        job.carry("split_special_tokens", "data.special_tokens", "text")
    elif "split_special_tokens" in job.taken:
        job.not_needed["split_special_tokens"] = "data.special_tokens: control"


def _method(job: Job) -> None:
    """The stage, and LoRA, QLoRA or full fine-tuning."""
    stage = job.text("stage") or "sft"
    if stage not in ("sft", "pt", *STAGES):
        reward = " (for a reward model write preferences.loss: reward)" if stage == "rm" else ""
        job.refused["stage"] = f"{shorten(stage, 80)}: sft, pt (plain text), dpo and kto there are{reward}"
    elif stage not in STAGES:
        job.not_needed["stage"] = "the columns of the data say it"
    method = job.text("finetuning_type") or "lora"
    bits, how = job.number("quantization_bit"), job.text("quantization_method") or "bnb"
    if method not in ("lora", "full"):
        job.refused["finetuning_type"] = f"{shorten(method, 80)}: {_METHOD}"
    job.carry("finetuning_type", "model.full_finetuning", method == "full")
    job.carry("quantization_bit", "model.load_in_4bit", bits == 4, "" if bits == 4 else "the base in 16 bits")
    if bits == 8:
        job.not_carried["quantization_bit"] = "no base in 8 bits: it stays in 16; 4 takes a quarter"
    elif bits not in (None, 4):
        job.refused["quantization_bit"] = "a base in 16 or 4 bits, 8 is held in 16"
    if bits is not None and how != "bnb":
        job.refused["quantization_method"] = f"{shorten(how, 80)}: 4 bits are bitsandbytes' NF4"
    elif "quantization_method" in job.taken:
        job.not_needed["quantization_method"] = "4 bits are bitsandbytes' NF4"
    rank = job.integer("lora_rank")
    job.carry("lora_rank", "lora.r", 8 if rank is None else rank)
    alpha = job.number("lora_alpha")
    if alpha is None:
        job.carry("lora_alpha", "lora.lora_alpha", 2 * (rank or 8), f"{job.tool.name}'s default: twice the rank")
    else:
        job.carry("lora_alpha", "lora.lora_alpha", alpha)
    targets = job.names("lora_target") or ["all"]
    if targets == ["all"]:
        job.not_needed["lora_target"] = "lora.target_modules: null is every projection"
    else:
        job.carry("lora_target", "lora.target_modules", targets)
    adapters = job.names("adapter_name_or_path")
    if adapters and (len(adapters) > 1 or job.values.get("create_new_adapter") or method == "full"):
        job.refused["adapter_name_or_path"] = "one adapter to go on from; merge others first (`fastjax convert merge`)"
    elif adapters:
        job.carry("adapter_name_or_path", "lora.adapter", adapters[0])


def _schedule(job: Job) -> None:
    schedule(job, "lr_scheduler_type", "lr_scheduler_kwargs", default="linear")
    warmup(job, "warmup_steps", "warmup_ratio")
    optimizer(job, "optim")
    if job.flag("use_muon"):
        job.carry("use_muon", "optimizer.name", "muon")
    steps = job.integer("max_steps")
    if steps is not None and steps > 0:
        job.carry("max_steps", "training.max_steps", steps)
    elif steps is not None:
        job.not_needed["max_steps"] = "none, as here"


def _precision(job: Job) -> None:
    pure = job.flag("pure_bf16")
    if pure:
        job.carry("pure_bf16", "model.param_dtype", "bfloat16", "float32 keeps small updates")
    elif "pure_bf16" in job.taken:
        job.not_needed["pure_bf16"] = "off"
    precision(job, (("bf16", "bfloat16"), ("fp16", "float16")), param_dtype=False)
    if pure and "model.dtype" not in job.carried:
        job.carry("pure_bf16", "model.dtype", "bfloat16")


def _checkpoints(job: Job) -> None:
    """When to save and to evaluate, and the trackers."""
    for kind, setting in (("save", "output.save_steps"), ("eval", "training.eval_steps")):
        strategy = job.text(f"{kind}_strategy") or job.text("evaluation_strategy" if kind == "eval" else "")
        key = f"{kind}_strategy" if f"{kind}_strategy" in job.taken else "evaluation_strategy"
        if strategy in ("no", "epoch", "best"):
            if job.number(f"{kind}_steps") is not None:
                job.not_needed[f"{kind}_steps"] = f"{key} is {strategy}"
            if strategy == "no":
                job.not_needed[key] = f"{setting}: null"
            elif strategy == "epoch":
                job.carry(key, setting, "epoch")
            else:
                job.not_carried[key] = "output.load_best_model_at_end keeps the best checkpoint"
            continue
        if strategy is not None:
            job.not_needed[key] = f"{setting} says it"
        cadence(job, f"{kind}_steps", setting)
    if job.values.get("save_steps") is None and job.values.get("save_strategy") in (None, "steps"):
        job.carry("save_steps", "output.save_steps", 500)
    trackers = job.names("report_to") or []
    known = [name for name in TRACKERS if name in trackers or trackers == ["all"]]
    if known:
        job.carry("report_to", "output.report_to", known)
    elif trackers == ["none"]:
        job.not_needed["report_to"] = "none, as here"
    if others := [name for name in trackers if name not in (*TRACKERS, "none", "all")]:
        job.not_carried[f"report_to: {', '.join(others)}"] = _SWANLAB


def _sampling(job: Job, key: str, value: Any) -> None:
    """Carry the order of the rows over, in transformers' newer spelling."""
    if value == "group_by_length":
        job.carry(key, "training.group_by_length", True)
    elif value == "random":
        job.not_needed[key] = "so it is here"
    else:
        job.refused[key] = "rows are shuffled (random), or of similar length in a step (group_by_length)"


_ROWS: dict[str, Row] = {
    "cutoff_len": to("model.max_seq_length", 2048),
    "lora_dropout": to_number("lora.lora_dropout"),
    "use_rslora": to("lora.use_rslora"),
    "use_dora": to("lora.use_dora"),
    "additional_target": to_list("lora.modules_to_save"),
    "loraplus_lr_ratio": to_number("optimizer.loraplus_lr_ratio"),
    "loraplus_lr_embedding": to_number("optimizer.embedding_learning_rate"),
    "learning_rate": to_number("optimizer.learning_rate", 5e-5),
    "weight_decay": to_number("optimizer.weight_decay"),
    "max_grad_norm": to_number("optimizer.max_grad_norm"),
    "adam_beta1": to_number("optimizer.adam_beta1"),
    "adam_beta2": to_number("optimizer.adam_beta2"),
    "adam_epsilon": to_number("optimizer.adam_epsilon"),
    "per_device_train_batch_size": to("training.per_device_train_batch_size", 8),
    "per_device_eval_batch_size": to("training.per_device_eval_batch_size"),
    "gradient_accumulation_steps": to("training.gradient_accumulation_steps"),
    "num_train_epochs": to_number("training.num_train_epochs", 3.0),
    "logging_steps": to("training.logging_steps"),
    "early_stopping_steps": to("training.early_stopping_patience"),
    "label_smoothing_factor": to_number("training.label_smoothing_factor"),
    "neftune_noise_alpha": to_number("training.neftune_noise_alpha"),
    "moe_aux_loss_coef": to_number("training.router_aux_loss_coef"),
    "full_determinism": to("training.deterministic"),
    "seed": to("training.seed"),
    "output_dir": to("output.output_dir", "saves"),
    "overwrite_output_dir": to("output.overwrite_output_dir"),
    "save_total_limit": to("output.save_total_limit"),
    "load_best_model_at_end": to("output.load_best_model_at_end"),
    "run_name": to("output.run_name"),
    # What changes nothing.
    **dict.fromkeys(
        ("do_train", "do_eval"), unneeded("`fastjax train` trains, and evaluates where data.eval is given")
    ),
    "trust_remote_code": unneeded("no code of a model's folder is run"),
    **dict.fromkeys(("flash_attn", "use_unsloth", "use_unsloth_gc", "enable_liger_kernel"), unneeded(KERNELS)),
    **dict.fromkeys(("use_v1_kernels", "torch_compile*"), unneeded(KERNELS)),
    **dict.fromkeys(("gradient_checkpointing*", "disable_gradient_checkpointing"), unneeded(RECOMPUTE)),
    **dict.fromkeys(("activation_checkpointing*", "use_reentrant_gc"), unneeded(RECOMPUTE)),
    **dict.fromkeys(("deepspeed", "fsdp*", "ddp_*", "ray_*"), unneeded(PARALLEL)),
    **dict.fromkeys(
        ("preprocessing_*", "dataloader_*", "overwrite_cache"), unneeded("data.cache_dir keeps prepared data")
    ),
    **dict.fromkeys(
        ("data_shared_file_system", "buffer_size", "cache_dir"), unneeded("data.cache_dir keeps prepared data")
    ),
    **dict.fromkeys(
        ("use_fast_tokenizer", "resize_vocab"), unneeded("the tokenizer's files and model.new_tokens say it")
    ),
    **dict.fromkeys(("low_cpu_mem_usage", "offload_folder"), unneeded("weights are read one by one")),
    **dict.fromkeys(("infer_*", "use_kv_cache", "use_cache"), unneeded("of inference: `fastjax generate`")),
    **dict.fromkeys(("plot_loss", "print_param_status"), unneeded("report.html has the curves")),
    "include_effective_tokens_per_second": unneeded("the metrics have it"),
    **dict.fromkeys(("include_num_input_tokens_seen", "log_level"), unneeded("the metrics have it")),
    **dict.fromkeys(("save_only_model", "save_safetensors"), unneeded("the result is safetensors, a checkpoint whole")),
    **dict.fromkeys(("tf32", "bf16_full_eval", "fp16_full_eval"), unneeded("products are in model.dtype, never TF32")),
    **dict.fromkeys(
        ("freeze_vision_tower", "freeze_multi_modal_projector"), unneeded("a vision tower is left as it is")
    ),
    "ignore_pad_token_for_loss": unneeded("padding is never learnt"),
    "remove_unused_columns": unneeded("other columns are not read"),
    **dict.fromkeys(("upcast_layernorm", "upcast_lmhead_output"), lost("model.float32_modules: [norm], [lm_head]")),
    "double_quantization": lost("NF4 has quantised scales", among(True)),
    "quantization_type": lost("4 bits are NF4", among("nf4")),
    # What is not there.
    **dict.fromkeys(("swanlab_*", "use_swanlab", "trackio_*"), lost(_SWANLAB)),
    **dict.fromkeys(
        ("push_to_hub", "hub_*", "hf_hub_token", "ms_hub_token", "om_hub_token"), lost("nothing is uploaded")
    ),
    "resume_from_checkpoint": lost("`fastjax train --resume` goes on from this program's own checkpoints"),
    "compute_accuracy": lost("an evaluation has loss and perplexity"),
    "tokenized_path": lost("prepared data are kept in data.cache_dir"),
    "enable_thinking": lost("the tokenizer's own template says what becomes of thoughts", among(True)),
    "preserve_thinking": lost("the tokenizer's own template says what becomes of thoughts"),
    "tool_format": lost("the chat template writes tools"),
    "eval_on_each_dataset": lost("one loss for all held-out data"),
    "group_by_length": to("training.group_by_length"),
    "train_sampling_strategy": Row(_sampling, "training.group_by_length"),
    "length_column_name": unneeded("lengths are counted"),
    **dict.fromkeys(
        ("metric_for_best_model", "greater_is_better"), lost("eval_loss", among("loss", "eval_loss", False))
    ),
    "data_seed": lost("training.seed is the data's too"),
    **dict.fromkeys(("optim_args", "optim_target_modules"), refused(NAMES)),
    "create_new_adapter": unneeded("a fresh adapter, unless lora.adapter names one"),
    # What would make the result another.
    **dict.fromkeys(("use_dft_loss", "use_asft_loss", "use_eaft_loss"), refused(_LOSS)),
    **dict.fromkeys(("use_galore", "use_apollo", "use_badam", "use_adam_mini"), refused(NAMES)),
    **dict.fromkeys(
        ("galore_*", "apollo_*", "badam_*", "asft_alpha", "eaft_alpha"), unneeded("of a method that is off")
    ),
    **dict.fromkeys(("pref_*", "dpo_*", "kto_*", "simpo_*", "ref_model*", "ld_alpha"), unneeded(OTHER)),
    **dict.fromkeys(("ppo_*", "reward_model*"), unneeded("of another stage")),
    **dict.fromkeys(("oft_*", "freeze_trainable_*", "freeze_extra_modules"), unneeded("of another finetuning_type")),
    **dict.fromkeys(("pissa_init", "use_llama_pro", "mixture_of_depths"), refused(_METHOD)),
    **dict.fromkeys(("pissa_iter", "pissa_convert"), unneeded("of a method that is off")),
    "module_dropout": refused(_METHOD),
    **dict.fromkeys(("image_*", "video_*", "audio_*", "media_dir"), unneeded(_MULTIMODAL)),
    "freeze_language_model": refused(_MULTIMODAL),
    "shift_attn": refused("attention is the model's own"),
    "rope_scaling": refused("model.rope_scaling: {rope_type, factor} says by how much; add it by hand"),
    "default_system": refused("no system message is added; put it into the rows"),
    "disable_shuffling": refused("rows are shuffled"),
    "train_from_scratch": refused("a run starts from the base model's weights"),
    **dict.fromkeys(
        ("new_special_tokens_config", "init_special_tokens"), lost("new rows start as the mean of the others")
    ),
    "fp8": refused(FLOAT8),
    **dict.fromkeys(("use_mca", "use_megatron_bridge", "use_kt", "use_hyper_parallel"), refused("no other backends")),
    **dict.fromkeys(
        ("predict_with_generate", "do_predict"), refused("a run trains; `fastjax generate` answers prompts")
    ),
}

LLAMA_FACTORY = Tool(
    "llama-factory",
    (
        *("model_name_or_path", "stage", "finetuning_type", "cutoff_len", "template", "dataset_dir", "lora_target"),
        *("per_device_train_batch_size", "num_train_epochs"),
    ),
    _ROWS,
    (_base, _method, _schedule, _precision, _checkpoints, preferences, data),
)
