"""LLaMA-Factory's settings (hiyouga/LLaMA-Factory, src/llamafactory/hparams).

What its own arguments do not name are transformers' TrainingArguments, with their defaults.
"""

from convert.errors import shorten
from fastjax.config_import import shared
from fastjax.config_import.job import Job, Tool
from fastjax.config_import.llama_factory_data import STAGES, data, preferences
from fastjax.config_import.shared import (
    FLOAT8,
    KERNELS,
    NAMES,
    OTHER,
    PARALLEL,
    RECOMPUTE,
    TRACKERS,
    cadence,
    optimizer,
    precision,
    schedule,
    warmup,
)

_METHOD = "an adapter (lora) or every weight (full) is trained"
_MULTIMODAL = "models of text only"
_SWANLAB = "no such tracker; output.report_to has tensorboard and wandb"


def _base(job: Job) -> None:
    shared.base_model(job, "model_name_or_path", "model_revision")
    for key in ("add_tokens", "add_special_tokens"):
        if tokens := job.names(key):
            job.carry_more(key, "model.new_tokens", list(dict.fromkeys(tokens)))
    if job.flag("split_special_tokens"):
        job.carry("split_special_tokens", "data.special_tokens", "text")


def _method(job: Job) -> None:
    """The stage, and LoRA, QLoRA or full fine-tuning."""
    stage = job.take("stage", str) or "sft"
    if stage not in ("sft", "pt", *STAGES):
        reward = " (for a reward model write preferences.loss: reward)" if stage == "rm" else ""
        job.refused["stage"] = f"{shorten(stage, 80)}: sft, pt (plain text), dpo and kto there are{reward}"
    method = job.take("finetuning_type", str) or "lora"
    bits, how = job.number("quantization_bit"), job.take("quantization_method", str) or "bnb"
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
    rank, alpha = job.integer("lora_rank", 8), job.number("lora_alpha")
    job.carry("lora_rank", "lora.r", rank)
    note = f"{job.tool.name}'s default: twice the rank" if alpha is None else ""
    job.carry("lora_alpha", "lora.lora_alpha", 2 * (rank or 8) if alpha is None else alpha, note)
    targets, adapters = job.names("lora_target"), job.names("adapter_name_or_path")
    if targets not in ([], ["all"]):  # lora.target_modules: null is every projection
        job.carry("lora_target", "lora.target_modules", targets)
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
    order = job.take("train_sampling_strategy")
    if order == "group_by_length":
        job.carry("train_sampling_strategy", "training.group_by_length", True)
    elif order not in (None, "random"):
        reason = "rows are shuffled (random), or of similar length in a step (group_by_length)"
        job.refused["train_sampling_strategy"] = reason


def _precision(job: Job) -> None:
    pure = job.flag("pure_bf16")
    if pure:
        job.carry("pure_bf16", "model.param_dtype", "bfloat16", "float32 keeps small updates")
    precision(job, {"bf16": "bfloat16", "fp16": "float16"}, param_dtype=False)
    if pure and "model.dtype" not in job.carried:
        job.carry("pure_bf16", "model.dtype", "bfloat16")


def _checkpoints(job: Job) -> None:
    """When to save and to evaluate, and the trackers."""
    for kind, setting in (("save", "output.save_steps"), ("eval", "training.eval_steps")):
        keys = [f"{kind}_strategy", *(["evaluation_strategy"] if kind == "eval" else [])]
        key, strategy = next(((key, value) for key in keys if (value := job.take(key, str))), (keys[0], None))
        if strategy == "epoch":
            job.carry(key, setting, "epoch")
        elif strategy == "best":
            job.not_carried[key] = "output.load_best_model_at_end keeps the best checkpoint"
        if strategy in ("no", "epoch", "best"):
            job.number(f"{kind}_steps")
        else:
            cadence(job, f"{kind}_steps", setting)
    if job.values.get("save_steps") is None and job.values.get("save_strategy") in (None, "steps"):
        job.carry("save_steps", "output.save_steps", 500)
    trackers = job.names("report_to")
    known = [name for name in TRACKERS if name in trackers or trackers == ["all"]]
    job.carry_given("report_to", "output.report_to", known or None)
    if others := [name for name in trackers if name not in (*TRACKERS, "none", "all")]:
        job.not_carried[f"report_to: {', '.join(others)}"] = _SWANLAB


SETTINGS = {
    "model": "cutoff_len:max_seq_length",
    "lora": "use_rslora use_dora additional_target:modules_to_save",
    "training": "per_device_train_batch_size per_device_eval_batch_size gradient_accumulation_steps num_train_epochs "
    "early_stopping_steps:early_stopping_patience moe_aux_loss_coef:router_aux_loss_coef "
    "full_determinism:deterministic",
    "output": "output_dir overwrite_output_dir run_name",
}

DEFAULTS = {
    "cutoff_len": 2048,
    "learning_rate": 5e-5,
    "per_device_train_batch_size": 8,
    "num_train_epochs": 3.0,
    "output_dir": "saves",
}

NOT_NEEDED = {
    "`fastjax train` trains, and evaluates where data.eval is given": "do_train do_eval",
    "no code of a model's folder is run": "trust_remote_code",
    KERNELS: "flash_attn use_unsloth use_unsloth_gc enable_liger_kernel use_v1_kernels torch_compile*",
    RECOMPUTE: "gradient_checkpointing* disable_gradient_checkpointing activation_checkpointing* use_reentrant_gc",
    PARALLEL: "deepspeed fsdp* ddp_* ray_*",
    "data.cache_dir keeps prepared data": "preprocessing_* dataloader_* overwrite_cache data_shared_file_system "
    "buffer_size cache_dir",
    "the tokenizer's files and model.new_tokens say it": "use_fast_tokenizer resize_vocab",
    "weights are read one by one": "low_cpu_mem_usage offload_folder",
    "of inference: `fastjax generate`": "infer_* use_kv_cache use_cache",
    "report.html has the curves": "plot_loss print_param_status",
    "the metrics have it": "include_effective_tokens_per_second include_num_input_tokens_seen log_level",
    "the result is safetensors, a checkpoint whole": "save_only_model save_safetensors",
    "products are in model.dtype, never TF32": "tf32 bf16_full_eval fp16_full_eval",
    "a vision tower is left as it is": "freeze_vision_tower freeze_multi_modal_projector",
    "padding is never learnt": "ignore_pad_token_for_loss",
    "other columns are not read": "remove_unused_columns",
    "lengths are counted": "length_column_name",
    "a fresh adapter, unless lora.adapter names one": "create_new_adapter",
    "of a method that is off": "galore_* apollo_* badam_* asft_alpha eaft_alpha pissa_iter pissa_convert",
    OTHER: "pref_* dpo_* kto_* simpo_* ref_model* ld_alpha",
    "of another stage": "ppo_* reward_model*",
    "of another finetuning_type": "oft_* freeze_trainable_* freeze_extra_modules",
    _MULTIMODAL: "image_* video_* audio_* media_dir",
}

NOT_CARRIED = {
    "model.float32_modules: [norm], [lm_head]": "upcast_layernorm upcast_lmhead_output",
    "NF4 has quantised scales": "double_quantization",
    "4 bits are NF4": "quantization_type",
    _SWANLAB: "swanlab_* use_swanlab trackio_*",
    "nothing is uploaded": "push_to_hub hub_* hf_hub_token ms_hub_token om_hub_token",
    "`fastjax train --resume` goes on from this program's own checkpoints": "resume_from_checkpoint",
    "an evaluation has loss and perplexity": "compute_accuracy",
    "prepared data are kept in data.cache_dir": "tokenized_path",
    "the tokenizer's own template says what becomes of thoughts": "enable_thinking preserve_thinking",
    "the chat template writes tools": "tool_format",
    "one loss for all held-out data": "eval_on_each_dataset",
    "eval_loss": "metric_for_best_model greater_is_better",
    "training.seed is the data's too": "data_seed",
    "new rows start as the mean of the others": "new_special_tokens_config init_special_tokens",
}

REFUSED = {
    NAMES: "optim_args optim_target_modules use_galore use_apollo use_badam use_adam_mini",
    "the loss is cross-entropy": "use_dft_loss use_asft_loss use_eaft_loss",
    _METHOD: "pissa_init use_llama_pro mixture_of_depths module_dropout",
    _MULTIMODAL: "freeze_language_model",
    "attention is the model's own": "shift_attn",
    "model.rope_scaling: {rope_type, factor} says by how much; add it by hand": "rope_scaling",
    "no system message is added; put it into the rows": "default_system",
    "rows are shuffled": "disable_shuffling",
    "a run starts from the base model's weights": "train_from_scratch",
    FLOAT8: "fp8",
    "no other backends": "use_mca use_megatron_bridge use_kt use_hyper_parallel",
    "a run trains; `fastjax generate` answers prompts": "predict_with_generate do_predict",
}

LLAMA_FACTORY = Tool(
    "llama-factory",
    "model_name_or_path stage finetuning_type cutoff_len template dataset_dir lora_target per_device_train_batch_size "
    "num_train_epochs",
    (_base, _method, _schedule, _precision, _checkpoints, preferences, data),
    (shared.SETTINGS, SETTINGS),
    DEFAULTS,
    NOT_NEEDED,
    NOT_CARRIED,
    REFUSED,
    {
        **dict.fromkeys(("double_quantization", "enable_thinking"), (True,)),
        **dict.fromkeys(("metric_for_best_model", "greater_is_better"), ("loss", "eval_loss", False)),
        "quantization_type": ("nf4",),
    },
)
