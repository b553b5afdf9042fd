"""A model folder as one GGUF file for llama.cpp, through the `gguf` library: its names, its quantisers, its writer.

Vectors stay in float32, matrices take the type asked for. With 4 and 5 bits the head (or the embedding that is tied to
it) has Q8_0, since the library has no K-quants to write; a matrix whose rows are no whole blocks is kept in F16.
"""

import importlib
import math
import os
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from convert.blocks import Blocks, stored_blocks, whole_groups
from convert.checkpoint import CONFIG
from convert.errors import ConvertError, unexpected
from convert.files import atomic_folder
from convert.gguf_header import read_gguf_header
from convert.gguf_vocabulary import Vocabulary, read_vocabulary
from convert.shard import Monitor, is_finite
from convert.weights import Weights, open_weights

#: model_type -> llama.cpp's architecture, and whether its rotary positions pair neighbours (rows of q and k move).
ARCHITECTURES = {
    "llama": ("LLAMA", True),
    "mistral": ("LLAMA", True),
    "qwen2": ("QWEN2", False),
    "qwen3": ("QWEN3", False),
}
TYPES = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0")
_WHOLE = 2**16  # elements a quantiser is given at least, and a multiple of every block


@dataclass(frozen=True)
class Exported:
    """A GGUF file.

    Attributes:
        file: Where it is.
        types: "Q8_0", … -> how many tensors have it.
        bytes: Its size.
        notes: What else is worth knowing, in sentences.
    """

    file: Path
    types: Mapping[str, int]
    bytes: int
    notes: tuple[str, ...]


def export_gguf(
    source: str | os.PathLike[str],
    file: str | os.PathLike[str],
    *,
    type: str = "bf16",
    pre_tokenizer: str | None = None,
    force: bool = False,
    allow_nonfinite: bool = False,
    monitor: Monitor | None = None,
) -> Exported:
    """Write a model folder as a GGUF file, whole or not at all.

    Args:
        source: The model folder, of any format that is read; merge an adapter first.
        file: The file to write.
        type: Of the matrices, one of `TYPES`.
        pre_tokenizer: llama.cpp's name of the way in which text is cut up, where it is not known here.
        force: Replace a file that is there.
        allow_nonfinite: Write NaN and infinity instead of refusing.
        monitor: Called with the elements done and those to do.

    Returns:
        What was written.

    Raises:
        ConvertError: The `gguf` library is missing; the family, activation, RoPE scaling or tokenizer has no
            counterpart here; values are not finite; the file exists; or it reads back differently.
        OSError: The disk has no room, …; nothing half-written is left.
    """
    if type not in TYPES:
        raise unexpected(file, "type", f"one of {', '.join(TYPES)} (the gguf library writes no K-quants)", type)
    gguf = _library()
    file = Path(file)
    if file.exists() and (file.is_dir() or not force):
        raise unexpected(file, "file", "a new one (--force replaces a file)", "a folder" if file.is_dir() else "one")
    weights = open_weights(source)
    plan = _Plan(gguf, weights, type)
    vocabulary = read_vocabulary(weights.checkpoint.folder, plan.rows, pre_tokenizer)
    with atomic_folder(file.parent) as temporary:
        partial = temporary / file.name
        writer = gguf.GGUFWriter(partial, plan.name)
        try:
            plan.add_metadata(writer)
            _add_vocabulary(writer, vocabulary)
            checksums = plan.write(writer, allow_nonfinite, monitor)
        finally:
            writer.close()
        _check(partial, checksums)
        size = partial.stat().st_size
    kinds = [kind.name for _, kind, _ in plan.tensors.values()]
    return Exported(file, {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}, size, tuple(plan.notes))


def _library() -> Any:
    try:
        return importlib.import_module("gguf")
    except ImportError:
        raise ConvertError("the gguf library is missing: pip install 'fastjax[gguf]'") from None


class _Plan:
    """What becomes of each tensor, and what the file says of the model."""

    def __init__(self, gguf: Any, weights: Weights, type: str):
        self.gguf, self.weights, self.config = gguf, weights, weights.checkpoint.config
        self.file = weights.checkpoint.folder / CONFIG
        self.notes: list[str] = []
        model_type = weights.family.model_type
        if model_type not in ARCHITECTURES:
            raise unexpected(self.file, "model_type", f"one of {', '.join(ARCHITECTURES)} for GGUF", model_type)
        architecture, self.paired = ARCHITECTURES[model_type]
        self.architecture = gguf.MODEL_ARCH[architecture]
        self.name = gguf.MODEL_ARCH_NAMES[self.architecture]
        self.type = gguf.GGMLQuantizationType[type.upper()]
        self.rows, self.width = weights.rows["embed_tokens.weight"].shape
        self.layers = self.config["num_hidden_layers"]
        self.heads = self.config["num_attention_heads"]
        self.key_heads = self.config.get("num_key_value_heads") or self.heads
        self.head_size = self.config.get("head_dim") or self.width // self.heads
        if self.config.get("hidden_act", "silu") != "silu":
            raise unexpected(self.file, "hidden_act", f"'silu', which {self.name} means", self.config["hidden_act"])
        self.rope = self._rope()
        names = gguf.get_tensor_name_map(self.architecture, self.layers)
        #: Name in the file -> (tree path, type, shape).
        self.tensors: dict[str, tuple[str | None, Any, tuple[int, ...]]] = {}
        factors = self._rope_factors()
        if factors is not None:
            self.tensors["rope_freqs.weight"] = None, gguf.GGMLQuantizationType.F32, factors.shape
        self.factors = factors
        for path, row in weights.rows.items():
            name = names.get_name(row.name, try_suffixes=(".weight", ".bias"))
            if name is None:
                raise ConvertError(f"{self.file.parent}: {row.name}: {self.name} of llama.cpp has no such tensor")
            self.tensors[name] = path, self._type_of(path, row.shape), row.shape

    def add_metadata(self, writer: Any) -> None:
        """The keys that llama.cpp needs of this architecture."""
        gguf, config = self.gguf, self.config
        writer.add_type(gguf.GGUFType.MODEL)
        writer.add_name(self.weights.checkpoint.folder.name)
        writer.add_vocab_size(self.rows)
        writer.add_context_length(config.get("max_position_embeddings", 2048))
        writer.add_embedding_length(self.width)
        writer.add_block_count(self.layers)
        writer.add_feed_forward_length(config["intermediate_size"])
        writer.add_head_count(self.heads)
        writer.add_head_count_kv(self.key_heads)
        writer.add_key_length(self.head_size)
        writer.add_value_length(self.head_size)
        writer.add_rope_dimension_count(self.head_size)
        writer.add_layer_norm_rms_eps(config.get("rms_norm_eps", 1e-6))
        writer.add_rope_freq_base(self.rope["rope_theta"])
        kind = self.rope["rope_type"]
        if kind in ("linear", "yarn"):
            writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
            writer.add_rope_scaling_factor(self.rope["factor"])
            original = self.rope.get("original_max_position_embeddings")
            if original:
                writer.add_rope_scaling_orig_ctx_len(original)
        kinds = {"F32": "ALL_F32"}.get(self.type.name, f"MOSTLY_{self.type.name}")
        writer.add_file_type(gguf.LlamaFileType[kinds])
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)

    def write(self, writer: Any, allow_nonfinite: bool, monitor: Monitor | None) -> dict[str, int]:
        """Header and tensors; the tensors' checksums."""
        gguf = self.gguf
        for name, (_, kind, shape) in self.tensors.items():
            elements, size = gguf.GGML_QUANT_SIZES[kind]
            writer.add_tensor_info(
                name, shape, np.dtype(np.float32), math.prod(shape) // elements * size, raw_dtype=kind
            )
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        stream = writer.fout[0]
        total, done = sum(math.prod(shape) for _, _, shape in self.tensors.values()), 0
        checksums = {}
        for name, (path, kind, shape) in self.tensors.items():
            writer.write_padding(stream, stream.tell())
            begin, checksum = stream.tell(), 0
            for values in self._values(path):
                if not allow_nonfinite and not is_finite(values):
                    raise ConvertError(f"{self.file.parent}: {path}: expected finite values, got NaN or infinity")
                with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
                    raw = np.ascontiguousarray(gguf.quantize(values.reshape(-1, shape[-1]), kind)).view(np.uint8)
                stream.write(raw.data)
                checksum = zlib.crc32(raw.data, checksum)
                done += values.size
                if monitor is not None:
                    monitor(done, total)
            writer.write_padding(stream, stream.tell() - begin)
            checksums[name] = checksum
        return checksums

    def _values(self, path: str | None) -> Iterator[np.ndarray]:
        """Float32 arrays of whole rows."""
        if path is None:
            assert self.factors is not None
            yield self.factors
            return
        blocks: Blocks = stored_blocks(self.weights, path)
        part = path.split(".")[-2]
        if self.paired and part in ("q_proj", "k_proj"):
            heads = self.heads if part == "q_proj" else self.key_heads
            whole = np.concatenate(list(blocks()))
            halves = whole.reshape(heads, 2, self.head_size // 2, whole.shape[1])
            yield np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(whole.shape)
            return
        shape = self.weights.rows[path].shape
        group = math.lcm(shape[-1], _WHOLE) if math.lcm(shape[-1], _WHOLE) <= 2**24 else shape[-1]
        for _, values in whole_groups(blocks(), group):
            yield values

    def _type_of(self, path: str, shape: tuple[int, ...]) -> Any:
        kinds = self.gguf.GGMLQuantizationType
        if len(shape) == 1:
            return kinds.F32
        tied = "lm_head.weight" not in self.weights.rows
        kind = self.type
        if kind.name[:2] in ("Q4", "Q5") and path == ("embed_tokens.weight" if tied else "lm_head.weight"):
            kind = kinds.Q8_0
        if shape[-1] % self.gguf.GGML_QUANT_SIZES[kind][0]:
            self.notes.append(f"{path} is kept in F16: its rows of {shape[-1]} are no whole blocks of {kind.name}")
            kind = kinds.F16
        return kind

    def _rope(self) -> dict[str, Any]:
        """Base and scaling of the rotary positions, under transformers' names."""
        config = self.config
        given = config.get("rope_parameters") or config.get("rope_scaling") or {}
        if not isinstance(given, dict):
            raise unexpected(self.file, "rope_scaling", "an object or null", given)
        rope = {"rope_theta": config.get("rope_theta", 10000.0), **given}
        rope["rope_type"] = given.get("rope_type", given.get("type", "default"))
        needed = {
            "default": (),
            "linear": ("factor",),
            "yarn": ("factor",),
            "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
        }
        if rope["rope_type"] not in needed:
            raise unexpected(self.file, "rope_type", f"one of {', '.join(needed)} for GGUF", rope["rope_type"])
        for name in ("rope_theta", *needed[rope["rope_type"]]):
            value = rope.get(name)
            if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < 1e12:
                raise unexpected(self.file, f"rope: {name}", "a positive number", value)
        unknown = set(rope) - {"rope_theta", "rope_type", "type", "original_max_position_embeddings", *needed["llama3"]}
        if unknown:
            raise unexpected(self.file, "rope", "no other settings, for GGUF", sorted(unknown))
        return rope

    def _rope_factors(self) -> np.ndarray | None:
        """What llama.cpp divides the frequencies by: Llama 3.1's scaling."""
        rope = self.rope
        if rope["rope_type"] != "llama3":
            return None
        frequencies = 1.0 / rope["rope_theta"] ** (np.arange(0, self.head_size, 2) / self.head_size)
        turns = rope["original_max_position_embeddings"] * frequencies / (2 * math.pi)
        low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
        smooth = np.clip((turns - low) / (high - low), 0, 1)
        return (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)


def _add_vocabulary(writer: Any, vocabulary: Vocabulary) -> None:
    writer.add_tokenizer_model(vocabulary.model)
    writer.add_tokenizer_pre(vocabulary.pre)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types)
    if vocabulary.scores is not None:
        writer.add_token_scores(vocabulary.scores)
    if vocabulary.merges is not None:
        writer.add_token_merges(vocabulary.merges)
    for name, index in vocabulary.special.items():
        getattr(writer, f"add_{name}_token_id")(index)
    for name, added in vocabulary.add.items():
        getattr(writer, f"add_add_{name}_token")(added)
    if vocabulary.chat_template is not None:
        writer.add_chat_template(vocabulary.chat_template)


def _check(file: Path, checksums: Mapping[str, int]) -> None:
    """Read the file back."""
    header = read_gguf_header(file)
    if list(header.tensors) != list(checksums):
        raise ConvertError(f"{file}: the tensors read back are not those that were written")
    with open(file, "rb") as stream:
        for name, tensor in header.tensors.items():
            stream.seek(tensor.start)
            checksum, left = 0, tensor.nbytes
            while left:
                raw = stream.read(min(left, 2**23))
                checksum, left = zlib.crc32(raw, checksum), left - len(raw)
            if checksum != checksums[name]:
                raise ConvertError(f"{file}: {name} read back is not what was written")
