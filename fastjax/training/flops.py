"""Model FLOPs of a train step; over its time and the devices' peak (`pallas_kernels.cards`) the utilisation (MFU).

They are the mathematics' multiplications and additions, without recomputation, padding, decoding of 4-bit
weights and the optimizer (Chowdhery et al., PaLM, arXiv:2204.02311, appendix B).
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Int

from convert.model.config import ModelConfig
from convert.model.layers import Attention, LatentAttention
from convert.model.paths import EMBEDDING, HEAD
from fastjax.models.leaves import leaf_at


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
    document of S tokens a token sees S / 2 keys, with a window of W < S tokens W - W² / 2S. A recurrent state costs six
    an element forward (read twice and changed), whatever the length.

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
    seen = 0.0  # keys, each by the size of a head
    for mixer in config.attention if document_length else ():
        window = min(mixer.sliding_window or document_length, document_length)
        seen += (window - window**2 / (2 * document_length)) * _head_size(config, mixer)
    attention = (16 if reference else 12) * seen * config.num_attention_heads
    states = (24 if reference else 18) * sum(layer.matrices for layer in config.recurrent)
    return float(tokens) * (products + attention + states)


def _head_size(config: ModelConfig, mixer: Attention | LatentAttention) -> float:
    """D; of latent attention, as it is trained, the mean of a key's and a value's."""
    return (mixer.qk_head_dim + mixer.v_head_dim) / 2 if isinstance(mixer, LatentAttention) else config.head_dim


def flops_per_token(config: ModelConfig, trainable: Any, document_length: float, *, reference: bool = False) -> float:
    """FLOPs of a step a token, from its trained arrays.

    Args:
        config: the model.
        trainable: its tree of trained arrays (`LanguageModel.trainable`).
        document_length: as for `step_flops`.
        reference: as for `step_flops`.
    """
    sized = [(leaf_at(path), leaf.size) for path, leaf in jax.tree_util.tree_leaves_with_path(trainable)]
    leaves = [(leaf, round(size * _chosen(config)) if leaf.of_experts else size) for leaf, size in sized]
    adapter = sum(size for leaf, size in leaves if leaf.kind in ("lora_A", "lora_B"))
    trained = sum(size for leaf, size in leaves if leaf.kind in ("matrix", "experts", "router", "gate", "table"))
    # An embedding is looked up, not multiplied, unless it is the head as well.
    tables = {leaf.keys[0]: size for leaf, size in leaves if leaf.kind == "table"}
    if not config.tie_word_embeddings or HEAD in tables:
        trained -= tables.get(EMBEDDING, 0)
    return step_flops(
        config,
        tokens=1,
        document_length=document_length,
        adapter_parameters=adapter,
        trained_parameters=trained,
        reference=reference,
    )
