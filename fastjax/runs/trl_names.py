"""The names of transformers' and TRL's arguments that are no fields here: what becomes of each.

One changes nothing here, or has another place, or is served with the values alone that mean what is done here; a value
that is off (None, False, 0, "", [] or {}) asks for nothing. Every other one is refused, with its place.
"""

from collections.abc import Mapping
from typing import Any

_EVALUATE = "Trainer's evaluate"
_HUB = "model.push_to_hub"
_OPTIMIZER = "Trainer(optimizer=…)"
_PARALLEL = "fastjax train with parallel.fsdp"
_REFERENCE = "the model as training begins, with the adapter that it has by then, which is the reference"
_SECTION = "TrainerSettings(preferences=PreferencesSection(…)) for what losses there are"
_TRACKERS = "report_to with tensorboard or wandb"

#: Names that change nothing here.
NOT_NEEDED = frozenset(
    (
        # A step is one compiled program, and a run has one device.
        *("torch_compile", "torch_compile_backend", "torch_compile_mode", "use_liger_kernel", "liger_kernel_config"),
        *("torch_empty_cache_steps", "tf32", "use_cache", "average_tokens_across_devices", "local_rank"),
        *("ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph"),
        *("ddp_backend", "ddp_timeout"),
        # FastLanguageModel's use_gradient_checkpointing says what is recomputed, by the device's memory.
        *("gradient_checkpointing", "gradient_checkpointing_kwargs"),
        *("activation_checkpointing", "activation_checkpointing_kwargs"),
        # Rows are read, encoded and fetched ahead of the steps.
        *("dataset_num_proc", "dataloader_num_workers", "dataloader_pin_memory", "dataloader_persistent_workers"),
        *("dataloader_prefetch_factor", "dataloader_multiprocessing_context", "dataloader_in_order"),
        *("remove_unused_columns", "label_names", "length_column_name", "shuffle_dataset", "padding_value"),
        # A batch is as long as its longest row, rounded up to one of a few lengths.
        "pad_to_multiple_of",
        # Every step is in metrics.jsonl, checked for what is not finite, and a checkpoint is whole.
        *("disable_tqdm", "logging_first_step", "log_on_each_node", "logging_nan_inf_filter", "log_level"),
        *("log_level_replica", "include_num_input_tokens_seen", "skip_memory_metrics", "debug"),
        *("prediction_loss_only", "eval_do_concat_batches", "eval_use_gather_object", "eval_accumulation_steps"),
        *("save_on_each_node", "enable_jit_checkpoint", "restore_callback_states_from_checkpoint"),
        *("do_train", "do_eval"),
        # Of losses that are not served, or a reference that moves.
        *("f_alpha_divergence_coef", "discopop_tau", "ref_model_mixup_alpha", "ref_model_sync_steps"),
    )
)
#: Name -> the values that mean what is done here, and what to use for others.
ONLY: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "logging_strategy": (("steps",), "logging_steps"),
    "project": (("huggingface",), "OutputSection(project=…) of Trainer, with wandb"),
    "hub_strategy": (("end", "every_save"), _HUB),
    "metric_for_best_model": (("loss", "eval_loss"), "early stopping and the best checkpoint by eval_loss"),
    "truncation_mode": (("keep_start",), "rows that are cut already"),
    "packing_strategy": (("bfd",), "TrainerSettings(too_long=…)"),
    "loss_type": (("nll", "chunked_nll"), "Trainer(loss=…)"),
    "f_divergence_type": (("reverse_kl",), "Trainer(loss=…)"),
    **dict.fromkeys(("hub_token", "hub_private_repo", "hub_model_id", "hub_always_push"), ((), _HUB)),
    **dict.fromkeys(("push_to_hub", "hub_revision"), ((), _HUB)),
    **dict.fromkeys(("trackio_space_id", "trackio_bucket_id", "trackio_static_space_id"), ((), _TRACKERS)),
    "activation_offloading": ((), "use_gradient_checkpointing='offload' of FastLanguageModel"),
    **dict.fromkeys(("deepspeed", "fsdp", "fsdp_config", "accelerator_config", "parallelism_config"), ((), _PARALLEL)),
    **dict.fromkeys(("compute_metrics", "include_for_metrics", "batch_eval_metrics"), ((), _EVALUATE)),
    **dict.fromkeys(("optim_args", "optim_target_modules"), ((), _OPTIMIZER)),
    **dict.fromkeys(("eos_token", "pad_token"), ((), "a tokenizer that has it")),
    **dict.fromkeys(("bf16_full_eval", "fp16_full_eval"), ((), "dtype of FastLanguageModel.from_pretrained")),
    **dict.fromkeys(("model_init_kwargs", "trust_remote_code"), ((), "FastLanguageModel.from_pretrained")),
    **dict.fromkeys(("eval_delay", "eval_on_start"), ((), "eval_steps")),
    "peft_config": ((), "FastLanguageModel.get_peft_model"),
    "resume_from_checkpoint": ((), "train(resume=True)"),
    "formatting_func": ((), "rows that are formatted already, or a chat template"),
    "data_collator": ((), "Trainer's loss_on: responses, last_response or all"),
    "lr_scheduler_kwargs": ((), "OptimizerConfig(min_lr_ratio=…, decay_ratio=…) of Trainer"),
    "auto_find_batch_size": ((), "fastjax plan, which says how many rows fit"),
    "save_only_model": ((), "save_strategy='no', which keeps the result alone"),
    "greater_is_better": ((), "the best checkpoint by eval_loss, of which less is better"),
    "ignore_data_skip": ((), "a resumed run, which goes on where its data were"),
    "data_seed": ((), "seed, which is the data's too"),
    "use_cpu": ((), "the environment's JAX_PLATFORMS=cpu"),
    "dataloader_drop_last": ((), "the last rows of an epoch, in a batch without others"),
    "do_predict": ((), "model.generate"),
    "chat_template_path": ((), "get_chat_template"),
    "dataset_kwargs": ((), "rows of token ids, which are taken as they are"),
    "padding_free": ((), "packing"),
    "eval_packing": ((True,), "packing, which is the evaluation's too"),
    **dict.fromkeys(
        ("max_prompt_length", "max_completion_length"), ((), "max_length, over prompt and answer together")
    ),
    "ref_model": ((), _REFERENCE),
    "precompute_ref_log_probs": ((), "a loss with a reference"),
    "precompute_ref_batch_size": ((), "per_device_eval_batch_size"),
    "sync_ref_model": ((), "a reference that stays"),
    "generate_during_eval": ((), _EVALUATE),
    "router_aux_loss_coef": ((), "a loss without it"),
    "quantization_config": ((), "FastLanguageModel.from_pretrained"),
    "label_smoothing": ((), "PreferencesSection('dpo', label_smoothing=…) of Trainer, which is cDPO"),
    **dict.fromkeys(("loss_weights", "ld_alpha", "use_weighting", "alpha", "is_encoder_decoder"), ((), _SECTION)),
}
