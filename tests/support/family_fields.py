"""Fields of transformers' configs that need no support, or have none."""

#: Fields of transformers' configs that do not change the model's computation, each with the reason.
IRRELEVANT = {
    "transformers_version": "of the writer",
    "architectures": "class name",
    "output_hidden_states": "what transformers returns",
    "output_attentions": "what transformers returns",
    "return_dict": "how transformers returns it",
    "dtype": "of the stored weights, which say it themselves",
    "chunk_size_feed_forward": "memory in transformers",
    "is_encoder_decoder": "never for these",
    "id2label": "classification",
    "label2id": "classification",
    "problem_type": "classification",
    "model_type": "chooses the class",
    "_name_or_path": "where it came from",
    "_sliding_window_pattern": "what layer_types were made of",
    "default_theta": "of the class",
    "attention_dropout": "in training alone",
    "residual_dropout": "in training alone",
    "resid_pdrop": "likewise",
    "embedding_dropout": "in training alone",
    "pretraining_tp": "how a model was split in pretraining",
    "eod_token_id": "of the tokenizer",
    "output_router_logits": "what transformers returns",
    "router_aux_loss_coef": "of a loss in pretraining",
    "num_nextn_predict_layers": "of another module",
    **dict.fromkeys(
        (f"linear_{name}" for name in ("a_log_min", "a_log_max", "dt_min", "dt_max", "dt_init_floor")),
        "of fresh weights",
    ),
    "num_mtp_layers": "of another module",
}
#: Sizes in place of a class's default ones, which fit no model or are missing.
DIVISIBLE = {"glm4_moe": {"hidden_size": 96 * 64}, "solar_open": {"intermediate_size": 10240}}
#: Fields refused off their default, with such a value.
REFUSED = {
    "resid_pdrop": 0.1,
    "embd_pdrop": 0.1,
    "use_bidirectional_attention": True,
    "router_jitter_noise": 0.1,
    ("gemma3_text", "attn_logit_softcapping"): 3.0,  # transformers reads it and does not use it
    ("gpt_oss", "hidden_act"): "gelu",  # likewise
    ("apertus", "hidden_act"): "silu",  # there would be no numbers of xIELU
    ("phi", "resid_pdrop"): None,
    **{(family, "mlp_bias"): True for family in ("deepseek_v32", "glm_moe_dsa")},  # no published model has it
}


def refused(family, field):
    """A refused value of the field, or None."""
    return REFUSED.get((family, field), REFUSED.get(field))
