"""Model FLOPs of a train step and peak FLOP/s of a device; their ratio over time is the utilisation (MFU).

Model FLOPs are the mathematics' multiplications and additions, without recomputation, padding, decoding of 4-bit
weights and the optimizer (Chowdhery et al., PaLM, arXiv:2204.02311, appendix B).
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Int

from convert.model.config import ModelConfig
from convert.model.paths import EMBEDDING, HEAD
from fastjax.models.leaves import leaf_at


class PeakFlops(NamedTuple):
    """Peak dense FLOP/s of one device.

    Attributes:
        half: bfloat16 and float16 matrices with accumulation in float32.
        tf32: float32 matrices rounded to TF32; None where the device has none.
        float32: float32 without tensor cores.
        bfloat16: whether `half` holds for bfloat16 too; Turing has float16 only.
        float8: float8 matrices with accumulation in float32; None where the device has none.
    """

    half: float
    tf32: float | None
    float32: float
    bfloat16: bool = True
    float8: float | None = None


_H100_SXM = PeakFlops(
    989.4e12, 494.7e12, 66.9e12, float8=1978.9e12
)  # NVIDIA H100 Tensor Core GPU Architecture, table of peak rates
_H100_PCIE = PeakFlops(756e12, 378e12, 51.2e12, float8=1513e12)  # the same table
_H100_NVL = PeakFlops(835.5e12, 417.5e12, 60e12, float8=1670.5e12)  # H100 data sheet: 1,671, 835, 3,341 (sparse), 60
_A100 = PeakFlops(312e12, 156e12, 19.5e12)  # NVIDIA A100 Tensor Core GPU Architecture, table 1

PEAK_FLOPS: dict[str, PeakFlops] = {
    "NVIDIA B200": PeakFlops(
        2250e12, 1125e12, 75e12, float8=4500e12
    ),  # HGX B200: 36,000, 18,000, 72,000 (of eight, sparse), 600
    "NVIDIA H200": _H100_SXM,  # H200 data sheet: the processor of the H100 SXM
    "NVIDIA H200 NVL": _H100_NVL,  # H200 data sheet, the same figures
    "NVIDIA GH200 480GB": _H100_SXM,  # GH200 data sheet, the same figures
    "NVIDIA H100 80GB HBM3": _H100_SXM,
    "NVIDIA H100 PCIe": _H100_PCIE,
    "NVIDIA H100 NVL": _H100_NVL,
    "NVIDIA A100-SXM4-40GB": _A100,
    "NVIDIA A100-SXM4-80GB": _A100,
    "NVIDIA A100-PCIE-40GB": _A100,
    "NVIDIA A100 80GB PCIe": _A100,
    "NVIDIA A40": PeakFlops(149.7e12, 74.8e12, 37.4e12),  # A40 data sheet
    "NVIDIA A30": PeakFlops(165e12, 82e12, 10.3e12),  # A30 data sheet
    "NVIDIA A10": PeakFlops(125e12, 62.5e12, 31.2e12),  # A10 data sheet
    "NVIDIA RTX A6000": PeakFlops(154.8e12, 77.4e12, 38.7e12),  # GA102 GPU Architecture, appendix
    "NVIDIA GeForce RTX 3090": PeakFlops(71e12, 35.6e12, 35.6e12),  # GA102 GPU Architecture, table 2
    "NVIDIA L40S": PeakFlops(362e12, 183e12, 91.6e12, float8=733e12),  # L40S data sheet
    "NVIDIA L40": PeakFlops(181e12, 90.5e12, 90.5e12, float8=362e12),  # L40 data sheet
    "NVIDIA L4": PeakFlops(
        121e12, 60e12, 30.3e12, float8=242.5e12
    ),  # L4 data sheet: 242, 120, 485 (with sparsity), 30.3
    "NVIDIA RTX 6000 Ada Generation": PeakFlops(364.2e12, 182.1e12, 91.1e12, float8=728.5e12),  # its data sheet
    "NVIDIA GeForce RTX 4090": PeakFlops(
        165.2e12, 82.6e12, 82.6e12, float8=330.3e12
    ),  # Ada GPU Architecture, appendix A
    "Tesla T4": PeakFlops(65e12, None, 8.1e12, bfloat16=False),  # T4 data sheet
}
"""What NVIDIA states, by `jax.Device.device_kind`; a part of a GPU (MIG) has a name of its own and is not listed."""


def peak_flops(device_kind: str, dtype: Any) -> float | None:
    """Peak FLOP/s of one device in a dtype.

    Args:
        device_kind: `jax.Device.device_kind`.
        dtype: of the products: bfloat16, float16, float32 (not rounded to anything), "tf32" or "float8".

    Returns:
        FLOP/s, dense; None: unknown.
    """
    peak = PEAK_FLOPS.get(device_kind)
    name = dtype if isinstance(dtype, str) else np.dtype(dtype).name
    if peak is None or (name == "bfloat16" and not peak.bfloat16):
        return None
    rates = {"bfloat16": peak.half, "float16": peak.half, "tf32": peak.tf32, "float32": peak.float32}
    return (rates | {"float8": peak.float8}).get(name)


def matrix_parameters(config: ModelConfig) -> int:
    """Elements of the matrices in a token's products: the layers', of a mixture the chosen experts', and the head's."""
    products = ("matrix", "router", "gate", "experts")
    sizes = ((math.prod(spec.shape), spec.kind) for spec in config.specs if spec.kind in products)
    layers = sum(size if kind != "experts" else round(size * _chosen(config)) for size, kind in sizes)
    return layers + config.hidden_size * (1 if config.scored else config.vocab_size)


def _chosen(config: ModelConfig) -> float:
    """The share of a mixture's experts that a token passes through."""
    return 1.0 if config.moe is None else config.moe.router.experts_per_token / config.moe.router.num_experts


def attended_length(lengths: Sequence[int] | Int[np.ndarray, " D"]) -> float:
    """The common document length with the same attention cost a token.

    A document of n tokens costs n², so this is the sum of the squares over the sum: the mean over tokens of their
    document's length.

    Args:
        lengths: tokens of each document.

    Returns:
        `step_flops`' document_length; 0 without documents.
    """
    sizes = np.asarray(lengths, np.float64)
    return float(np.sum(sizes**2) / np.sum(sizes)) if sizes.size else 0.0


def step_flops(
    config: ModelConfig,
    *,
    tokens: int,
    document_length: float,
    adapter_parameters: int = 0,
    trained_parameters: int = 0,
    reference: bool = False,
) -> float:
    """FLOPs of one step.

    A matrix element costs two a token forward, two for the gradient of its input, and two for its own gradient when
    it is trained. Attention costs 4·H·D a key that a token sees forward (two products), and twice that backward: in a
    document of S tokens a token sees S / 2 keys, with a window of W < S tokens W - W² / 2S.

    Args:
        config: the model.
        tokens: tokens of the step, padding not counted.
        document_length: S, the length of a document, the reach of attention; `attended_length` of documents of several
            lengths.
        adapter_parameters: trained elements of LoRA's A and B; of experts those of the chosen ones.
        trained_parameters: trained elements of the model's own matrices; `matrix_parameters` in full fine-tuning.
        reference: whether there is a second pass forward, without the adapter, as in some losses of preferences.
    """
    products = (6 if reference else 4) * matrix_parameters(config) + 2 * trained_parameters + 6 * adapter_parameters
    windows = [min(mixer.sliding_window or document_length, document_length) for mixer in config.attention]
    keys = sum(window - window**2 / (2 * document_length) for window in windows) if document_length else 0.0
    attention = (16 if reference else 12) * keys * config.num_attention_heads * config.head_dim
    return float(tokens) * (products + attention)


def flops_per_token(config: ModelConfig, trainable: Any, document_length: float, *, reference: bool = False) -> float:
    """FLOPs of a step a token, from its trained arrays.

    Args:
        config: the model.
        trainable: its tree of trained arrays (`LanguageModel.trainable`).
        document_length: as for `step_flops`.
        reference: likewise.
    """
    found = [(leaf_at(path), leaf.size) for path, leaf in jax.tree_util.tree_leaves_with_path(trainable)]
    leaves = [(leaf, round(size * _chosen(config)) if leaf.of_experts else size) for leaf, size in found]
    adapter = sum(size for leaf, size in leaves if leaf.kind in ("lora_A", "lora_B"))
    own = sum(size for leaf, size in leaves if leaf.kind in ("matrix", "experts", "router", "gate", "table"))
    # An embedding is looked up, not multiplied, unless it is the head as well.
    tables = {leaf.keys[0]: size for leaf, size in leaves if leaf.kind == "table"}
    if not config.tie_word_embeddings or HEAD in tables:
        own -= tables.get(EMBEDDING, 0)
    return step_flops(
        config,
        tokens=1,
        document_length=document_length,
        adapter_parameters=adapter,
        trained_parameters=own,
        reference=reference,
    )
