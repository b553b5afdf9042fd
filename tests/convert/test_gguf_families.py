"""GGUF of each family: llama.cpp's architecture, names, keys and layout; what it computes otherwise is refused."""

import numpy as np
import pytest

from convert.errors import ConvertError
from convert.gguf import export_gguf
from convert.gguf_architecture import ARCHITECTURES
from tests.support.gguf_models import (
    FAMILY_CASES,
    FULL,
    HEADS,
    KEY_HEADS,
    LAYER_NORMS,
    LONG,
    LONGROPE,
    SHORT,
    SIZE,
    SIZES,
    SLIDING,
    config_of,
    write_model,
)

gguf = pytest.importorskip("gguf")

#: model_type -> the norms of a layer, in the folder and in the file.
NORMS = {
    **dict.fromkeys(FAMILY_CASES, {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}),
    **dict.fromkeys(
        ("gemma2", "gemma3", "gemma3_text"),
        {
            "input_layernorm": "attn_norm",
            "post_attention_layernorm": "post_attention_norm",
            "pre_feedforward_layernorm": "ffn_norm",
            "post_feedforward_layernorm": "post_ffw_norm",
        },
    ),
    **dict.fromkeys(
        ("qwen3_5_text", "qwen3_5", "qwen3_5_moe_text", "qwen3_5_moe"),
        {"input_layernorm": "attn_norm", "post_attention_layernorm": "post_attention_norm"},
    ),
    "olmo2": {"post_attention_layernorm": "post_attention_norm", "post_feedforward_layernorm": "post_ffw_norm"},
    **dict.fromkeys(("cohere", "cohere2", "phi"), {"input_layernorm": "attn_norm"}),
    "glm4": {
        **{"input_layernorm": "attn_norm", "post_self_attn_layernorm": "post_attention_norm"},
        **{"post_attention_layernorm": "ffn_norm", "post_mlp_layernorm": "post_ffw_norm"},
    },
}
MODULES = {
    **{f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"},
    **{f"self_attn.{part}_norm": f"attn_{part}_norm" for part in "qk"},
    **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
    "self_attn.o_proj": "attn_output",
    "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_up_proj": "ffn_up",
    **{f"mlp.experts.{part}_proj": f"ffn_{part}_exps" for part in ("gate", "up", "down")},
    **{f"mlp.shared_expert.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
    "mlp.router": "ffn_gate_inp",
    "mlp.expert_bias": "exp_probs_b",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    **{"linear_attn.in_proj_qkv": "attn_qkv", "linear_attn.in_proj_z": "attn_gate", "linear_attn.out_proj": "ssm_out"},
    **{"linear_attn.in_proj_b": "ssm_beta", "linear_attn.in_proj_a": "ssm_alpha", "linear_attn.norm": "ssm_norm"},
    "linear_attn.conv1d": "ssm_conv1d",
}
#: Names without the ending of the path.
WHOLE = {"linear_attn.A_log": "ssm_a", "linear_attn.dt_bias": "ssm_dt.bias"}
TOP = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}
INTERLEAVED = ("llama", "mistral", "mistral3", "granite", "smollm3", "mixtral", "olmo")
#: Matrices that stay in float32.
EXACT = ("mlp.router.weight", "mlp.shared_expert_gate.weight", "conv1d.weight")


def name_in_file(kind, path):
    path = path.replace("router.choice_bias", "expert_bias.bias")
    module, _, part = path.rpartition(".")
    if module in TOP:
        return f"{TOP[module]}.{part}"
    _, number, rest = module.split(".", 2)
    if rest in WHOLE:
        return f"blk.{number}.{WHOLE[rest]}"
    return f"blk.{number}.{(NORMS[kind] | MODULES)[rest]}.{part}"


def in_llama_cpp(kind, path, values):
    """A weight as llama.cpp expects it."""
    values = values.astype(np.float32)
    if kind.startswith(("gemma", "nemotron")) and path.endswith("norm.weight"):
        return values + 1
    if ".linear_attn." in path:
        return heads_by_turns(path.split(".")[-2], values)
    if kind.startswith("qwen3_5") and path.endswith("norm.weight"):
        return values + 1
    part = path.split(".")[-2]
    if kind not in INTERLEAVED or part not in ("q_proj", "k_proj"):
        return values
    order = [
        head * SIZE + half * (SIZE // 2) + pair
        for head in range(HEADS if part == "q_proj" else KEY_HEADS)
        for pair in range(SIZE // 2)
        for half in (0, 1)
    ]
    return values[order]


def heads_by_turns(part, values):
    """The four heads of values as 0, 2, 1, 3: head h reads key head h mod 2."""
    if part == "norm":
        return values
    if part == "out_proj":
        return heads_by_turns("in_proj_z", values.T).T
    size = 1 if len(values) == 4 else 16
    before, after = np.split(values, [len(values) - 4 * size])
    turned = np.concatenate([before, *(after[head * size : (head + 1) * size] for head in (0, 2, 1, 3))])
    return {"A_log": lambda: -np.exp(turned), "conv1d": lambda: turned[:, 0]}.get(part, lambda: turned)()


WINDOWED = {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}
UNSCALED = {"head_dim": 24, "rope_scaling": None}


def test_every_exported_family_has_a_case():
    assert set(FAMILY_CASES) == set(ARCHITECTURES)


@pytest.mark.parametrize("type", ["f32", "q8_0"])
@pytest.mark.parametrize("kind", FAMILY_CASES)
def test_names_values_and_keys(kind, type, tmp_path):
    config = config_of(kind)
    arrays = write_model(tmp_path / "model", config)
    export_gguf(tmp_path / "model", tmp_path / "m.gguf", type=type)
    _, name, keys = FAMILY_CASES[kind]
    text = config.get("text_config", config)
    layers = text["num_hidden_layers"]
    fields = gguf.GGUFReader(tmp_path / "m.gguf").fields
    metadata = {key: field.contents() for key, field in fields.items()}
    wanted = {
        "context_length": 192,
        "embedding_length": 64,
        "block_count": layers,
        "feed_forward_length": 96,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KEY_HEADS,
        **({} if kind in LAYER_NORMS else {"attention.layer_norm_rms_epsilon": 3e-2}),
        **keys,
    }
    assert metadata["general.architecture"] == name
    assert {key: metadata.get(f"{name}.{key}") for key in wanted} == {
        key: pytest.approx(value) if isinstance(value, float) else value for key, value in wanted.items()
    }

    architecture = next(arch for arch, known in gguf.MODEL_ARCH_NAMES.items() if known == name)
    known = {
        gguf.TENSOR_NAMES[tensor].format(bid=i) for tensor in gguf.MODEL_TENSORS[architecture] for i in range(layers)
    }
    found = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    assert {tensor if tensor in known else tensor.rpartition(".")[0] for tensor in found} <= known
    extra = {"rope_factors_long.weight": LONG, "rope_factors_short.weight": SHORT} if kind == "phi3" else {}
    assert set(found) == {name_in_file(kind, path) for path in arrays} | set(extra)
    for other, values in extra.items():
        np.testing.assert_array_equal(found[other].data, np.float32(values))
    for path, array in arrays.items():
        tensor, right = found[name_in_file(kind, path)], in_llama_cpp(kind, path, array)
        values = gguf.dequantize(tensor.data, tensor.tensor_type).reshape(right.shape)
        if type == "f32" or right.ndim == 1 or path.endswith(EXACT):
            assert tensor.tensor_type.name == "F32", path
            np.testing.assert_array_equal(values, right, path)
        else:
            assert tensor.tensor_type.name == "Q8_0", path
            largest = np.abs(right.reshape(-1, 32)).max(axis=1, keepdims=True)
            # half a step, and the step's own rounding to float16
            assert (np.abs(values - right).reshape(-1, 32) <= (0.5 / 127 + 2**-10) * largest).all(), path


def test_queries_of_a_large_command_r_are_normalised_by_head(tmp_path):
    """Scales with two dimensions, which stay in float32."""
    config = config_of("cohere", use_qk_norm=True, num_hidden_layers=64)
    arrays = write_model(tmp_path / "model", config)
    export_gguf(tmp_path / "model", tmp_path / "m.gguf", type="q8_0")
    found = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    tensor = found["blk.63.attn_k_norm.weight"]
    assert tensor.tensor_type.name == "F32"
    np.testing.assert_array_equal(tensor.data, arrays["layers.63.self_attn.k_norm.weight"].astype(np.float32))


@pytest.mark.parametrize(
    ("kind", "changes", "note"),
    [
        ("mistral", {"sliding_window": 24}, "leaves out the window of 24 tokens"),
        ("qwen3", WINDOWED, "leaves out the window of 24 tokens"),
        ("phi3", {"sliding_window": 24}, "leaves out the window of 24 tokens"),
        ("mistral", {"sliding_window": 192}, None),
        ("qwen2", {"sliding_window": 24}, None),
        ("gemma3", {}, "the vision tower is left out"),
    ],
)
def test_what_comes_out_otherwise_is_noted(kind, changes, note, tmp_path):
    write_model(tmp_path / "model", config_of(kind, **changes))
    notes = export_gguf(tmp_path / "model", tmp_path / "m.gguf").notes
    assert [note in one for one in notes] == [True] if note else notes == ()


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("ministral", {}, r"model_type: expected one of .* for GGUF \(llama.cpp has no Mistral some of whose layers"),
        ("qwen2", {"hidden_act": "gelu"}, "hidden_act: expected 'silu', which QWEN2 means in llama.cpp, got 'gelu'"),
        ("gemma2", {"hidden_activation": "silu"}, "hidden_activation: expected 'gelu_pytorch_tanh', which GEMMA2"),
        ("qwen3", {"attention_bias": True}, "self_attn.q_proj.bias: qwen3 of llama.cpp has no such tensor"),
        ("gemma", {"attention_bias": True}, "self_attn.q_proj.bias: gemma of llama.cpp has no such tensor"),
        ("gemma", {"tie_word_embeddings": False}, "lm_head.weight: gemma of llama.cpp has no such tensor"),
        ("cohere", {"tie_word_embeddings": False}, "lm_head.weight: command-r of llama.cpp has no such tensor"),
        ("cohere", {"use_qk_norm": True}, "use_qk_norm: expected false with 2 layers, which COMMAND_R means"),
        ("gemma2", {"query_pre_attn_scalar": 23}, "query_pre_attn_scalar: expected 16, which GEMMA2 means"),
        (
            "qwen3_5_text",
            {"layer_types": [FULL] * 2},
            "layer_types: expected attention in every n-th layer and no others",
        ),
        ("gemma2", {"layer_types": [FULL, SLIDING]}, "layer_types: expected a window in all layers but each 2th"),
        ("gemma2", {"attn_logit_softcapping": None}, "attn_logit_softcapping: expected a number >= 0"),
        ("gemma3_text", {"final_logit_softcapping": 4.0}, "final_logit_softcapping: expected null, for GGUF"),
        ("gemma3", {"layer_types": [SLIDING] * 7}, "layer_types: expected a window in all layers but each 6th"),
        ("phi3", UNSCALED, "head_dim: expected 16: in llama.cpp PHI3's heads fill its width, got 24"),
        ("phi3", {"rope_scaling": LONGROPE | {"long_factor": LONG[1:]}}, "long_factor: expected 6 numbers"),
        (
            "phi3",
            {"rope_scaling": None, "partial_rotary_factor": 0.7},
            "partial_rotary_factor: expected an even number",
        ),
        (
            "starcoder2",
            {"use_bias": False},
            "biases: expected those of mlp.down, .* which STARCODER2 means .* got 'none'",
        ),
        ("olmo2", {"tie_word_embeddings": True}, "tie_word_embeddings: expected false: llama.cpp's OLMO2 has a head"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers: expected 0 for each 4th layer alone, for GGUF"),
        ("qwen3", {"partial_rotary_factor": 0.5}, r"partial_rotary_factor: expected 1 \(every pair turns\), got 0.5"),
        ("qwen3_moe", {"norm_topk_prob": False}, "norm_topk_prob: expected true, which QWEN3MOE means in llama.cpp"),
        ("qwen2_moe", {"norm_topk_prob": True}, "norm_topk_prob: expected false, which QWEN2MOE means in llama.cpp"),
        ("qwen3_moe", {"mlp_only_layers": [1]}, "mixtures: expected one in every layer, which QWEN3MOE means"),
        (
            "olmoe",
            {"num_key_value_heads": KEY_HEADS},
            f"num_key_value_heads: expected {HEADS}, one a head",
        ),
        ("granite", {"logits_scaling": "8"}, "logits_scaling: expected a number >= 0 and below 1e30, got '8'"),
        (
            "qwen2",
            {"rope_scaling": {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}},
            "rope_type: expected one of default, linear, yarn for GGUF of QWEN2, got 'llama3'",
        ),
    ],
)
def test_what_llama_cpp_computes_otherwise_is_refused(kind, changes, message, tmp_path):
    fields = {"sliding_window": None} if kind == "ministral" else {}
    config = SIZES | {"model_type": kind} | fields if kind == "ministral" else config_of(kind, **changes)
    write_model(tmp_path / "model", config)
    with pytest.raises(ConvertError, match=message):
        export_gguf(tmp_path / "model", tmp_path / "m.gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
