"""llama.cpp's graphs of the exported families, computed from a GGUF file in float64 numpy.

From the file alone: keys and tensors. Source: llama.cpp's src/models (the graphs) and ggml's rotary positions.
"""

import gguf
import numpy as np

#: Architectures whose rotary pairs are neighbours; in the others a pair has one of each half.
NEIGHBOURS = ("llama", "granite", "smollm3", "command-r", "cohere2", "olmo", "glm4", "ernie4_5")
#: Architectures with LayerNorm, those with attention and MLP side by side, and those whose MLP has no gate.
_LAYER_NORM = ("command-r", "cohere2", "olmo", "starcoder2", "nemotron", "phi2")
_PARALLEL = ("command-r", "cohere2", "phi2")
_PLAIN = ("starcoder2", "nemotron", "phi2")
#: Architectures that divide the weights of a token's experts by their sum.
NORMALIZED = ("llama", "qwen3moe", "qwen35moe", "minimax-m2")
#: Architectures that normalise queries and keys of all heads together.
_WHOLE = ("olmo2", "olmoe", "minimax-m2")
_GEMMA = ("gemma", "gemma2", "gemma3")
_DELTA = ("qwen35", "qwen35moe")


def read(file):
    """(architecture, keys under it, tensors in float64)."""
    reader = gguf.GGUFReader(file)
    keys = {name: field.contents() for name, field in reader.fields.items()}
    name = keys["general.architecture"]
    own = {key.removeprefix(f"{name}."): value for key, value in keys.items() if key.startswith(f"{name}.")}
    tensors = {
        tensor.name: gguf.dequantize(tensor.data, tensor.tensor_type).reshape(tensor.shape[::-1]).astype(np.float64)
        for tensor in reader.tensors
    }
    return name, own, tensors


def logits(file, tokens, *, neighbours=None):
    """Logits [S, V] of one document.

    Args:
        file: GGUF.
        tokens: ids.
        neighbours: whether rotary pairs are neighbours; None: as in the architecture.
    """
    arch, keys, tensors = read(file)
    neighbours = arch in NEIGHBOURS if neighbours is None else neighbours
    x = tensors["token_embd.weight"][tokens]
    x = x * (np.sqrt(x.shape[1]) if arch in _GEMMA else keys.get("embedding_scale", 1.0))
    for i in range(keys["block_count"]):
        own = {name.removeprefix(f"blk.{i}."): value for name, value in tensors.items() if name.startswith(f"blk.{i}.")}
        own |= {name: value for name, value in tensors.items() if name.startswith("rope_")}
        if arch in _DELTA:  # there it stands before the MLP
            own["ffn_norm.weight"] = own.pop("post_attention_norm.weight")
        before = _norm_of(arch, keys, x, own, "attn_norm")
        mixed = _delta(keys, own, before) if "ssm_a" in own else _attention(arch, keys, own, before, i, neighbours)
        change = _norm(arch, keys, mixed, own.get("post_attention_norm.weight"))
        if arch in _PARALLEL:
            x = x + change + _mlp(arch, own, before)
            continue
        residual = keys.get("residual_scale", 1.0)
        x = x + residual * change
        inner = _norm_of(arch, keys, x, own, "ffn_norm")
        change = _experts(arch, keys, own, inner) if "ffn_gate_inp.weight" in own else _mlp(arch, own, inner)
        x = x + residual * _norm(arch, keys, change, own.get("post_ffw_norm.weight"))
    x = _norm_of(arch, keys, x, tensors, "output_norm")
    out = x @ tensors.get("output.weight", tensors["token_embd.weight"]).T + tensors.get("output.bias", 0.0)
    scale = keys.get("logit_scale", 1.0)
    return _capped(out / scale if arch == "granite" else out * scale, keys.get("final_logit_softcapping"))


def _norm_of(arch, keys, x, own, name):
    """The norm of that name; olmo's have no scale."""
    weight = own.get(f"{name}.weight", 1.0 if arch == "olmo" else None)
    return _norm(arch, keys, x, weight) + own.get(f"{name}.bias", 0.0)


def _norm(arch, keys, x, weight):
    if weight is None:
        return x
    kind = "layer_norm" if arch in _LAYER_NORM else "layer_norm_rms"
    if arch in _LAYER_NORM:
        x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + keys[f"attention.{kind}_epsilon"]) * weight


def _linear(own, name, x):
    return x @ own[f"{name}.weight"].T + own.get(f"{name}.bias", 0.0)


def _attention(arch, keys, own, x, layer, neighbours):
    length, size = len(x), keys["attention.key_length"]
    heads, key_heads = keys["attention.head_count"], keys["attention.head_count_kv"]
    if "attn_qkv.weight" in own:
        parts = np.split(_linear(own, "attn_qkv", x), [heads * size, (heads + key_heads) * size], axis=1)
    else:
        parts = [_linear(own, f"attn_{part}", x) for part in "qkv"]
    limit = keys.get("attention.clamp_kqv", np.inf)
    parts = [np.clip(part, -limit, limit) for part in parts]
    gate = np.inf
    if arch in _DELTA:
        parts[0], gate = (part.reshape(length, -1) for part in np.split(parts[0].reshape(length, heads, -1), 2, axis=2))
    window = keys.get("attention.sliding_window") if arch in ("gemma2", "gemma3", "cohere2") else None
    period = {"gemma2": 2, "gemma3": 6, "cohere2": 4}.get(arch, 1)
    local = window is not None and layer % period < period - 1
    turned = []
    for part, values in zip("qk", parts, strict=False):
        weight = own.get(f"attn_{part}_norm.weight")
        if arch in _WHOLE:
            values = _norm(arch, keys, values, weight)
        values = values.reshape(length, -1, size).swapaxes(0, 1)
        if arch == "command-r" and weight is not None:
            values = _norm(arch, keys, values, weight[:, None])
        elif arch not in _WHOLE:
            values = _norm(arch, keys, values, weight)
        if arch not in ("smollm3", "cohere2") or (layer + 1) % 4 != 0:
            values = _rotate(keys, own, values, local and arch == "gemma3", neighbours)
        turned.append(values)
    q, k = turned[0], np.repeat(turned[1], heads // key_heads, axis=0)
    v = np.repeat(parts[2].reshape(length, key_heads, size).swapaxes(0, 1), heads // key_heads, axis=0)
    scores = _capped(q @ k.swapaxes(1, 2) * keys.get("attention.scale", size**-0.5), keys.get("attn_logit_softcapping"))
    distance = np.arange(length)[:, None] - np.arange(length)
    seen = (distance >= 0) & (distance < (window if local else length))
    scores = np.where(seen, scores, -np.inf)
    scores = np.exp(scores - scores.max(-1, keepdims=True))
    out = (scores / scores.sum(-1, keepdims=True)) @ v
    return _linear(own, "attn_output", out.swapaxes(0, 1).reshape(length, -1) / (1 + np.exp(-gate)))


def _delta(keys, own, x):
    """Gated DeltaNet: value head h reads key head h mod the number of these."""
    length, heads, key_heads = len(x), keys["ssm.time_step_rank"], keys["ssm.group_count"]
    size, inner, taps = keys["ssm.state_size"], keys["ssm.inner_size"], keys["ssm.conv_kernel"]
    mixed = np.pad(_linear(own, "attn_qkv", x), ((taps - 1, 0), (0, 0)))
    mixed = sum(mixed[tap : tap + length] * own["ssm_conv1d.weight"][:, tap] for tap in range(taps))
    mixed = mixed / (1 + np.exp(-mixed))
    q, k = (part.reshape(length, key_heads, size) for part in np.split(mixed[:, : 2 * key_heads * size], 2, axis=1))
    q, k = (part / np.linalg.norm(part, axis=-1, keepdims=True) for part in (q, k))
    v = mixed[:, 2 * key_heads * size :].reshape(length, heads, inner // heads)
    beta = 1 / (1 + np.exp(-_linear(own, "ssm_beta", x)))
    decay = np.exp(np.log1p(np.exp(_linear(own, "ssm_alpha", x) + own["ssm_dt.bias"])) * own["ssm_a"])
    out, states = np.zeros_like(v), np.zeros((heads, size, inner // heads))
    for token in range(length):
        for head in range(heads):
            key, query = (part[token, head % key_heads] for part in (k, q))
            state = states[head] * decay[token, head]
            states[head] = state + np.outer(key, (v[token, head] - key @ state) * beta[token, head])
            out[token, head] = query @ states[head] * size**-0.5
    gate = _linear(own, "attn_gate", x)
    normed = _norm("", keys, out, own["ssm_norm.weight"]).reshape(length, inner)
    return _linear(own, "ssm_out", normed * gate / (1 + np.exp(-gate)))


def _rotate(keys, own, x, local, neighbours):
    """Positions on [heads, S, size]; features beyond `rope.dimension_count` stay."""
    count, length = keys["rope.dimension_count"], x.shape[1]
    base = keys["rope.freq_base_swa"] if local else keys["rope.freq_base"]
    kind = "none" if local else keys.get("rope.scaling.type", "none")
    original = keys.get("rope.scaling.original_context_length", keys["context_length"])
    divisors = own.get("rope_freqs.weight", 1.0)
    if "rope_factors_long.weight" in own:
        divisors = own[f"rope_factors_{'long' if length > original else 'short'}.weight"]
    frequencies = base ** (-np.arange(0, count, 2) / count) / divisors
    magnitude = keys.get("rope.scaling.attn_factor", 1.0)
    if kind in ("linear", "yarn"):
        slow = frequencies / keys["rope.scaling.factor"]
        share = 0.0
        if kind == "yarn":
            low, high = (count * np.log(original / (beta * 2 * np.pi)) / (2 * np.log(base)) for beta in (32.0, 1.0))
            low, high = max(0, np.floor(low)), min(count - 1, np.ceil(high))
            share = 1 - np.clip((np.arange(count // 2) - low) / max(0.001, high - low), 0, 1)
            magnitude *= 1 + 0.1 * np.log(keys["rope.scaling.factor"])
        frequencies = slow * (1 - share) + frequencies * share
    angle = np.arange(length)[:, None] * frequencies
    cos, sin = np.cos(angle) * magnitude, np.sin(angle) * magnitude
    first, second = (
        (slice(0, count, 2), slice(1, count, 2)) if neighbours else (slice(0, count // 2), slice(count // 2, count))
    )
    out = x.copy()
    out[..., first] = x[..., first] * cos - x[..., second] * sin
    out[..., second] = x[..., second] * cos + x[..., first] * sin
    return out


def _experts(arch, keys, own, x):
    """Weighted sums of each token's best experts, and a shared expert with a gate."""
    gates = np.exp(x @ own["ffn_gate_inp.weight"].T)
    gates /= 1 + gates if keys.get("expert_gating_func") == 2 else gates.sum(-1, keepdims=True)
    bias = own.get("exp_probs_b.bias", 0.0)  # of the choice alone
    out = np.zeros_like(x)
    for token, row in enumerate(x):
        chosen = np.argsort(-(gates[token] + bias))[: keys["expert_used_count"]]
        shares = gates[token, chosen] / (gates[token, chosen].sum() if arch in NORMALIZED else 1.0)
        for number, share in zip(chosen, shares, strict=True):
            one = {f"{name}.weight": own[f"{name}_exps.weight"][number] for name in ("ffn_gate", "ffn_up", "ffn_down")}
            out[token] += share * _mlp(arch, one, row[None])[0]
    if "ffn_up_shexp.weight" in own:
        one = {f"{name}.weight": own[f"{name}_shexp.weight"] for name in ("ffn_gate", "ffn_up", "ffn_down")}
        out += _mlp(arch, one, x) / (1 + np.exp(-x @ own["ffn_gate_inp_shexp.weight"]))[:, None]
    return out


def _mlp(arch, own, x):
    up = _linear(own, "ffn_up", x)
    if arch in _PLAIN:
        return _linear(own, "ffn_down", np.maximum(up, 0) ** 2 if arch == "nemotron" else _gelu(up))
    gate, up = np.split(up, 2, axis=1) if arch in ("phi3", "glm4") else (_linear(own, "ffn_gate", x), up)
    gate = _gelu(gate) if arch in _GEMMA else gate / (1 + np.exp(-gate))
    return _linear(own, "ffn_down", gate * up)


def _gelu(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def _capped(x, cap):
    return x if cap is None else cap * np.tanh(x / cap)
