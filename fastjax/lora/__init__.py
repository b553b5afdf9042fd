"""Low-rank adapters beside a frozen W: W + s·B·A (LoRA, arXiv 2106.09685), and DoRA (arXiv 2402.09353).

What an adapter computes equals PEFT's, option by option; where adapters attach and how they scale is decided by
`convert.adapters`, which shares PEFT's rules with the files on disk. Projections with their adapters are differentiable
units of their own: `linear` for projections of one input, `mlp` for a whole gated block.
"""

from fastjax.lora.dropout import drop
from fastjax.lora.initial import INITIALISERS, initial_arrays
from fastjax.lora.params import BaseParam, LoraEmbedding, LoraLinear, LoraParam, SavedParam

__all__ = [
    "INITIALISERS",
    "BaseParam",
    "LoraEmbedding",
    "LoraLinear",
    "LoraParam",
    "SavedParam",
    "drop",
    "initial_arrays",
]
