"""StarCoder 2: LayerNorm, biases everywhere, and an MLP without a gate."""

from convert.families.family import Family
from convert.families.gemma import TANH
from convert.families.gguf import ALL_BIASES, Architecture
from convert.families.windows import window_everywhere
from convert.model.spec import ATTENTION_GROUPS, MLP_GROUPS

STARCODER2 = Family(
    "starcoder2",
    "Starcoder2ForCausalLM",
    defaults={
        "num_key_value_heads": 2,
        "hidden_act": TANH,
        "max_position_embeddings": 4096,
        "initializer_range": 0.018042,
        "norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
        "use_bias": True,
    },
    names={"norm_eps": "norm_epsilon"},
    switches={"use_bias": (*ATTENTION_GROUPS, *MLP_GROUPS)},
    constants={"norm": "layer", "norm_float32": True, "gated": False},
    norm_leaves=("weight", "bias"),
    parts={"up_proj": "c_fc", "down_proj": "c_proj"},
    read=lambda get, fields: {
        **window_everywhere(get, fields),
        **{name: get.probability(name) for name in ("residual_dropout", "embedding_dropout")},
    },
    # of published files, which transformers ignores
    neutral={
        "attention_softmax_in_fp32": (True,),
        "layer_norm_epsilon": (1e-5,),
        "mlp_type": ("default",),
        "norm_type": ("layer_norm",),
        "scale_attention_softmax_in_fp32": (True,),
        "scale_attn_weights": (True,),
    },
    gguf=Architecture("STARCODER2", activation=TANH, biases=ALL_BIASES, biased=True, square=True),
)
