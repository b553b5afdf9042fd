"""One tiny model a family, with every field of its config off transformers' default."""

from tests.support.family_mixtures import MIXTURES
from tests.support.family_sizes import DELTA, FULL, LLAMA3, SIZES, SLIDING, YARN, family, without

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
    "qwen2": family(
        "qwen2",
        **_WINDOWS,
        hidden_act="gelu_pytorch_tanh",
        tie_word_embeddings=True,
        num_hidden_layers=4,
        layer_types=[SLIDING, FULL] * 2,
        rope_parameters=YARN,
    ),
    "qwen3": family(
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
    "mistral": family("mistral", head_dim=10, hidden_act="gelu", tie_word_embeddings=True, sliding_window=6),
    "ministral": family(
        "ministral",
        head_dim=10,
        hidden_act="gelu",
        tie_word_embeddings=True,
        sliding_window=6,
        num_hidden_layers=4,
        layer_types=[SLIDING, FULL] * 2,
    ),
    "gemma": family("gemma", head_dim=10, tie_word_embeddings=False, attention_bias=True, hidden_act="silu"),
    "gemma2": family(
        "gemma2",
        **_GEMMA,
        attn_logit_softcapping=2.0,
        num_hidden_layers=4,
        layer_types=[FULL, SLIDING] * 2,
        rope_parameters=LLAMA3,
    ),
    "gemma3_text": family(
        "gemma3_text",
        **_GEMMA,
        num_hidden_layers=len(_PERIOD_OF_THREE),
        layer_types=_PERIOD_OF_THREE,
        rope_parameters={
            FULL: {"rope_type": "linear", "rope_theta": 900.0, "factor": 1.5},
            SLIDING: {"rope_type": "default", "rope_theta": 50.0},
        },
    ),
    "phi3": family(
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
    "granite": family(
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
    "olmo2": family("olmo2", hidden_act="gelu", tie_word_embeddings=True, attention_bias=True),
    "smollm3": family(
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
        family(
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
    "olmo3": family(
        "olmo3",
        hidden_act="gelu",
        tie_word_embeddings=True,
        attention_bias=True,
        num_hidden_layers=4,
        sliding_window=6,
        layer_types=[FULL, SLIDING] * 2,
        rope_parameters={FULL: without(YARN, "truncate"), SLIDING: {"rope_type": "default", "rope_theta": 50.0}},
    ),
    "exaone4": family(
        "exaone4",
        hidden_act="gelu",
        tie_word_embeddings=True,
        num_hidden_layers=4,
        sliding_window=6,
        sliding_window_pattern=2,
        layer_types=[FULL, SLIDING] * 2,
    ),
    "ministral3": family(
        "ministral3",
        head_dim=10,
        hidden_act="gelu",
        tie_word_embeddings=True,
        sliding_window=6,
        rope_parameters={**YARN, "original_max_position_embeddings": 7, "llama_4_scaling_beta": 0.7},
    ),
    "arcee": family(
        "arcee",
        head_dim=10,
        hidden_act="gelu",
        tie_word_embeddings=True,
        attention_bias=True,
        mlp_bias=True,
    ),
    "hunyuan_v1_dense": family(
        "hunyuan_v1_dense",
        head_dim=10,
        hidden_act="gelu",
        tie_word_embeddings=True,
        attention_bias=True,
    ),
    "seed_oss": family(
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
    "glm4": family(
        "glm4",
        num_key_value_heads=1,
        head_dim=20,
        hidden_act="gelu",
        tie_word_embeddings=True,
        attention_bias=False,
        rope_parameters=_PARTIAL,
    ),
    "ernie4_5": family(
        "ernie4_5",
        num_key_value_heads=1,
        head_dim=10,
        hidden_act="gelu",
        tie_word_embeddings=False,
        use_bias=True,
    ),
    "apertus": family(
        "apertus",
        head_dim=10,
        tie_word_embeddings=True,
        attention_bias=True,
    ),
    "cohere2": without(
        family(
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
        family(
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
        family(
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
#: Layers with Gated DeltaNet.
CONFIGS |= {
    "qwen3_5_text": family("qwen3_5_text", **DELTA),
    "olmo_hybrid": family(
        "olmo_hybrid",
        **DELTA | {"rope_parameters": {"rope_type": "linear", "rope_theta": 300.0, "factor": 1.5}},
        linear_allow_neg_eigval=False,
    ),
}
CONFIGS |= {
    "starcoder2": without(
        family(
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
        family("olmo", hidden_act="gelu", tie_word_embeddings=True, attention_bias=True, clip_qkv=0.7),
        "rms_norm_eps",
    ),
    "helium": family(
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
    "rope_parameters": SIZES["rope_parameters"],
}
#: Llama has a table of its own in `tiny`; here the sizes of the others.
LLAMA = family("llama", head_dim=10, tie_word_embeddings=True)

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
        "text_config": family(
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
