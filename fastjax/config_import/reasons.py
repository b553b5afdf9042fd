"""Keys of other tools without a setting here: why each is not needed, is not carried over, or ends the import.

A text lists keys, in which * stands for any letters. A tool whose functions read a key decides by itself what becomes
of it.
"""

import fnmatch
from collections.abc import Sequence
from typing import Any

FLOAT8 = "model.base_compute: float8 computes a frozen base in it, training.qat: float8 trains for serving in it"
KERNELS = "kernels are chosen for the GPU by themselves"
LOG = "no such tracker; output.report_to has tensorboard and wandb"
METHOD = "an adapter (lora) or every weight (full) is trained"
NAMES = "adamw, adamw_8bit, adafactor, lion and muon there are"
NO_RL = "there is no PPO or GRPO; preferences.loss has dpo, ipo, kto, orpo and simpo"
REFERENCE = "the reference is the model as training begins: without a fresh adapter"

#: Why a key changes nothing here, whatever its value → such keys.
NOT_NEEDED = {
    "config.json and the tokenizer's files say it": "model_type tokenizer_type tokenizer_use_fast tokenizer_legacy "
    "is_*_derived_model use_fast_tokenizer resize_vocab tokenizer_use_mistral_common model_class "
    "checkpointer.checkpoint_files checkpointer.model_type",
    "no code of a model's folder is run": "trust_remote_code",
    "model.use_gradient_checkpointing: auto recomputes what the GPU has no memory for": "gradient_checkpointing* "
    "activation_offloading selective_checkpointing disable_gradient_checkpointing activation_checkpointing* "
    "use_reentrant_gc enable_activation_checkpointing enable_activation_offloading ac_mode ac_option recompute_*",
    KERNELS: "*_attention attn_implementation flash_attn* flex_attn_* flash_optimum liger_* cut_cross_entropy "
    "chunked_cross_entropy* torch_compile* lora_*_kernel use_kernels use_scattermoe use_sonicmoe fused_attn_kernel "
    "experts_implementation dpo_padding_free dpo_use_logits_to_keep dpo_use_liger_kernel use_unsloth use_unsloth_gc "
    "enable_liger_kernel use_*_kernels optimizer.fused optimizer.foreach compile compile.* loss.num_output_chunks "
    "kernel_config gemma4_hybrid_attn_impl dsv4_* *_fusion moe_grouped_gemm moe_token_dispatcher_type "
    "pretrain_multipack_attn",
    "a folder is read in its own format, and model.load_in_4bit holds experts in NF4 too": "quantize_moe_experts "
    "llama4_linearized_experts model_quantization_config*",
    "parallel sizes itself: copies of the model where it fits on one device, else parallel.fsdp": "use_ray ray_* "
    "deepspeed fsdp* ddp* deepcompile device device_map local_rank accelerator_config custom_sharded_layers cudnn* "
    "tensor_parallel_plan memory_efficient_fsdp_wrap low_cpu_ram dist_config init_config dist_timeout cp_mode "
    "expert_parallel_* sequence_parallel pipeline_model_parallel_size use_distributed_optimizer overlap_* use_mca "
    "use_megatron_bridge use_hyper_parallel mixed_precision use_packed_sequences experimental_skip_move_to_device",
    "parallel.expert and model.offload_layers hold a large model": "use_kt kt_*",
    "products are in model.dtype, never in TF32": "tf32 bf16_full_eval fp16_full_eval",
    "data.cache_dir keeps prepared data": "dataset_prepared_path dataset_processes dataset_num_proc preprocessing_* "
    "dataset_keep_in_memory dataloader* overwrite_cache data_shared_file_system buffer_size cache_dir batching_workers "
    "tokenized_path streaming_multipack_buffer_size",
    "a batch is as long as its longest row, and padding is never learnt": "pad_to_sequence_len pad_to_multiple_of "
    "ignore_pad_token_for_loss collate_fn max_packed_sequence_len",
    "as in training": "eval_sample_packing sample_packing_* eval_sequence_len",
    "the template marks the ends of turns": "eot_tokens tokenizer_save_jinja_files",
    "nothing to set": "strict debug gc_steps remove_unused_columns length_column_name base_model_ignore_patterns "
    "export_hf_on_finish test_value shuffle_before_merging_datasets checkpointer.output_dir enable_async_checkpointing "
    "optimizer_in_bwd profiler create_new_adapter",
    "the metrics and the report have it": "plot_loss print_param_status include_tokens_per_second "
    "include_effective_tokens_per_second include_num_input_tokens_seen log_level log_peak_memory_stats "
    "metric_logger.log_dir metric_logger.output_fmt",
    "projections are linear layers, where PEFT leaves it out": "lora_fan_in_fan_out",
    "weights are streamed": "low_cpu_mem_usage lora_on_cpu qlora_sharded_model_loading offload_folder",
    "the result is safetensors, a checkpoint whole": "save_safetensors save_only_model save_ckpt_as_hf "
    "checkpointer.safe_serialization save_adapter_weights_only",
    "model.new_tokens does it": "resize_token_embeddings_to_32x mean_resizing_embeddings",
    "model.mlp_chunk: auto does so for long rows": "tiled_mlp",
    "a loss that is not finite ends the run, a spike is in the report": "loss_watchdog_*",
    "`fastjax train` trains, and evaluates where data.eval is given": "do_train do_eval",
    "of inference: `fastjax generate`": "infer_* use_kv_cache use_cache sample_backend max_new_tokens",
    "a vision tower is not read": "freeze_vision_tower freeze_multi_modal_projector image_* video_* audio_* media_dir",
    "of a method that is off": "galore_* apollo_* badam_* asft_alpha eaft_alpha pissa_iter pissa_convert fp8_* oft_* "
    "freeze_trainable_* freeze_extra_modules gptq_*",
    "of another loss, or of none": "rl_beta orpo_alpha simpo_gamma cpo_alpha kto_* trl dpo_label_smoothing pref_* "
    "dpo_* simpo_* ref_model* ld_alpha loss.beta loss.gamma precompute_ref_log_probs ppo_* reward_model_*",
    "the tokenizer is that of the model's folder": "tokenizer.*",
}

#: Why a key has no equivalent → such keys.
NOT_CARRIED = {
    "rows are always shuffled": "shuffle_merged_datasets shuffle curriculum_sampling disable_shuffling",
    "NF4 has quantised scales, as with bnb_4bit_use_double_quant": "bnb_config_kwargs double_quantization",
    "4 bits are NF4": "quantization_type",
    "preferences.max_length limits prompt and answer together": "max_prompt_len",
    "`fastjax generate` answers prompts": "dpo_generate_during_eval",
    "wandb reads it from its environment variables (WANDB_MODE, WANDB_RUN_ID)": "wandb_* metric_logger.*",
    LOG: "mlflow* use_mlflow comet_* use_comet swanlab* use_swanlab trackio* use_trackio use_otel_metrics otel_*",
    "nothing is uploaded; output.output_dir has the result": "hub_* push_dataset_to_hub hf_use_auth_token push_to_hub "
    "hf_hub_token ms_hub_token om_hub_token",
    "`fastjax train --resume` goes on from this program's own checkpoints": "resume_from_checkpoint "
    "checkpointer.recipe_checkpoint checkpointer.adapter_checkpoint",
    "model.float32_modules: [norm], [lm_head]": "upcast_layernorm upcast_lmhead_output",
    "an evaluation has one loss, which chooses the best, and perplexity": "metric_for_best_model greater_is_better "
    "eval_on_each_dataset compute_accuracy eval_table_size eval_max_new_tokens eval_causal_lm_metrics "
    "do_causal_lm_eval do_bench_eval",
    "the tokenizer's own template says what becomes of thoughts": "enable_thinking preserve_thinking",
    "the chat template writes tools": "tool_format",
    "training.seed is the data's too": "data_seed",
    "new rows start as the mean of the others": "new_special_tokens_config init_special_tokens",
    "output.save_steps: epoch saves at the end of each": "epochs_to_save save_epochs",
    f"products are in model.dtype, which is more exact; {FLOAT8}": "fp8",
    "the warm-up is linear": "lr_quadratic_warmup",
    "short rows stay; leave them out beforehand": "min_sample_len",
    "AdamW with all of its state is taken; optimizer.name: adamw_8bit holds a quarter": "use_galore use_apollo "
    "use_badam use_adam_mini",
    "weights in 1.58 bits are not made": "use_onebitllms",
    "training for a merge into NVFP4 is training.qat: nvfp4": "nvfp4_merge_aware",
    "parallel.tensor, parallel.context and parallel.expert": "tensor_model_parallel_size context_parallel_size "
    "expert_model_parallel_size",
}

#: Why the result would be another → such keys.
REFUSED = {
    "there is no such method": "relora* lisa_* jagged_restart_* embedding_lr_scale use_pose s2_attention shift_attn "
    "loftq peft pissa_init use_llama_pro mixture_of_depths module_dropout peft_layer_replication",
    "no cross-entropy is added to a loss of preferences": "rpo_alpha",
    "the loss is that of the paper": "dpo_use_weighting dpo_norm_loss dpo_loss_weights",
    "rl names the loss: dpo, ipo": "dpo_loss_type",
    "there are no rewards of single steps; preferences.loss: reward has one score a text": "process_reward_model",
    "models of text only": "processor_type image_size freeze_mm_modules freeze_language_model",
    "no bases in GPTQ; 16 bits, NF4, FP8 and compressed-tensors there are": "gptq",
    "one learning rate for all, and LoRA+": "lr_groups optim_args optim_target_modules",
    "the warm-up is linear, then cosine falls": "cosine_constant_lr_ratio lr_scheduler.num_cycles",
    "no system message is added; put it into the rows": "default_system_message default_system",
    "the tokenizer's files say which token has which id; change them there": "added_tokens_overrides",
    "the loss is cross-entropy": "use_eaft use_dft_loss use_asft_loss use_eaft_loss",
    "the base model's weights are those of its folder": "reinit_weights train_from_scratch",
    "the model is that of config.json": "scaling_softmax model.*",
    "model.rope_scaling: {rope_type, factor} says by how much; add it by hand": "rope_scaling",
    "a run trains; `fastjax generate` answers prompts": "predict_with_generate do_predict",
    "there is no distillation": "teacher_model teacher_checkpointer kd_loss kd_ratio",
    NO_RL: "policy_model reward_and_value_model grpo_* reward_checkpointer value_checkpointer ref_policy_checkpointer",
    REFERENCE: "ref_checkpointer",
    "data.chat_template takes a name or a Jinja file; put it there by hand": "tokenizer.prompt_template "
    "custom_chat_template",
}

#: Keys above → the values that change nothing; of others these are the ones that are off.
HARMLESS: dict[str, Sequence[Any]] = {
    **dict.fromkeys(("shuffle", "shuffle_merged_datasets", "double_quantization", "enable_thinking"), (True,)),
    **dict.fromkeys(("metric_for_best_model", "greater_is_better"), ("loss", "eval_loss", False)),
    **dict.fromkeys(("tensor_model_parallel_size", "context_parallel_size", "expert_model_parallel_size"), (1,)),
    "bnb_config_kwargs": ({"bnb_4bit_use_double_quant": True},),
    "quantization_type": ("nf4",),
    "dpo_loss_type": (None, [], ["sigmoid"]),
    "lr_scheduler.num_cycles": (0.5,),
}

#: A key, or the beginning of several → the list of a `Job` that it goes to, and why.
REASONS: dict[str, tuple[str, str]] = {
    key: (name, why)
    for name, table in {"not_needed": NOT_NEEDED, "not_carried": NOT_CARRIED, "refused": REFUSED}.items()
    for why, text in table.items()
    for key in text.split()
}


def reason_of(key: str) -> tuple[str, str] | None:
    """The list of a `Job` that a key goes to, and why; None: it is unknown."""
    return REASONS.get(key) or next((row for name, row in REASONS.items() if fnmatch.fnmatchcase(key, name)), None)
