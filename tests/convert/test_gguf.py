"""GGUF files, read back by the gguf library: values, metadata, tokenizer; what has no counterpart is refused."""

import json

import numpy as np
import pytest

from convert.errors import ConvertError
from convert.gguf import _Contents, export_gguf
from convert.gguf_vocabulary import read_vocabulary
from convert.unfinished import Unfinished
from convert.weights import open_weights
from tests.support.folders import write_checkpoint
from tests.support.gguf_models import TEMPLATE, write_model

gguf = pytest.importorskip("gguf")

ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 6.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
CONFIG = {
    "model_type": "llama",
    "vocab_size": 263,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 192,
    "rms_norm_eps": 3e-2,
    "rope_parameters": ROPE,
    "attention_bias": True,
    "tie_word_embeddings": False,
}


@pytest.fixture
def model(tmp_path):
    """(folder, {path: array})"""

    def make(**changes):
        return tmp_path / "model", write_model(tmp_path / "model", CONFIG | changes)

    return make


NAMES = {
    "embed_tokens.weight": "token_embd.weight",
    "norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "layers.1.input_layernorm.weight": "blk.1.attn_norm.weight",
    "layers.1.self_attn.v_proj.weight": "blk.1.attn_v.weight",
    "layers.1.self_attn.v_proj.bias": "blk.1.attn_v.bias",
    "layers.1.self_attn.o_proj.weight": "blk.1.attn_output.weight",
    "layers.1.post_attention_layernorm.weight": "blk.1.ffn_norm.weight",
    "layers.1.mlp.gate_proj.weight": "blk.1.ffn_gate.weight",
    "layers.1.mlp.up_proj.weight": "blk.1.ffn_up.weight",
    "layers.1.mlp.down_proj.weight": "blk.1.ffn_down.weight",
}
#: Half a step, as a share of the block's largest magnitude. Step and minimum are rounded to float16 besides, which is
#: up to 2^-11 of it each.
ERROR = {"q8_0": 0.5 / 127, "q4_0": 1 / 8, "q5_0": 1 / 16, "q4_1": 1 / 15, "q5_1": 1 / 31}


@pytest.mark.parametrize("type", ["f32", "f16", "bf16", *ERROR])
def test_the_library_reads_the_values(model, tmp_path, type, monkeypatch):
    monkeypatch.setattr("convert.blocks.ELEMENTS", 1024)
    folder, arrays = model()
    result = export_gguf(folder, tmp_path / "m.gguf", type=type)
    found = {t.name: t for t in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    assert len(found) == len(arrays) + 1 and sum(result.types.values()) == len(found)
    for path, name in NAMES.items():
        original = arrays[path].astype(np.float32)
        values = gguf.dequantize(found[name].data, found[name].tensor_type).reshape(original.shape)
        kind = "f32" if original.ndim == 1 else type
        if path == "lm_head.weight" and type[:2] in ("q4", "q5"):
            kind = "q8_0"
        assert found[name].tensor_type.name == kind.upper(), name
        if kind in ERROR:
            blocks = np.abs(original.reshape(-1, 32)).max(axis=1, keepdims=True)
            assert (np.abs(values - original).reshape(-1, 32) <= (ERROR[kind] + 2**-10) * blocks).all(), name
        else:
            right = original.astype(np.float16).astype(np.float32) if kind == "f16" else original
            np.testing.assert_array_equal(values, right, name)


def rotate(x, positions, theta, factors, neighbours):
    """Rotary positions on [heads, positions, size], halves or neighbours as pairs."""
    size = x.shape[-1]
    angle = positions[:, None] * (theta ** (-np.arange(0, size, 2) / size) / factors)
    cos, sin = np.cos(angle), np.sin(angle)
    first, second = (x[..., ::2], x[..., 1::2]) if neighbours else (x[..., : size // 2], x[..., size // 2 :])
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def test_queries_and_keys_pair_neighbours(model, tmp_path):
    """Attention scores with llama.cpp's rotation of the file's rows are those of transformers' on the folder's."""
    folder, arrays = model()
    export_gguf(folder, tmp_path / "m.gguf", type="f32")
    found = {t.name: np.array(t.data) for t in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    x = np.random.default_rng(1).standard_normal((64, 7))
    positions = np.arange(7)
    wave = 2 * np.pi * 5000.0 ** (np.arange(0, 16, 2) / 16)
    smooth = np.clip((32 / wave - 1.0) / 3.0, 0, 1)
    factors = 1 / ((1 - smooth) / 6.0 + smooth)
    np.testing.assert_allclose(found["rope_freqs.weight"], factors, rtol=1e-6)
    scores = []
    for neighbours in (False, True):
        rotated = []
        for part, name, heads in (("q_proj", "attn_q", 4), ("k_proj", "attn_k", 2)):
            weight, bias = (
                (found[f"blk.0.{name}.weight"], found[f"blk.0.{name}.bias"])
                if neighbours
                else (arrays[f"layers.0.self_attn.{part}.{kind}"].astype(np.float64) for kind in ("weight", "bias"))
            )
            projected = (weight.astype(np.float64) @ x + bias[:, None]).reshape(heads, 16, 7).swapaxes(1, 2)
            rotated.append(rotate(projected, positions, 5000.0, factors, neighbours))
        scores.append(np.einsum("hsd,htd->hst", rotated[0], np.repeat(rotated[1], 2, axis=0)))
    np.testing.assert_allclose(scores[0], scores[1], rtol=1e-6, atol=1e-6)


def test_metadata_and_tokenizer(model, tmp_path):
    folder, _ = model()
    (folder / "generation_config.json").write_text('{"eos_token_id": [259, 260]}')
    export_gguf(folder, tmp_path / "m.gguf", type="q8_0")
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    theirs = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    wanted = {
        "general.architecture": "llama",
        "general.name": "model",
        "general.file_type": 7,
        "llama.context_length": 192,
        "llama.embedding_length": 64,
        "llama.block_count": 2,
        "llama.feed_forward_length": 96,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.attention.key_length": 16,
        "llama.rope.dimension_count": 16,
        "llama.rope.freq_base": 5000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.bos_token_id": 258,
        "tokenizer.ggml.eos_token_id": 259,
        "tokenizer.ggml.eot_token_id": 260,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": False,
        "tokenizer.ggml.merges": ["a b", "ab c"],
        "tokenizer.chat_template": TEMPLATE,
    }
    assert {name: theirs.get(name) for name in wanted} == wanted
    assert theirs["llama.attention.layer_norm_rms_epsilon"] == pytest.approx(3e-2)
    assert theirs["tokenizer.ggml.tokens"][256:] == ["ab", "abc", "<s>", "</s>", "<tool>", "[PAD261]", "[PAD262]"]
    assert theirs["tokenizer.ggml.token_type"][256:] == [1, 1, 3, 3, 4, 5, 5]


def test_text_bpe_has_scores(tmp_path):
    """The first merge has the highest score, so that llama.cpp merges in the same order."""
    vocab = {"<unk>": 0, "<0x41>": 1, "a": 2, "b": 3, "c": 4, "bc": 5, "ab": 6}
    raw = {"type": "BPE", "byte_fallback": True, "vocab": vocab, "merges": ["a b", "b c"]}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": raw}))
    found = read_vocabulary(tmp_path, 7)
    assert (found["tokenizer_model"], found["tokenizer_pre"], "token_merges" in found) == ("llama", "default", False)
    assert found["token_types"] == [2, 6, 1, 1, 1, 1, 1]
    scores = found["token_scores"]
    assert scores[6] > scores[5] > max(scores[:5])
    assert found["add_space_prefix"] is False


@pytest.mark.parametrize(
    ("step", "added"),
    [
        ({"normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}]}}, True),
        ({"normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}}, False),
        ({"pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first"}}, True),
        ({"pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "never"}}, False),
    ],
)
def test_the_space_in_front(tmp_path, step, added):
    raw = {"type": "BPE", "byte_fallback": True, "vocab": {"<unk>": 0, "a": 1}, "merges": []}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": raw, **step}))
    assert read_vocabulary(tmp_path, 2)["add_space_prefix"] is added


#: As they stand in the tokenizer.json of Llama 3, Qwen 2, Mistral Nemo and Phi-4-mini.
SPLITS = {
    "llama-bpe": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+",
        True,
    ),
    "qwen2": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+",
        False,
    ),
    "tekken": (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        True,
    ),
    "gpt-4o": (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        False,
    ),
}


@pytest.mark.parametrize("name", SPLITS)
def test_ways_to_cut_text_up(tmp_path, name):
    expression, ignore_merges = SPLITS[name]
    steps = [
        {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
    ]
    model = {"type": "BPE", "vocab": {"a": 0}, "merges": [], "ignore_merges": ignore_merges}
    raw = {"model": model, "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    assert read_vocabulary(tmp_path, 1)["tokenizer_pre"] == name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act: expected 'silu'"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type: expected one of default, linear"),
        ({"rope_parameters": {"rope_type": "linear"}}, "rope_parameters: linear scaling needs the numbers"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "beta_fast": 3}}, "rope: expected no other settings"),
        ({"vocab_size": 200}, r"tokenizer\.json: id of .*: expected one below 200"),
    ],
)
def test_what_has_no_counterpart_is_refused(model, tmp_path, changes, message):
    folder, _ = model(**changes)
    with pytest.raises(ConvertError, match=message):
        export_gguf(folder, tmp_path / "m.gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_tokenizers_that_are_not_known(model, tmp_path):
    folder, _ = model()
    raw = json.loads((folder / "tokenizer.json").read_text())
    raw["pre_tokenizer"] = {"type": "Whitespace"}
    (folder / "tokenizer.json").write_text(json.dumps(raw))
    with pytest.raises(ConvertError, match="pre_tokenizer: expected a way to cut text up that llama.cpp has a known"):
        export_gguf(folder, tmp_path / "m.gguf")
    export_gguf(folder, tmp_path / "m.gguf", pre_tokenizer="llama-bpe")
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    assert reader.fields["tokenizer.ggml.pre"].contents() == "llama-bpe"
    with pytest.raises(ConvertError, match="expected a new one"):
        export_gguf(folder, tmp_path / "m.gguf", pre_tokenizer="llama-bpe")
    raw["model"]["type"] = "Unigram"
    (folder / "tokenizer.json").write_text(json.dumps(raw))
    with pytest.raises(ConvertError, match="model.type: expected 'BPE', got 'Unigram'"):
        export_gguf(folder, tmp_path / "other.gguf")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ConvertError, match=r"tokenizer\.json: no such file"):
        export_gguf(folder, tmp_path / "other.gguf")


def test_rows_that_are_no_whole_blocks_stay_in_16_bits(model, tmp_path):
    folder, _ = model(intermediate_size=40)
    result = export_gguf(folder, tmp_path / "m.gguf", type="q8_0")
    assert len(result.notes) == 2 and "down_proj.weight is kept in F16" in result.notes[0]
    assert result.types["F16"] == 2


@pytest.mark.parametrize("type", ["f32", "f16", "q8_0", "q4_0", "q5_1"])
@pytest.mark.parametrize("value", [np.nan, np.inf, 3e38])
def test_values_that_are_not_finite_or_that_the_type_cannot_hold(model, tmp_path, type, value):
    folder, arrays = model()
    rows = {row.path: row.name for row in open_weights(folder).specs.values()}
    tensors = {rows[path]: array.astype(np.float32) for path, array in arrays.items()}
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name][5, 5] = value
    config = json.loads((folder / "config.json").read_text())
    write_checkpoint(folder, tensors.items(), config)
    if type == "f32" and np.isfinite(value):
        export_gguf(folder, tmp_path / "m.gguf", type=type)
        return
    with pytest.raises(ConvertError, match=f"{name}: expected finite values, got NaN or infinity .in the file, or"):
        export_gguf(folder, tmp_path / "m.gguf", type=type)
    assert not (tmp_path / "m.gguf").exists()
    export_gguf(folder, tmp_path / "m.gguf", type=type, allow_nonfinite=True)


@pytest.fixture
def interrupted(model, tmp_path, monkeypatch):
    """A function that exports, and stops as a kill would when a tensor is reached; the names of what was computed."""
    monkeypatch.setattr("convert.shard._CHECK", 1)
    monkeypatch.setattr("convert.output.THREADS", 1)
    folder, _ = model()
    made, values = [], _Contents._values

    def stop_at(last):
        def watched(contents, name, path):
            if name == last:
                raise KeyboardInterrupt
            made.append(name)
            return values(contents, name, path)

        monkeypatch.setattr(_Contents, "_values", watched)
        try:
            return export_gguf(folder, tmp_path / "m.gguf", type="q8_0")
        except KeyboardInterrupt:
            return None

    export_gguf(folder, tmp_path / "whole.gguf", type="q8_0")
    return stop_at, made


def test_an_interrupted_export_goes_on_where_it_was(interrupted, tmp_path):
    stop_at, made = interrupted
    assert stop_at("blk.1.attn_norm.weight") is None and not (tmp_path / "m.gguf").exists()
    first = list(made)
    assert len(first) > 5 and "token_embd.weight" in first
    made.clear()
    result = stop_at(None)
    again = set(first) & set(made)  # read back when the kill came, or not yet
    assert result.kept == len(first) - len(again) > 5
    assert (tmp_path / "m.gguf").read_bytes() == (tmp_path / "whole.gguf").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.gguf", "model", "whole.gguf"]


@pytest.mark.parametrize("change", ["a byte", "cut short", "gone", "journal", "settings", "source"])
def test_what_is_not_as_it_was_is_written_anew(interrupted, tmp_path, change):
    stop_at, made = interrupted
    stop_at("blk.1.attn_norm.weight")
    home = tmp_path / ".m.gguf.converting"
    part = home / "folder" / "m.gguf.part"
    raw = bytearray(part.read_bytes())
    place = raw.index(gguf.GGUFReader(tmp_path / "whole.gguf").tensors[2].data.tobytes()[:100])
    if change == "a byte":
        raw[place] ^= 1
        part.write_bytes(raw)
    elif change == "cut short":
        part.write_bytes(raw[:place])
    elif change == "gone":
        part.unlink()
    elif change == "journal":
        (home / "m.gguf.parts").write_text('{"parts": [3]}')
    elif change == "settings":
        (home / "made_from.json").write_text('{"settings": ["f16"]}')
    else:
        file = tmp_path / "model" / "config.json"
        file.write_text(file.read_text() + "\n")
    made.clear()
    assert stop_at(None).kept == 0
    assert (tmp_path / "m.gguf").read_bytes() == (tmp_path / "whole.gguf").read_bytes()
    assert not home.exists()


def test_another_export_into_the_same_file_waits_for_none(interrupted, tmp_path):
    stop_at, _ = interrupted
    with Unfinished(tmp_path / "m.gguf").claimed(), pytest.raises(ConvertError, match="another process is converting"):
        stop_at(None)


def test_a_link_to_a_file_stays_a_link(model, tmp_path):
    folder, _ = model()
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "real.gguf").write_bytes(b"old")
    (tmp_path / "m.gguf").symlink_to(tmp_path / "there" / "real.gguf")
    with pytest.raises(ConvertError, match="real.gguf: file: expected a new one"):
        export_gguf(folder, tmp_path / "m.gguf")
    export_gguf(folder, tmp_path / "m.gguf", force=True)
    assert (tmp_path / "m.gguf").is_symlink()
    assert gguf.GGUFReader(tmp_path / "there" / "real.gguf").tensors
    assert [path.name for path in (tmp_path / "there").iterdir()] == ["real.gguf"]
