"""Export of a model folder to one GGUF file for llama.cpp, with the `gguf` library's names, quantisers and writer.

Vectors and routers stay in float32; matrices take the requested type. With 4 and 5 bits the head (or the tied
embedding) takes Q8_0, as the library writes no K-quants; a matrix whose rows are not whole blocks stays in F16.
"""

import importlib
import math
import os
import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from convert.blocks import Blocks, whole_groups
from convert.checkpoint import CONFIG
from convert.errors import ConvertError, unexpected
from convert.finite import is_finite, nonfinite
from convert.gguf_architecture import hyper_parameters
from convert.gguf_delta import NAMES, delta_values
from convert.gguf_vocabulary import read_vocabulary
from convert.model.layers import GatedDelta
from convert.model.paths import EMBEDDING, HEAD, WeightPath
from convert.model.spec import VECTORS, WeightSpec
from convert.output import write_files
from convert.quantization_aware import QuantizationAware
from convert.quantize import modules_named, refuse_scored
from convert.shard import Chunk, Job, Monitor
from convert.source import fingerprint
from convert.tensor_file import Layout, TensorInfo
from convert.unfinished import Unfinished
from convert.weights import Weights, open_weights

TYPES = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0")
_FLOATS = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
_NAMES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
#: Kinds that stay in float32: vectors, convolutions, and what chooses and weighs experts.
_EXACT = VECTORS | {"router", "gate", "taps"}
#: End of a path -> as the library knows it.
_CHOICE_BIAS = ("mlp.router.choice_bias", "mlp.expert_bias.bias")
_FORMAT = 1  # version of an interrupted conversion's records; another version starts anew
_WHOLE = 2**16  # fewest elements of a quantiser call, and a multiple of every block


@dataclass(frozen=True)
class Exported:
    """An exported GGUF file.

    Attributes:
        file: Its path.
        types: "Q8_0", … -> number of tensors.
        bytes: Its size.
        notes: Remarks, in sentences.
        kept: Number of tensors kept from an interrupted conversion.
    """

    file: Path
    types: Mapping[str, int]
    bytes: int
    notes: tuple[str, ...]
    kept: int = 0


def export_gguf(
    source: str | os.PathLike[str],
    file: str | os.PathLike[str],
    *,
    type: str = "bf16",
    skip: Sequence[str] = (),
    pre_tokenizer: str | None = None,
    force: bool = False,
    allow_nonfinite: bool = False,
    monitor: Monitor | None = None,
) -> Exported:
    """Write a model folder as a GGUF file, whole or not at all; a killed conversion resumes.

    Args:
        source: The model folder, in any readable format; merge an adapter first.
        file: The target file.
        type: Type of the matrices, one of `TYPES`.
        skip: Modules, or ends of their names ("layers.0.mlp.down_proj", "o_proj"), whose matrices keep their dtype.
        pre_tokenizer: llama.cpp's name of the pre-tokenizer, where it is unknown here.
        force: Replace an existing file.
        allow_nonfinite: Write NaN and infinity, also from overflow of the type, instead of refusing them.
        monitor: Called with the bytes done and in all; writing and checking count half each.

    Returns:
        The written file.

    Raises:
        ConvertError: The `gguf` library is missing; the family, activation, RoPE scaling or tokenizer has no
            counterpart in llama.cpp; values are not finite; the file exists; or it reads back differently.
        OSError: The disk is full, …; nothing half-written is left.
    """
    if type not in TYPES:
        raise unexpected(file, "type", f"one of {', '.join(TYPES)} (the gguf library writes no K-quants)", type)
    gguf = require_gguf()
    file = Path(file)
    target = file.resolve() if file.is_symlink() else file  # keep a link, as cp does
    if file.is_dir():
        raise unexpected(file, "file", "a new one, or a file to replace", "a folder")
    weights = open_weights(source)
    refuse_scored(weights)
    contents = _Contents(gguf, weights, type, skip)
    header = _header(gguf, contents, read_vocabulary(weights.checkpoint.folder, contents.rows, pre_tokenizer))
    sizes = contents.sizes()
    jobs = [contents.job(name, size, allow_nonfinite) for name, size in sizes.items()]
    layout = _lay_out(target, header, sizes, gguf.GGUF_DEFAULT_ALIGNMENT)
    settings = [type, list(skip), pre_tokenizer, allow_nonfinite]
    progress = write_files(
        Unfinished(target, file=True),
        {target.name: (layout, jobs)},
        {"source": fingerprint(source), "format": _FORMAT, "settings": settings, "header": zlib.crc32(header)},
        finish=lambda folder: None,
        force=force,
        allow=True,  # of the values, which `_Contents` checks
        monitor=monitor,
    )
    kinds = [kind.name for _, kind, _ in contents.tensors.values()]
    types = {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}
    return Exported(file, types, target.stat().st_size, tuple(contents.notes), progress.tensors)


def _header(gguf: Any, contents: "_Contents", vocabulary: Mapping[str, Any]) -> bytes:
    """The bytes before the tensors' data."""
    with tempfile.TemporaryDirectory() as folder:
        writer = gguf.GGUFWriter(Path(folder) / "header", contents.name)
        try:
            contents.add_metadata(writer)
            for key, value in vocabulary.items():
                getattr(writer, f"add_{key}")(value)
            contents.add_tensors(writer)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
        finally:
            writer.close()
        return (Path(folder) / "header").read_bytes()


def _lay_out(file: Path, header: bytes, sizes: Mapping[str, int], alignment: int) -> Layout:
    """The places of the tensors' bytes, each aligned."""
    places, position = {}, len(header)
    for name, size in sizes.items():
        start = position + -position % alignment
        places[name], position = TensorInfo((size,), "uint8", file, start), start + size
    return Layout(header, places, position + -position % alignment)


def require_gguf() -> Any:
    """Import the `gguf` library.

    Raises:
        ConvertError: It is not installed.
    """
    try:
        return importlib.import_module("gguf")
    except ImportError:
        raise ConvertError("the gguf library is missing: pip install gguf") from None


class _Contents:
    """Type and source of each tensor in the file, and the model's metadata."""

    def __init__(self, gguf: Any, weights: Weights, type: str, skip: Sequence[str]):
        self.gguf, self.weights, self.skipped = gguf, weights, modules_named(weights, skip)
        self.file = weights.checkpoint.folder / CONFIG
        parameters = hyper_parameters(weights.family, weights.checkpoint.config, str(self.file))
        self.parameters, self.notes = parameters, list(parameters.notes)
        architecture = gguf.MODEL_ARCH[parameters.architecture.name]
        self.name = gguf.MODEL_ARCH_NAMES[architecture]
        self.type = gguf.GGMLQuantizationType[type.upper()]
        self.rows = weights.specs[f"{EMBEDDING}.weight"].shape[0]
        names = gguf.get_tensor_name_map(architecture, parameters.keys["block_count"])
        #: Name in the file -> (description, None for a tensor without a source in the checkpoint; type; shape).
        self.tensors: dict[str, tuple[WeightSpec | None, Any, tuple[int, ...]]] = {
            name: (None, gguf.GGMLQuantizationType.F32, array.shape) for name, array in parameters.tensors.items()
        }
        for row in weights.specs.values():
            prefix = "" if row.path.part == HEAD else "model."
            name = names.get_name(f"{prefix}{_known(row.path)}", (".weight", ".bias"))
            biases = (None, *parameters.architecture.biases)  # None: of norms and heads, which are the family's own
            if name is None or row.kind == "bias" and row.group not in biases:
                raise ConvertError(f"{self.file.parent}: {row.name}: {self.name} of llama.cpp has no such tensor")
            shape = row.shape[1:] if row.kind == "gate" else row.shape  # a vector there
            shape = (shape[0], shape[-1]) if row.kind == "taps" else shape
            self.tensors[name] = row, self._type_of(row), shape
        trained = QuantizationAware.read(self.file.parent)
        if trained is not None and self.type.name not in _FLOATS:
            differences = trained.differences(type, trained.activations, skip)
            self.notes += [f"{self.file.parent.name} was {each}" for each in differences]

    def add_metadata(self, writer: Any) -> None:
        gguf = self.gguf
        writer.add_type(gguf.GGUFType.MODEL)
        writer.add_name(self.weights.checkpoint.folder.name)
        writer.add_vocab_size(self.rows)
        for key, value in self.parameters.keys.items():
            kind = {"rope_scaling_type": gguf.RopeScalingType, "expert_gating_func": gguf.ExpertGatingFuncType}.get(key)
            getattr(writer, f"add_{key}")(value if kind is None else kind(value))
        kinds = {"F32": "ALL_F32"}.get(self.type.name, f"MOSTLY_{self.type.name}")
        writer.add_file_type(gguf.LlamaFileType[kinds])
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)

    def sizes(self) -> dict[str, int]:
        """Name in the file -> bytes."""
        quantization = self.gguf.GGML_QUANT_SIZES
        return {
            name: math.prod(shape) // quantization[kind][0] * quantization[kind][1]
            for name, (_, kind, shape) in self.tensors.items()
        }

    def add_tensors(self, writer: Any) -> None:
        sizes = self.sizes()
        for name, (_, kind, shape) in self.tensors.items():
            writer.add_tensor_info(name, shape, np.dtype(np.float32), sizes[name], raw_dtype=kind)

    def job(self, name: str, size: int, allow_nonfinite: bool) -> Job:
        """The job of a tensor's bytes."""

        def run() -> Iterator[Chunk]:
            first = 0
            for raw in self._bytes(name, allow_nonfinite):
                yield Chunk(name, first, raw)
                first += raw.size

        return Job({name: (np.dtype(np.uint8), (size,))}, run, self.file.parent)

    def _bytes(self, name: str, allow_nonfinite: bool) -> Iterator[np.ndarray]:
        spec, kind, shape = self.tensors[name]
        for values in self._values(name, spec):
            with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
                quantized = self.gguf.quantize(values.reshape(-1, shape[-1]), kind)
            raw = np.ascontiguousarray(quantized).reshape(-1).view(np.uint8)
            if not allow_nonfinite and not (is_finite(values) and is_finite(_floats(raw, kind, self.gguf))):
                given = name if spec is None else spec.name
                raise nonfinite(self.file.parent, given, where=f"where {kind.name} cannot hold them")
            yield raw

    def _values(self, name: str, spec: WeightSpec | None) -> Iterator[np.ndarray]:
        """Float32 arrays of whole rows."""
        if spec is None:
            yield self.parameters.tensors[name]
            return
        blocks: Blocks = self.weights.blocks(spec.path)
        part, shift = spec.path.part, self.parameters.architecture.norm_shift
        if self.parameters.architecture.paired and part in self.parameters.heads:
            whole = np.concatenate(list(blocks()))
            halves = whole.reshape(self.parameters.heads[part], 2, -1, whole.shape[1])
            yield np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(whole.shape)
            return
        if spec.kind == "norm" and shift:
            for values in blocks():
                yield values + np.float32(shift)
            return
        if self.parameters.delta is not None and spec.path.block == self.parameters.delta.block:
            yield delta_values(part, np.concatenate(list(blocks())).astype(np.float32), self.parameters.delta)
            return
        columns = spec.shape[-1]
        group = math.lcm(columns, _WHOLE) if math.lcm(columns, _WHOLE) <= 2**24 else columns
        for _, values in whole_groups(blocks(), group):
            yield values

    def _type_of(self, spec: WeightSpec) -> Any:
        kinds, columns = self.gguf.GGMLQuantizationType, spec.shape[-1]
        if spec.kind in _EXACT:
            return kinds.F32
        tied = f"{HEAD}.weight" not in self.weights.specs
        kind = self.type
        if kind.name[:2] in ("Q4", "Q5") and spec.path.part == (EMBEDDING if tied else HEAD):
            kind = kinds.Q8_0
        if str(spec.path) in self.skipped:
            kind = kinds[_NAMES[self.weights.decoded_dtype(str(spec.path)).name]]
        if columns % self.gguf.GGML_QUANT_SIZES[kind][0]:
            self.notes.append(f"{spec.path} is kept in F16: its rows of {columns} are no whole blocks of {kind.name}")
            kind = kinds.F16
        return kind


def _known(path: WeightPath) -> str:
    """A path in the words of the library."""
    start = f"{GatedDelta.block}."
    for inside, name in NAMES.items():
        if path.endswith(f".{start}{inside}"):
            return path.removesuffix(inside) + name
    return path.replace(*_CHOICE_BIAS)


def _floats(raw: np.ndarray, kind: Any, gguf: Any) -> np.ndarray:
    """A tensor's floating-point numbers: its values, or the scale (and minimum) of each block."""
    if kind.name in _FLOATS:
        return raw.view(_FLOATS[kind.name])
    scales = raw.reshape(-1, gguf.GGML_QUANT_SIZES[kind][1])[:, : 4 if kind.name.endswith("_1") else 2]
    return np.ascontiguousarray(scales).view(np.float16)
