"""One tiny model a family, with every field of its config off transformers' default."""

from tests.support import tiny

_SIZES = {
    "dtype": "float32",
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 160,
    "initializer_range": 0.15,
    "use_cache": False,
    "bos_token_id": 7,
    "eos_token_id": 8,
    "pad_token_id": 96,
    "rms_norm_eps": 3e-2,
    "rope_parameters": {"rope_type": "linear", "rope_theta": 300.0, "factor": 1.5},
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 300.0,
    "factor": 4.0,
    "original_max_position_embeddings": 40,
    "beta_fast": 6.0,
    "beta_slow": 1.5,
    "truncate": False,
}
_LLAMA3 = {**tiny.ROPE, "rope_theta": 300.0}
FULL, SLIDING = "full_attention", "sliding_attention"


def _family(name, **fields):
    return {**_SIZES, "model_type": name, **fields}


def without(config, *names):
    return {name: value for name, value in config.items() if name not in names}


_WINDOWS = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
_GEMMA = {
    "head_dim": 10,
    "tie_word_embeddings": False,
    "attention_bias": True,
    "sliding_window": 6,
    "query_pre_attn_scalar": 23,
    "hidden_activation": "silu",
    "final_logit_softcapping": 4.0,
}
_PERIOD_OF_THREE = [SLIDING, FULL, SLIDING] * 2 + [SLIDING]

#: model_type -> a config.json.
CONFIGS = {
    "qwen2": _family(
        "qwen2",
        **_WINDOWS,
        hidden_act="gelu_pytorch_tanh",
        tie_word_embeddings=True,
        num_hidden_layers=4,
        layer_types=[SLIDING, FULL] * 2,
        rope_parameters=YARN,
    ),
    "qwen3": _family(
        "qwen3",
        **_WINDOWS,
        head_dim=10,
        hidden_act="gelu_pytorch_tanh",
        tie_word_embeddings=True,
        attention_bias=True,
        num_hidden_layers=4,
        layer_types=[FULL, SLIDING] * 2,
        rope_parameters=YARN,
    ),
    "mistral": _family("mistral", head_dim=10, hidden_act="gelu", tie_word_embeddings=True, sliding_window=6),
    "ministral": _family(
        "ministral",
        head_dim=10,
        hidden_act="gelu",
        tie_word_embeddings=True,
        sliding_window=6,
        num_hidden_layers=4,
        layer_types=[SLIDING, FULL] * 2,
    ),
    "gemma": _family("gemma", head_dim=10, tie_word_embeddings=False, attention_bias=True, hidden_act="silu"),
    "gemma2": _family(
        "gemma2",
        **_GEMMA,
        attn_logit_softcapping=2.0,
        num_hidden_layers=4,
        layer_types=[FULL, SLIDING] * 2,
        rope_parameters=_LLAMA3,
    ),
    "gemma3_text": _family(
        "gemma3_text",
        **_GEMMA,
        num_hidden_layers=len(_PERIOD_OF_THREE),
        layer_types=_PERIOD_OF_THREE,
        rope_parameters={
            FULL: {"rope_type": "linear", "rope_theta": 900.0, "factor": 1.5},
            SLIDING: {"rope_type": "default", "rope_theta": 50.0},
        },
    ),
    "phi3": _family(
        "phi3",
        tie_word_embeddings=True,
        hidden_act="gelu_pytorch_tanh",
        sliding_window=30,
        original_max_position_embeddings=20,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 300.0,
            "partial_rotary_factor": 0.75,
            "short_factor": [1.0, 1.2, 1.5],
            "long_factor": [1.5, 3.0, 6.0],
        },
    ),
    "granite": _family(
        "granite",
        hidden_act="gelu_pytorch_tanh",
        tie_word_embeddings=True,
        attention_bias=True,
        mlp_bias=True,
        embedding_multiplier=3.0,
        residual_multiplier=0.6,
        attention_multiplier=0.2,
        logits_scaling=0.8,
        max_position_embeddings=24,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 300.0, "factor": 6.0},
    ),
    "olmo2": _family("olmo2", hidden_act="gelu", tie_word_embeddings=True, attention_bias=True),
    "smollm3": _family(
        "smollm3",
        hidden_act="gelu_pytorch_tanh",
        tie_word_embeddings=False,
        attention_bias=True,
        mlp_bias=True,
        use_sliding_window=True,
        sliding_window=6,
        num_hidden_layers=4,
        no_rope_layers=[1, 0] * 2,
        no_rope_layer_interval=3,
        layer_types=[SLIDING, FULL] * 2,
    ),
    "cohere": without(
        _family(
            "cohere",
            hidden_act="gelu_pytorch_tanh",
            tie_word_embeddings=False,
            attention_bias=True,
            use_qk_norm=True,
            logit_scale=1.7,
            layer_norm_eps=3e-2,
        ),
        "rms_norm_eps",
    ),
}

CONFIGS |= {
    "olmo3": _family(
        "olmo3",
        hidden_act="gelu",
        tie_word_embeddings=True,
        attention_bias=True,
        num_hidden_layers=4,
        sliding_window=6,
        layer_types=[FULL, SLIDING] * 2,
        rope_parameters={FULL: without(YARN, "truncate"), SLIDING: {"rope_type": "default", "rope_theta": 50.0}},
    ),
    "exaone4": _family(
        "exaone4",
        hidden_act="gelu",
        tie_word_embeddings=True,
        num_hidden_layers=4,
        sliding_window=6,
        sliding_window_pattern=2,
        layer_types=[FULL, SLIDING] * 2,
    ),
    "ministral3": _family(
        "ministral3",
        head_dim=10,
        hidden_act="gelu",
        tie_word_embeddings=True,
        sliding_window=6,
        rope_parameters={**YARN, "original_max_position_embeddings": 7, "llama_4_scaling_beta": 0.7},
    ),
    "arcee": _family(
        "arcee",
        head_dim=10,
        hidden_act="gelu",
        tie_word_embeddings=True,
        attention_bias=True,
        mlp_bias=True,
    ),
    "hunyuan_v1_dense": _family(
        "hunyuan_v1_dense",
        head_dim=10,
        hidden_act="gelu",
        tie_word_embeddings=True,
        attention_bias=True,
    ),
    "seed_oss": _family(
        "seed_oss",
        head_dim=10,
        hidden_act="gelu",
        tie_word_embeddings=True,
        attention_bias=False,
        attention_out_bias=True,
        mlp_bias=True,
        attention_dropout=0.0,
        residual_dropout=0.0,
    ),
}
_PARTIAL = {"rope_type": "linear", "rope_theta": 300.0, "factor": 1.5, "partial_rotary_factor": 0.6}
CONFIGS |= {
    "glm4": _family(
        "glm4",
        num_key_value_heads=1,
        head_dim=20,
        hidden_act="gelu",
        tie_word_embeddings=True,
        attention_bias=False,
        rope_parameters=_PARTIAL,
    ),
    "ernie4_5": _family(
        "ernie4_5",
        num_key_value_heads=1,
        head_dim=10,
        hidden_act="gelu",
        tie_word_embeddings=False,
        use_bias=True,
    ),
    "apertus": _family(
        "apertus",
        head_dim=10,
        tie_word_embeddings=True,
        attention_bias=True,
    ),
    "cohere2": without(
        _family(
            "cohere2",
            hidden_act="gelu_pytorch_tanh",
            tie_word_embeddings=False,
            attention_bias=True,
            logit_scale=1.7,
            layer_norm_eps=3e-2,
            sliding_window=6,
            num_hidden_layers=4,
            layer_types=[FULL, SLIDING] * 2,
        ),
        "rms_norm_eps",
    ),
    "nemotron": without(
        _family(
            "nemotron",
            head_dim=20,
            hidden_act="gelu",
            tie_word_embeddings=True,
            attention_bias=True,
            mlp_bias=True,
            norm_eps=3e-2,
            rope_parameters=_PARTIAL,
        ),
        "rms_norm_eps",
    ),
    "phi": without(
        _family(
            "phi",
            hidden_size=40,
            hidden_act="relu2",
            tie_word_embeddings=True,
            layer_norm_eps=3e-2,
            qk_layernorm=True,
            rope_parameters=_PARTIAL,
        ),
        "rms_norm_eps",
    ),
}
LINEAR = "linear_attention"
_DELTA = {
    "head_dim": 24,
    "hidden_act": "gelu",
    "tie_word_embeddings": True,
    "attention_bias": True,
    "num_hidden_layers": 4,
    "layer_types": [LINEAR, FULL] * 2,
    "linear_conv_kernel_dim": 3,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 10,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "rope_parameters": {
        **{"rope_type": "linear", "rope_theta": 300.0, "factor": 1.5, "partial_rotary_factor": 0.5},
        **{"mrope_section": [3, 2, 1], "mrope_interleaved": True},
    },
}
#: Layers with Gated DeltaNet.
CONFIGS |= {
    "qwen3_5_text": _family("qwen3_5_text", **_DELTA),
    "olmo_hybrid": _family(
        "olmo_hybrid",
        **_DELTA | {"rope_parameters": {"rope_type": "linear", "rope_theta": 300.0, "factor": 1.5}},
        linear_allow_neg_eigval=False,
    ),
}
CONFIGS |= {
    "starcoder2": without(
        _family(
            "starcoder2",
            hidden_act="gelu",
            tie_word_embeddings=False,
            sliding_window=6,
            num_key_value_heads=1,
            norm_epsilon=3e-2,
            use_bias=False,
        ),
        "rms_norm_eps",
    ),
    "olmo": without(
        _family("olmo", hidden_act="gelu", tie_word_embeddings=True, attention_bias=True, clip_qkv=0.7),
        "rms_norm_eps",
    ),
    "helium": _family(
        "helium",
        hidden_size=40,
        head_dim=10,
        hidden_act="gelu",
        tie_word_embeddings=True,
        attention_bias=True,
        mlp_bias=True,
    ),
}
CONFIGS["granite_swa"] = CONFIGS["granite"] | {
    "model_type": "granite_swa",
    "tie_word_embeddings": False,
    "num_hidden_layers": 4,
    "sliding_window": 6,
    "layer_types": [FULL, SLIDING] * 2,
    "layer_rope_theta": [300.0, 50, 0, 50],
    "max_position_embeddings": 160,
    "rope_parameters": _SIZES["rope_parameters"],
}
_EXPERTS = {"num_experts_per_tok": 3, "norm_topk_prob": True, "router_aux_loss_coef": 0.02}
#: model_type -> a config.json of the families with mixtures of experts.
MIXTURES = {
    "mixtral": _family(
        "mixtral",
        head_dim=10,
        hidden_act="gelu",
        tie_word_embeddings=True,
        sliding_window=6,
        num_local_experts=4,
        num_experts_per_tok=3,
        router_aux_loss_coef=0.02,
    ),
    "qwen2_moe": _family(
        "qwen2_moe",
        **_EXPERTS,
        use_sliding_window=True,
        sliding_window=5,
        max_window_layers=3,
        hidden_act="gelu",
        tie_word_embeddings=True,
        num_hidden_layers=4,
        layer_types=[FULL, SLIDING] * 2,
        qkv_bias=False,
        num_experts=4,
        moe_intermediate_size=12,
        shared_expert_intermediate_size=20,
        decoder_sparse_step=2,
        mlp_only_layers=[1],
    ),
    "qwen3_moe": _family(
        "qwen3_moe",
        **_EXPERTS,
        head_dim=10,
        use_sliding_window=True,
        sliding_window=5,
        hidden_act="gelu",
        tie_word_embeddings=True,
        attention_bias=True,
        num_hidden_layers=4,
        num_experts=4,
        moe_intermediate_size=12,
        decoder_sparse_step=2,
        mlp_only_layers=[1],
        rope_parameters=YARN,
    ),
    "olmoe": _family(
        "olmoe",
        **_EXPERTS,
        hidden_act="gelu",
        tie_word_embeddings=True,
        attention_bias=True,
        clip_qkv=0.9,
        num_experts=4,
    ),
    "gpt_oss": _family(
        "gpt_oss",
        head_dim=10,
        tie_word_embeddings=True,
        attention_bias=False,
        num_hidden_layers=4,
        sliding_window=6,
        layer_types=[FULL, SLIDING] * 2,
        intermediate_size=64,
        num_local_experts=4,
        num_experts_per_tok=3,
        router_aux_loss_coef=0.02,
        swiglu_limit=0.4,
        swiglu_alpha=1.3,
    ),
    "glm4_moe": _family(
        "glm4_moe",
        head_dim=20,
        hidden_act="gelu",
        tie_word_embeddings=True,
        attention_bias=True,
        use_qk_norm=True,
        num_hidden_layers=4,
        first_k_dense_replace=2,
        n_routed_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=12,
        n_shared_experts=2,
        n_group=4,
        topk_group=2,
        norm_topk_prob=False,
        routed_scaling_factor=1.7,
        rope_parameters={
            "rope_type": "linear",
            "rope_theta": 300.0,
            "factor": 1.5,
            "partial_rotary_factor": 0.6,
        },
    ),
}
_MIXED = {**_DELTA, "num_experts_per_tok": 3, "num_experts": 4, "moe_intermediate_size": 12}
_MIXED |= {"num_key_value_heads": 1, "shared_expert_intermediate_size": 20, "router_aux_loss_coef": 0.02}
MIXTURES |= {
    "qwen3_5_moe_text": without(_family("qwen3_5_moe_text", **_MIXED), "intermediate_size"),
    "qwen3_next": _family("qwen3_next", **_MIXED, norm_topk_prob=False, decoder_sparse_step=2, mlp_only_layers=[1]),
}
_LATENT = {
    "num_key_value_heads": 4,
    "hidden_act": "gelu",
    "tie_word_embeddings": True,
    "attention_bias": True,
    "q_lora_rank": 20,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 14,
    "rope_interleave": False,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 12,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.7,
    "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3},
}
MIXTURES |= {
    "deepseek_v3": _family("deepseek_v3", **_LATENT, first_k_dense_replace=1),
    "glm4_moe_lite": _family("glm4_moe_lite", **_LATENT, mlp_layer_types=["sparse", "dense", "sparse"]),
    "mistral4": _family("mistral4", **_LATENT, first_k_dense_replace=1)
    | {
        "rope_parameters": {
            **YARN,
            **{"mscale": 0.7, "mscale_all_dim": 1.3, "partial_rotary_factor": 6 / 16},
            **{"original_max_position_embeddings": 7, "llama_4_scaling_beta": 0.7},
        },
    },
}
_INDEXED = {name: value for name, value in _LATENT.items() if name != "rope_interleave"}
_INDEXED |= {"index_topk": 64, "index_head_dim": 8, "index_n_heads": 3, "first_k_dense_replace": 1}
MIXTURES |= {
    "deepseek_v32": _family("deepseek_v32", **_INDEXED, mlp_layer_types=["sparse", "dense", "sparse"]),
    "glm_moe_dsa": _family(
        "glm_moe_dsa",
        **_INDEXED,
        mlp_layer_types=["dense", "sparse", "sparse"],
        indexer_types=["full", "shared", "full"],
    ),
}
MIXTURES |= {
    "minimax_m2": _family(
        "minimax_m2",
        head_dim=20,
        hidden_act="gelu",
        tie_word_embeddings=True,
        intermediate_size=12,
        num_local_experts=4,
        num_experts_per_tok=3,
        router_aux_loss_coef=0.02,
        rope_parameters=MIXTURES["glm4_moe"]["rope_parameters"],
    ),
    "exaone_moe": _family(
        "exaone_moe",
        hidden_act="gelu",
        tie_word_embeddings=True,
        num_hidden_layers=4,
        sliding_window=6,
        sliding_window_pattern=2,
        layer_types=[FULL, SLIDING] * 2,
        mlp_layer_types=["sparse", "dense"] * 2,
        first_k_dense_replace=2,
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=12,
        num_shared_experts=2,
        n_group=4,
        topk_group=2,
        norm_topk_prob=False,
        routed_scaling_factor=1.7,
    ),
    "solar_open": without(
        MIXTURES["glm4_moe"]
        | {"model_type": "solar_open", "num_hidden_layers": 3, "moe_intermediate_size": 16, "intermediate_size": 44},
        *("use_qk_norm", "first_k_dense_replace"),
    )
    | {"rope_parameters": YARN},
    "afmoe": _family(
        "afmoe",
        head_dim=10,
        hidden_act="gelu",
        tie_word_embeddings=True,
        attention_bias=True,
        num_hidden_layers=4,
        sliding_window=6,
        global_attn_every_n_layers=3,
        layer_types=[FULL, SLIDING] * 2,
        mup_enabled=True,
        num_dense_layers=2,
        num_experts=4,
        num_experts_per_tok=3,
        num_shared_experts=1,
        moe_intermediate_size=12,
        route_scale=1.7,
    ),
    "hy_v3": _family(
        "hy_v3",
        head_dim=10,
        hidden_act="gelu",
        tie_word_embeddings=True,
        attention_bias=True,
        mlp_bias=True,
        mlp_layer_types=["dense", "sparse", "dense"],
        num_experts=4,
        num_experts_per_tok=3,
        moe_intermediate_size=12,
        num_shared_experts=2,
        router_scaling_factor=1.7,
        enable_moe_fp32_combine=False,
    ),
}
#: Llama has a table of its own in `tiny`; here the sizes of the others.
LLAMA = _family("llama", head_dim=10, tie_word_embeddings=True)

#: A text model beside a vision tower.
NESTED = {
    "model_type": "gemma3",
    "dtype": "float32",
    "text_config": CONFIGS["gemma3_text"] | {"final_logit_softcapping": None},
    "vision_config": {
        "model_type": "siglip_vision_model",
        "hidden_size": 16,
        "intermediate_size": 12,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    },
    "mm_tokens_per_image": 4,
    "image_token_index": 95,
    "tie_word_embeddings": False,
}
#: model_type -> a config.json with a text section.
BESIDE = {
    "gemma3": NESTED,
    "mistral3": {
        "model_type": "mistral3",
        "dtype": "float32",
        "text_config": without(CONFIGS["ministral3"], "tie_word_embeddings"),
        "vision_config": {
            "model_type": "pixtral",
            "hidden_size": 16,
            "intermediate_size": 12,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "head_dim": 8,
            "image_size": 28,
            "patch_size": 14,
        },
        "image_token_index": 95,
        "projector_hidden_act": "relu",
        "vision_feature_layer": -2,
        "multimodal_projector_bias": True,
        "spatial_merge_size": 1,
        "tie_word_embeddings": True,
    },
    "muse_glimmer": {
        "model_type": "muse_glimmer",
        "dtype": "float32",
        "text_config": _family(
            "muse_glimmer_text",
            head_dim=10,
            hidden_activation="gelu_pytorch_tanh",
            tie_word_embeddings=False,
            attention_bias=True,
            num_hidden_layers=4,
            sliding_window=6,
            layer_types=[SLIDING, FULL] * 2,
            layer_rope_theta=[300.0, 0, 0, 300.0],
            final_logit_softcapping=3.0,
            qk_scale_factor=1.7,
            output_multiplier=0.8,
            post_norm_eps=7e-2,
        ),
        "vision_config": {
            "hidden_size": 16,
            "intermediate_size": 12,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "patch_size": 2,
            "pos_emb_height": 4,
            "pos_emb_width": 4,
        },
        "image_token_id": 96,  # transformers takes the first token for these
        "video_token_id": 96,
        "out_hidden_size": 64,
        "projector_hidden_size": 24,
        "projector_hidden_act": "relu",
    },
    "qwen3_5": {
        "model_type": "qwen3_5",
        "dtype": "float32",
        "text_config": CONFIGS["qwen3_5_text"],
        "vision_config": {
            "model_type": "qwen3_5_vision",
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 12,
            "num_heads": 2,
            "out_hidden_size": 32,
            "patch_size": 4,
            "num_position_embeddings": 16,
        },
        **{"image_token_id": 95, "video_token_id": 94, "vision_start_token_id": 93, "vision_end_token_id": 92},
        "tie_word_embeddings": True,
    },
}
BESIDE["qwen3_5_moe"] = BESIDE["qwen3_5"] | {
    "model_type": "qwen3_5_moe",
    "text_config": MIXTURES["qwen3_5_moe_text"],
    "vision_config": BESIDE["qwen3_5"]["vision_config"] | {"model_type": "qwen3_5_moe_vision"},
}
