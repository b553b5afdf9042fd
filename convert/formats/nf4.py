"""bitsandbytes NF4 (QLoRA, arXiv 2305.14314), bit for bit: read, written, encoded and decoded with NumPy.

A matrix is flattened row by row and cut into blocks of 64, which may cross rows; the last may be short. Each block
has a float32 scale, its largest magnitude, and each element the index of the nearest of 16 values; two indices share
a byte, the even element in the high nibble. "Nested" scales are themselves quantised: their mean is taken off and the
rest goes into blocks of 256 with the signed dynamic 8-bit map (arXiv 1511.04561).

`encode` follows bitsandbytes' CPU code to the bit: whole blocks are multiplied with the scale's reciprocal, the short
one is divided; its scale is at least 1e-38; ties go to the lower value; nested values are first rounded to a grid of
65,536 points. Only the nested offset is not reproducible: a float32 mean whose last bits depend on torch's order of
summation, which varies with processor, threads and device. Here it is `mean`, in an order of its own, within 2 units in
the last place of torch's; a scale's code may differ by one where the offset does.
"""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
from jaxtyping import Float, Shaped, UInt8

from convert.errors import ConvertError, unexpected
from convert.files import parse_json
from convert.formats.dynamic import NESTED_BLOCK, dynamic_map, encode_dynamic
from convert.limits import DIMENSIONS

NF4_MAP = np.array(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ],
    np.float32,
)
BLOCK = 64
QUANT_STATE = ".quant_state.bitsandbytes__nf4"
SUFFIXES = ("", ".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map", QUANT_STATE)

BRANCHES = 16
"""Branches at each node of the tree in which scales are added up."""

_DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
_BOUNDS = (NF4_MAP[:-1] + NF4_MAP[1:]) / np.float32(2)
_CHUNK = 2**12  # blocks encoded or decoded at a time, so that temporaries stay small
_TINY = np.float32(1e-38)
_LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class NF4Tensor:
    """A quantised tensor with n = prod(shape) elements in ``blocks = ceil(n / blocksize)`` blocks.

    Attributes:
        codes: uint8 [ceil(n / 2)], flat, the even element in the high nibble.
        absmax: Scales [blocks]: float32, or uint8 if nested.
        quant_map: float32 [16].
        shape: Of the decoded tensor.
        dtype: Of the original tensor, to which bitsandbytes decodes: "bfloat16", "float16" or "float32".
        blocksize: Elements a block.
        nested_absmax: float32 [ceil(blocks / nested_blocksize)], or None.
        nested_quant_map: float32 [256], or None.
        nested_offset: The scales' mean, subtracted before (a float32's value), or None.
        nested_blocksize: Scales a nested block.
        storage_dtype: dtype of the codes' bytes in a file ("uint8", "bfloat16"…; bitsandbytes' quant_storage).
        storage_shape: Their shape there; None for bitsandbytes' own, a column.
        quant_state: The JSON bytes of its file; None: they are made.
    """

    codes: UInt8[np.ndarray, " bytes"]
    absmax: Shaped[np.ndarray, " blocks"]
    quant_map: Float[np.ndarray, " 16"]
    shape: tuple[int, ...]
    dtype: str
    blocksize: int = BLOCK
    nested_absmax: Float[np.ndarray, " nested"] | None = None
    nested_quant_map: Float[np.ndarray, " 256"] | None = None
    nested_offset: float | None = None
    nested_blocksize: int = NESTED_BLOCK
    storage_dtype: str = "uint8"
    storage_shape: tuple[int, ...] | None = None
    quant_state: bytes | None = None

    @property
    def nested(self) -> bool:
        """Whether the scales are quantised too."""
        return self.nested_absmax is not None


def encode(
    weight: Float[np.ndarray, "..."], *, nested: bool = False, offset: float | None = None, storage_dtype: str = "uint8"
) -> NF4Tensor:
    """Quantise as bitsandbytes does on a CPU.

    Args:
        weight: Finite values in float32, float16 or bfloat16, any shape.
        nested: Quantise the scales too.
        offset: The nested offset; None for the `mean` of the scales.
        storage_dtype: dtype of the codes' bytes in a file; their number must be a multiple of its size.

    Returns:
        The quantised tensor: codes and scales are bit-equal to bitsandbytes', nested ones with an equal offset.

    Raises:
        ConvertError: Another dtype, or a value that is not finite.
    """
    if weight.dtype.name not in _DTYPES:
        raise ConvertError(f"NF4 encode: expected a dtype of {', '.join(_DTYPES)}, got {weight.dtype.name}")
    flat = np.ascontiguousarray(weight).reshape(-1)
    blocks = math.ceil(flat.size / BLOCK)
    codes = np.empty(math.ceil(flat.size / 2), np.uint8)
    absmax = np.empty(blocks, np.float32)
    for first in range(0, blocks, _CHUNK):
        values = flat[first * BLOCK : (first + _CHUNK) * BLOCK].astype(np.float32)
        scaled, maxima = _scale_blocks(values)
        if not np.isfinite(maxima).all():
            raise ConvertError("NF4 encode: expected finite values, got infinity or NaN in the weight")
        packed = _pack(scaled)
        start = first * BLOCK // 2
        codes[start : start + packed.size] = packed
        absmax[first : first + maxima.size] = maxima
    tensor = NF4Tensor(codes, absmax, NF4_MAP, weight.shape, weight.dtype.name, storage_dtype=storage_dtype)
    return nest(tensor, offset) if nested else tensor


def nest(tensor: NF4Tensor, offset: float | None = None) -> NF4Tensor:
    """Quantise a tensor's scales.

    Args:
        tensor: With scales in float32.
        offset: Subtracted from them; None for their `mean`.
    """
    if offset is None:
        offset = float(mean(tensor.absmax))
    absmax, nested_absmax = encode_dynamic(tensor.absmax - np.float32(offset))
    return replace(
        tensor,
        absmax=absmax,
        nested_absmax=nested_absmax,
        nested_quant_map=dynamic_map(),
        nested_offset=offset,
    )


def mean(scales: Float[np.ndarray, " blocks"]) -> np.float32:
    """The mean of scales, in a fixed order: the bits of `pallas_kernels.nf4.mean` on every device.

    The sum is two float32 numbers, the second for the rounding error of the first (Knuth's two-sum), over a tree of 16
    branches; it is rounded to float32 once and then divided, as torch does with its sum.

    Args:
        scales: float32, none below 0; finite.
    """
    # A power of two, so that no sum of fewer than 2²⁸ scales overflows.
    unit = np.float32(2.0**-28 if scales.max(initial=0) > 2.0**99 else 1)
    high, low = scales * unit, np.zeros_like(scales)
    while high.size > 1:
        columns = -(-high.size // BRANCHES)
        parts = [np.pad(part, (0, columns * BRANCHES - high.size)).reshape(BRANCHES, columns) for part in (high, low)]
        high, low = parts[0][0], parts[1][0]
        for more, rest in zip(parts[0][1:], parts[1][1:], strict=True):
            total = high + more
            added = total - high
            low = low + (rest + ((high - (total - added)) + (more - added)))
            high = total
    return np.float32((high + low)[0] / np.float32(scales.size) / unit)


def decode(tensor: NF4Tensor, dtype: str | np.dtype | type | None = None) -> Float[np.ndarray, "..."]:
    """Dequantise: value times scale in float32, one cast at the end.

    Args:
        tensor: The quantised tensor.
        dtype: Of the result; None for the original tensor's.

    Returns:
        An array of ``tensor.shape``, bit-equal to bitsandbytes'.
    """
    target = np.dtype(_DTYPES[tensor.dtype] if dtype is None else dtype)
    count, scales = math.prod(tensor.shape), decode_absmax(tensor)
    pairs = tensor.quant_map[np.stack([np.arange(256) >> 4, np.arange(256) & 15], axis=1)]  # the two values of a byte
    result = np.empty(count, target)
    step = _CHUNK * tensor.blocksize  # a multiple of 2: blocks have an even size
    for first in range(0, count, step):
        last = min(first + step, count)
        packed = tensor.codes[first // 2 : math.ceil(last / 2)]
        values = pairs[packed].reshape(-1)[: last - first]
        whole = values.size - values.size % tensor.blocksize
        blocks = scales[first // tensor.blocksize : math.ceil(last / tensor.blocksize)]
        table = values[:whole].reshape(-1, tensor.blocksize)
        table *= blocks[: len(table), None]
        values[whole:] *= blocks[len(table) :].repeat(values.size - whole)
        result[first:last] = values.astype(target)
    return result.reshape(tensor.shape)


def decode_absmax(tensor: NF4Tensor) -> Float[np.ndarray, " blocks"]:
    """The scales in float32, decoded if nested.

    Args:
        tensor: The quantised tensor.

    Returns:
        float32 [blocks].
    """
    if tensor.nested_absmax is None or tensor.nested_quant_map is None or tensor.nested_offset is None:
        return tensor.absmax
    scale = np.repeat(tensor.nested_absmax, tensor.nested_blocksize)[: tensor.absmax.size]
    return tensor.nested_quant_map[tensor.absmax] * scale + np.float32(tensor.nested_offset)


def from_tensors(name: str, tensors: Mapping[str, np.ndarray], file: str | os.PathLike[str]) -> NF4Tensor:
    """Put a checkpoint's tensors together.

    Args:
        name: The weight's name, such as "model.layers.0.mlp.up_proj.weight".
        tensors: The tensors whose names are `name` plus one of `SUFFIXES`, by full name.
        file: Where they come from, for messages.

    Returns:
        The quantised tensor; `to_tensors` gives back the same bytes.

    Raises:
        ConvertError: A part is missing or does not fit the others; the message names it.
    """
    raw = _part(tensors, name + QUANT_STATE, name, file).tobytes()
    state = read_state(raw, file, name + QUANT_STATE)
    shape, blocksize = tuple(state["shape"]), state["blocksize"]
    count = math.prod(shape)
    nested, blocks = "nested_blocksize" in state, math.ceil(count / blocksize)
    stored = _part(tensors, name, name, file)
    codes = np.ascontiguousarray(stored).reshape(-1).view(np.uint8)
    _check_size(codes, math.ceil(count / 2), f"codes for {list(shape)} in bytes", name, file)
    scales = {
        ".absmax": (np.uint8 if nested else np.float32, blocks, "one a block"),
        ".quant_map": (np.float32, 16, "the values"),
    }
    if nested:
        groups = math.ceil(blocks / state["nested_blocksize"])
        scales[".nested_absmax"] = np.float32, groups, "one a nested block"
        scales[".nested_quant_map"] = np.float32, 256, "the values"
    arrays = {}
    for suffix, (dtype, size, what) in scales.items():
        array = arrays[suffix] = _part(tensors, name + suffix, name, file)
        if array.dtype != dtype:
            raise unexpected(file, name + suffix, f"dtype {np.dtype(dtype)}", array.dtype.name)
        _check_size(array, size, what, name + suffix, file)
    return NF4Tensor(
        codes,
        arrays[".absmax"],
        arrays[".quant_map"],
        shape,
        state["dtype"],
        blocksize,
        arrays.get(".nested_absmax"),
        arrays.get(".nested_quant_map"),
        float(state["nested_offset"]) if nested else None,
        state.get("nested_blocksize", NESTED_BLOCK),
        stored.dtype.name,
        stored.shape,
        raw,
    )


def read_state(raw: bytes, file: str | os.PathLike[str], field: str) -> dict[str, Any]:
    """Parse and check a quant_state.

    Args:
        raw: Its JSON.
        file: Where it comes from, for messages.
        field: Its tensor's name, for messages.

    Raises:
        ConvertError: No such JSON, or fields that are missing or wrong.
    """
    state = parse_json(raw, file, field)
    _check_state(state, file, field)
    return state


def to_tensors(name: str, tensor: NF4Tensor) -> dict[str, np.ndarray]:
    """A checkpoint's tensors of a quantised weight, as bitsandbytes names and lays them out.

    Args:
        name: The weight's name.
        tensor: The quantised tensor.

    Returns:
        Full name -> array; byte-identical to the arguments of `from_tensors`.

    Raises:
        ConvertError: The codes' bytes do not fill whole elements of the storage dtype.
    """
    storage = np.dtype(tensor.storage_dtype)
    if tensor.codes.size % storage.itemsize:
        raise ConvertError(f"{name}: expected a multiple of {storage.itemsize} bytes for quant_storage {storage}, "
                           f"got {tensor.codes.size}; use uint8")  # fmt: skip
    codes = tensor.codes.view(storage)
    tensors = {
        name: codes.reshape((-1, 1) if tensor.storage_shape is None else tensor.storage_shape),
        name + ".absmax": tensor.absmax,
        name + ".quant_map": tensor.quant_map,
    }
    if tensor.nested_absmax is not None and tensor.nested_quant_map is not None:
        tensors[name + ".nested_absmax"] = tensor.nested_absmax
        tensors[name + ".nested_quant_map"] = tensor.nested_quant_map
    raw = _make_state(tensor) if tensor.quant_state is None else tensor.quant_state
    tensors[name + QUANT_STATE] = np.frombuffer(raw, np.uint8)
    return tensors


def quantization_config(
    dtype: str, skipped: list[str], *, nested: bool, storage_dtype: str = "uint8"
) -> dict[str, Any]:
    """The ``quantization_config`` that transformers looks for in config.json.

    Args:
        dtype: What the weights decode to.
        skipped: Linear modules that are not quantised.
        nested: Whether the scales are quantised too.
        storage_dtype: Of the codes' bytes in the files.
    """
    return {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "load_in_8bit": False,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": nested,
        "bnb_4bit_compute_dtype": dtype,
        "bnb_4bit_quant_storage": storage_dtype,
        "llm_int8_skip_modules": skipped,
    }


def _scale_blocks(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Divide float32 values by their block's largest magnitude: bitsandbytes treats a short last block differently."""
    whole = values.size - values.size % BLOCK
    table = values[:whole].reshape(-1, BLOCK)
    absmax = np.abs(table).max(axis=1) if whole else np.empty(0, np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        scaled = (table * (np.float32(1) / np.maximum(absmax, _TINY))[:, None]).reshape(-1)
        if whole < values.size:
            last = np.maximum(np.abs(values[whole:]).max(), _TINY)
            scaled = np.append(scaled, values[whole:] / last)
            absmax = np.append(absmax, last)
    return np.clip(scaled, np.float32(-1), np.float32(1)), absmax


def _pack(scaled: Float[np.ndarray, " n"]) -> UInt8[np.ndarray, " bytes"]:
    """The nearest values' indices, two a byte; comparing with all 15 bounds is 20 times faster than searching."""
    indices = np.zeros(scaled.size + scaled.size % 2, np.uint8)
    if scaled.size % 2:
        scaled = np.append(scaled, np.float32(0))
    for bound in _BOUNDS:
        indices += (scaled > bound).view(np.uint8)
    return (indices[::2] << 4) | indices[1::2]


def _make_state(tensor: NF4Tensor) -> bytes:
    state: dict[str, Any] = {
        "quant_type": "nf4",
        "blocksize": tensor.blocksize,
        "dtype": tensor.dtype,
        "shape": list(tensor.shape),
    }
    if tensor.nested_offset is not None:
        state["nested_blocksize"] = tensor.nested_blocksize
        state["nested_dtype"] = "float32"
        state["nested_offset"] = float(np.float32(tensor.nested_offset))
    return json.dumps(state).encode("utf-8")


def _check_state(state: dict[str, Any], file: str | os.PathLike[str], field: str) -> None:
    required = {"quant_type", "blocksize", "dtype", "shape"}
    nested = {"nested_blocksize", "nested_dtype", "nested_offset"}
    if set(state) not in (required, required | nested):
        expected = f"the keys {', '.join(sorted(required))}, and all or none of {', '.join(sorted(nested))}"
        raise unexpected(file, field, expected, sorted(state))
    shape = state["shape"]
    offset = state.get("nested_offset", 0.0)
    numeric = isinstance(offset, (int, float)) and -_LARGEST < offset < _LARGEST
    checks = {
        "quant_type": (state["quant_type"] == "nf4", "'nf4'"),
        "dtype": (state["dtype"] in list(_DTYPES), f"one of {', '.join(_DTYPES)}"),
        "blocksize": (_even(state["blocksize"]), "a positive even integer"),
        "shape": (_sizes(shape), f"a list of sizes (at most {DIMENSIONS})"),
        "nested_blocksize": (_even(state.get("nested_blocksize", 2)), "a positive even integer"),
        "nested_dtype": (state.get("nested_dtype", "float32") == "float32", "'float32'"),
        "nested_offset": (numeric, "a float32 number"),
    }
    for key, (right, expected) in checks.items():
        if not right:
            raise unexpected(file, f"{field}.{key}", expected, state[key])


def _sizes(value: Any) -> bool:
    right = isinstance(value, list) and len(value) <= DIMENSIONS
    return right and all(type(size) is int and 0 < size < 2**31 for size in value)


def _even(value: Any) -> bool:
    return type(value) is int and 0 < value < 2**31 and value % 2 == 0


def _part(tensors: Mapping[str, np.ndarray], full: str, name: str, file: str | os.PathLike[str]) -> np.ndarray:
    if full not in tensors:
        raise ConvertError(f"{file}: {name} is NF4 and needs {full}, which is missing")
    return tensors[full]


def _check_size(array: np.ndarray, size: int, what: str, name: str, file: str | os.PathLike[str]) -> None:
    if array.size != size:
        raise unexpected(file, name, f"{size} elements ({what})", f"{array.size}")
