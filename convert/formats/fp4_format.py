"""NVFP4 and MXFP4 matrices in checkpoints: as compressed-tensors packs them, and NVFP4 also as modelopt does.

compressed-tensors has ``X.weight_packed`` uint8 [out, in / 2] with ``X.weight_scale``: float8_e4m3fn [out, in / 16] and
``X.weight_global_scale`` float32 [1] for NVFP4, uint8 [out, in / 32] for MXFP4. modelopt has ``X.weight`` uint8 with
``X.weight_scale`` and ``X.weight_scale_2``, the global scale's reciprocal. (The experts of gpt-oss are
`convert.formats.mxfp4`.)
"""

import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from convert.errors import unexpected
from convert.formats import mxfp4, nvfp4
from convert.formats.compressed import Arrays, Compressed, CompressedWriter, misfits, part
from convert.formats.format import Stored
from convert.formats.mxfp4 import MXFP4Tensor
from convert.formats.nvfp4 import NVFP4Tensor

PACKED, SCALE, GLOBAL_SCALE, SECOND_SCALE = "_packed", "_scale", "_global_scale", "_scale_2"
MODELOPT = "modelopt"


class _NVFP4(Compressed):
    name, label, target = "nvfp4", "NVFP4", "nvfp4"
    bits, packed, kind = 4, NVFP4Tensor, ("float", 4, "tensor_group")
    rounding = 17 / 16 / 6  # half of the step from 4 to 6, and of its scale's
    suffixes = PACKED, SCALE, GLOBAL_SCALE

    def holds(self, stored: Stored) -> bool:
        tensors = stored.checkpoint.tensors
        return tensors[self.codes_name(stored.name)].dtype == "uint8" and stored.name + self.suffixes[2] in tensors

    def misfit(self, stored: Stored) -> str | None:
        problem = _no_matrix(stored, self.label, nvfp4.BLOCK)
        if problem is not None:
            return problem
        rows, columns = stored.shape
        return misfits(
            stored,
            {
                self.suffixes[0]: (("uint8",), [(rows, columns // 2)]),
                SCALE: (("float8_e4m3fn",), [(rows, columns // nvfp4.BLOCK)]),
                self.suffixes[2]: (("float32",), [(1,), ()]),
            },
        )

    def rows(self, stored: Stored, first: int, last: int) -> NVFP4Tensor:
        name = stored.name + self.suffixes[2]
        scale = stored.checkpoint.read(name).reshape(1)
        divides = self.suffixes[2] == GLOBAL_SCALE
        if not np.isfinite(scale).all() or divides and scale[0] == 0:
            raise unexpected(stored.checkpoint.info(name).file, name, "a finite scale", scale[0])
        codes, scales = part(stored, self.suffixes[0], first, last), part(stored, SCALE, first, last)
        return NVFP4Tensor(codes, scales, scale, divides, self.decoded_dtype(stored).name)

    def decode(self, tensor: NVFP4Tensor) -> np.ndarray:
        return nvfp4.decode(tensor)


class _ModelOptNVFP4(_NVFP4):
    name, methods = "nvfp4-modelopt", (MODELOPT,)
    suffixes = "", SCALE, SECOND_SCALE

    def scheme(self, stored: Stored) -> str:
        return self.name

    def declares(self, quantization: Mapping[str, Any]) -> bool:
        return quantization.get("quant_method") == MODELOPT

    def check_config(self, quantization: Mapping[str, Any], file: str | os.PathLike[str]) -> None:
        algorithm = quantization.get("quant_algo")
        if algorithm != "NVFP4":
            raise unexpected(file, "quantization_config.quant_algo", "'NVFP4'", algorithm)


class _MXFP4(Compressed):
    name, label, target = "mxfp4-rows", "MXFP4", "mxfp4"
    bits, packed, kind = 4, MXFP4Tensor, ("float", 4, "group")
    rounding = mxfp4.ROUNDING
    suffixes = PACKED, SCALE

    def holds(self, stored: Stored) -> bool:
        info = stored.checkpoint.tensors.get(stored.name + SCALE)
        return stored.checkpoint.info(stored.name + PACKED).dtype == "uint8" and (info is None or info.dtype == "uint8")

    def misfit(self, stored: Stored) -> str | None:
        problem = _no_matrix(stored, self.label, mxfp4.BLOCK)
        if problem is not None:
            return problem
        rows, columns = stored.shape
        scales = ("uint8",), [(rows, columns // mxfp4.BLOCK)]
        return misfits(stored, {PACKED: (("uint8",), [(rows, columns // 2)]), SCALE: scales})

    def rows(self, stored: Stored, first: int, last: int) -> MXFP4Tensor:
        scales = part(stored, SCALE, first, last)
        codes = part(stored, PACKED, first, last).reshape(*scales.shape, mxfp4.BLOCK // 2)
        return MXFP4Tensor(codes, scales, self.decoded_dtype(stored).name)

    def decode(self, tensor: MXFP4Tensor) -> np.ndarray:
        return mxfp4.decode(tensor.codes, tensor.scales).astype(tensor.dtype)

    def made(self, tensor: Any) -> bool:
        return type(tensor) is MXFP4Tensor and tensor.codes.ndim == 3


class _NVFP4Writer(CompressedWriter):
    """Without a format of inputs: compressed-tensors has NVFP4 for them with a scale that is calibrated."""

    name, label, bits = "nvfp4", "NVFP4", 4
    columns_together, whole = nvfp4.BLOCK, True

    def once(self, shape: tuple[int, ...], dtype: np.dtype, top: np.float32) -> Arrays:
        return {GLOBAL_SCALE: nvfp4.global_scale_of(top)}

    def encoded(self, values: np.ndarray, dtype: np.dtype, top: np.float32) -> Arrays:
        tensor = nvfp4.encode(values, nvfp4.global_scale_of(top), dtype)
        return {PACKED: tensor.codes, SCALE: tensor.scales}

    def settings(self) -> tuple[str, dict[str, Any]]:
        weights = {"strategy": "tensor_group", "group_size": nvfp4.BLOCK, "scale_dtype": "torch.float8_e4m3fn"}
        return "nvfp4-pack-quantized", {"num_bits": 4, "type": "float", **weights}


class _MXFP4Writer(CompressedWriter):
    name, label, bits, inputs = "mxfp4", "MXFP4", 4, (None, "fp8-128")
    columns_together = mxfp4.BLOCK

    def encoded(self, values: np.ndarray, dtype: np.dtype, top: np.float32) -> Arrays:
        tensor = mxfp4.encode(values)
        return {PACKED: tensor.codes.reshape(len(values), -1), SCALE: tensor.scales}

    def settings(self) -> tuple[str, dict[str, Any]]:
        weights = {"strategy": "group", "group_size": mxfp4.BLOCK, "scale_dtype": "torch.uint8"}
        return "mxfp4-pack-quantized", {"num_bits": 4, "type": "float", **weights}


def _no_matrix(stored: Stored, label: str, block: int) -> str | None:
    if len(stored.shape) == 2 and stored.shape[1] % block == 0:
        return None
    return f"{label}: expected a matrix with rows of whole blocks of {block}, got {list(stored.shape)}"


NVFP4, NVFP4_MODELOPT, MXFP4_ROWS = _NVFP4(), _ModelOptNVFP4(), _MXFP4()
FP4_WRITERS = (_NVFP4Writer(), _MXFP4Writer())
