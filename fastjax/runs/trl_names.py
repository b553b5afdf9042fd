"""Names of transformers' and TRL's arguments that are no fields here, of this and of earlier versions."""

from collections.abc import Collection, Mapping
from typing import Any

from fastjax.options.other_names import OtherNames

#: Earlier name → the present one.
RENAMED = {"evaluation_strategy": "eval_strategy", "max_seq_length": "max_length"}

_GENERATE, _EVALUATE, _HUB = "model.generate", "Trainer's evaluate", "model.push_to_hub"
_OPTIMIZER, _LOSS, _PREFERENCES = "Trainer(optimizer=…)", "Trainer(loss=…)", "PreferencesSection"
_LOADING = "FastLanguageModel.from_pretrained"
_PARALLEL = "Trainer with TrainerSettings(parallel=ParallelSection(…))"
_REFERENCE = "the model as training begins, with the adapter that it has by then, which is the reference"
_SECTION = f"TrainerSettings(preferences={_PREFERENCES}(…)) for what losses there are"
_DTYPE, _TOKENIZER = f"dtype of {_LOADING}", "a tokenizer that has it"
_TRACKERS = "report_to with tensorboard or wandb"

#: Names of which no value changes anything here, by the reason.
_NOT_NEEDED = (
    # A step is one compiled program.
    *("torch_compile", "torch_compile_backend", "torch_compile_mode", "use_liger_kernel", "liger_kernel_config"),
    *("use_liger_loss", "torch_empty_cache_steps", "tf32", "use_cache", "average_tokens_across_devices", "local_rank"),
    *("ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph", "ddp_backend"),
    *("ddp_timeout", "fp16_opt_level", "half_precision_backend", "fp16_backend", "jit_mode_eval", "torchdynamo"),
    *("padding_free", "use_logits_to_keep", "unsloth_num_chunks", "base_model_attribute_name", "xpu_backend"),
    # FastLanguageModel's use_gradient_checkpointing says what is recomputed, by the device's memory.
    *("gradient_checkpointing", "gradient_checkpointing_kwargs"),
    *("activation_checkpointing", "activation_checkpointing_kwargs"),
    # Rows are read, encoded and fetched ahead of the steps.
    *("dataset_num_proc", "dataset_batch_size", "dataloader_num_workers", "dataloader_pin_memory"),
    *("dataloader_persistent_workers", "dataloader_prefetch_factor", "dataloader_multiprocessing_context"),
    *("dataloader_in_order", "remove_unused_columns", "label_names", "length_column_name", "shuffle_dataset"),
    *("padding_value", "label_pad_token_id", "pad_to_multiple_of"),
    # Every step is in metrics.jsonl, checked for what is not finite, and a checkpoint is whole.
    *("disable_tqdm", "logging_first_step", "log_on_each_node", "logging_nan_inf_filter", "log_level"),
    *("log_level_replica", "include_num_input_tokens_seen", "include_tokens_per_second", "skip_memory_metrics"),
    *("debug", "prediction_loss_only", "eval_do_concat_batches", "eval_use_gather_object", "eval_accumulation_steps"),
    *("save_on_each_node", "enable_jit_checkpoint", "restore_callback_states_from_checkpoint", "do_train", "do_eval"),
    # They belong to losses that are not served, or to a reference that moves.
    *("f_alpha_divergence_coef", "discopop_tau", "ref_model_mixup_alpha", "ref_model_sync_steps"),
)
#: What to use instead → the names whose every value but one that is off is refused.
_ELSEWHERE = {
    _HUB: (
        *("hub_token", "hub_private_repo", "hub_model_id", "hub_always_push", "push_to_hub", "hub_revision"),
        *("push_to_hub_model_id", "push_to_hub_organization", "push_to_hub_token"),
    ),
    _TRACKERS: ("trackio_space_id", "trackio_bucket_id", "trackio_static_space_id"),
    "the folder tensorboard of output_dir": ("logging_dir",),
    "use_gradient_checkpointing='offload' of FastLanguageModel": ("activation_offloading",),
    _PARALLEL: (
        *("deepspeed", "fsdp", "fsdp_config", "fsdp_min_num_params", "fsdp_transformer_layer_cls_to_wrap"),
        *("accelerator_config", "parallelism_config", "dispatch_batches", "split_batches", "mp_parameters"),
    ),
    _EVALUATE: (
        *("compute_metrics", "include_for_metrics", "include_inputs_for_metrics", "batch_eval_metrics"),
        *("preprocess_logits_for_metrics", "generate_during_eval"),
    ),
    _OPTIMIZER: ("optim_args", "optim_target_modules", "optimizer_cls_and_kwargs"),
    _LOSS: ("compute_loss_func", "rpo_alpha", "reference_free"),
    _TOKENIZER: ("eos_token", "pad_token"),
    _DTYPE: ("bf16_full_eval", "fp16_full_eval"),
    _LOADING: ("model_init_kwargs", "trust_remote_code", "quantization_config", "model_init"),
    _REFERENCE: (
        *("ref_model", "ref_model_init_kwargs", "model_adapter_name", "ref_adapter_name", "force_use_ref_model"),
    ),
    _SECTION: ("loss_weights", "ld_alpha", "use_weighting", "alpha", "is_encoder_decoder"),
    "eval_steps": ("eval_delay", "eval_on_start"),
    "per_device_train_batch_size": ("per_gpu_train_batch_size",),
    "per_device_eval_batch_size": ("per_gpu_eval_batch_size", "precompute_ref_batch_size"),
    "FastLanguageModel.get_peft_model": ("peft_config",),
    "train(resume_from_checkpoint=True)": ("resume_from_checkpoint",),
    "OptimizerConfig(min_lr_ratio=…, decay_ratio=…) of Trainer": ("lr_scheduler_kwargs",),
    "fastjax plan, which says how many rows fit": ("auto_find_batch_size",),
    "save_strategy='no', which keeps the result alone": ("save_only_model",),
    "the best checkpoint by eval_loss, of which less is better": ("greater_is_better",),
    "a resumed run, which goes on where its data were": ("ignore_data_skip",),
    "seed, which is the data's too": ("data_seed",),
    "the environment's JAX_PLATFORMS=cpu": ("use_cpu", "no_cuda", "use_mps_device", "use_ipex"),
    "the last rows of an epoch, in a batch without others": ("dataloader_drop_last",),
    _GENERATE: ("do_predict", "predict_with_generate"),
    "get_chat_template": ("chat_template_path",),
    "a column tools of the rows": ("tools",),
    "rows of token ids, which are taken as they are": ("dataset_kwargs",),
    "a loss with a reference": ("precompute_ref_log_probs",),
    "a reference that stays": ("sync_ref_model",),
    "a loss without it": ("router_aux_loss_coef",),
    f"{_PREFERENCES}('dpo', label_smoothing=…) of Trainer, which is cDPO": ("label_smoothing",),
    "max_length, over the whole of a row": ("max_prompt_length", "max_completion_length"),
    "formatting_func of SFTTrainer, or rows that are formatted already": ("formatting_func",),
    "a GPU": ("tpu_num_cores", "tpu_metrics_debug"),
}
#: Name → the values that mean what is done here, and what to use for others.
_ONLY: Mapping[str, tuple[Collection[Any], str]] = {
    **{name: ((), instead) for instead, names in _ELSEWHERE.items() for name in names},
    "optimizers": (((None, None),), _OPTIMIZER),
    "logging_strategy": (("steps",), "logging_steps"),
    "project": (("huggingface",), "OutputSection(project=…) of Trainer, with wandb"),
    "hub_strategy": (("end", "every_save"), _HUB),
    "metric_for_best_model": (("loss", "eval_loss"), "early stopping and the best checkpoint by eval_loss"),
    "truncation_mode": (("keep_start",), "rows that are cut already"),
    "packing_strategy": (("bfd",), "TrainerSettings(too_long=…)"),
    "loss_type": (("nll", "chunked_nll"), _LOSS),
    "f_divergence_type": (("reverse_kl",), _LOSS),
    "eval_packing": ((True,), "packing, which is the evaluation's too"),
    "save_safetensors": ((True,), "safetensors, in which everything is saved"),
    "ray_scope": (("last",), _EVALUATE),
    "past_index": ((-1,), _LOSS),
}
#: Beside the fields of `SharedArguments` and its kinds.
ARGUMENTS = OtherNames(not_needed=frozenset(_NOT_NEEDED), only=_ONLY)

#: Method of a trainer → what to use instead.
METHODS: Mapping[str, str] = {
    "predict": _GENERATE,
    "push_to_hub": _HUB,
    **dict.fromkeys(("log_metrics", "save_metrics", "save_state"), "metrics.jsonl and report.html of output_dir"),
    **dict.fromkeys(("create_optimizer", "create_scheduler", "optimizer", "lr_scheduler"), _OPTIMIZER),
    **dict.fromkeys(("compute_loss", "training_step", "accelerator"), _LOSS),
    **dict.fromkeys(("get_train_dataloader", "get_eval_dataloader"), "train_dataset, of which rows are shown"),
    "create_optimizer_and_scheduler": _OPTIMIZER,
    "create_model_card": "save_model, which writes one",
    **dict.fromkeys(("is_world_process_zero", "is_local_process_zero"), "state.is_world_process_zero"),
    "get_learning_rates": "state.log_history, which has them",
    "get_num_trainable_parameters": "model.num_parameters",
    "hyperparameter_search": "a loop over trainers",
}
