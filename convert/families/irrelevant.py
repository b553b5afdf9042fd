"""Fields of a config.json without effect on training or generation here.

transformers ignores each in the models of `FAMILIES`, or uses it outside their computation. A field neither read nor
listed here is refused: it may mean something.
"""

from typing import Any

_WRITER = """_name_or_path architectures auto_map finetuning_task is_llama_config model_type name_or_path prefix
    task_specific_params tokenizer_class transformers.js_config transformers_version"""
_OUTPUT = """chunk_size_feed_forward cache_implementation keys_to_ignore_at_inference output_attentions
    output_hidden_states output_router_logits pretraining_tp return_dict router_aux_loss_coef torchscript use_cache
    use_return_dict aux_loss_alpha ep_size seq_aux"""
_DTYPE = "dtype quantization_config torch_dtype use_bfloat16"
_KERNELS = "attn_implementation use_flash_attention use_flash_attn use_flash_attn_2"
_TOKENS = """bos_token_id decoder_start_token_id eod_token_id eos_token_id max_sequence_length model_max_length
    pad_token_id sep_token_id unk_token_id"""
_CLASSIFICATION = "classifier_dropout id2label label2id num_labels problem_type"
_GENERATION = """bad_words_ids begin_suppress_tokens diversity_penalty do_sample early_stopping
    encoder_no_repeat_ngram_size encoder_repetition_penalty epsilon_cutoff eta_cutoff exponential_decay_length_penalty
    forced_bos_token_id forced_eos_token_id length_penalty max_length max_new_tokens min_length min_new_tokens
    no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_scores remove_invalid_values
    repetition_penalty return_dict_in_generate suppress_tokens temperature top_k top_p typical_p"""

#: Fields with any value.
IRRELEVANT = frozenset(
    " ".join(
        (_WRITER, _OUTPUT, _DTYPE, _KERNELS, _TOKENS, _CLASSIFICATION, _GENERATION, "is_decoder is_encoder_decoder")
    ).split()
)
#: Fields of other models, or of variants -> the values that are true in any case.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "attention_bias": (False,),
    "attn_logit_softcapping": (None,),
    "clip_qkv": (None,),
    "cross_attention_hidden_size": (None,),
    "embd_pdrop": (0, None),
    "final_logit_softcapping": (None,),
    "hidden_dropout": (0, None),
    "mlp_bias": (False,),
    "pruned_heads": ({}, None),
    "resid_pdrop": (0, None),
    "rope_interleaved": (False,),
    "sliding_window": (None,),
    "tf_legacy_loss": (False,),
    "tie_encoder_decoder": (False,),
    "use_mrope": (False,),
    "use_qk_norm": (False,),
    "use_sliding_window": (False,),
}
