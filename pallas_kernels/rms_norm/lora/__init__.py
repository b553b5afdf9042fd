"""Root mean square normalisation before projections with LoRA adapters."""

from pallas_kernels.rms_norm.lora.api import (
    REGISTRY,
    ROUND,
    Gradients,
    Normed,
    rms_norm_lora_backward,
    rms_norm_lora_round,
)

__all__ = ["REGISTRY", "ROUND", "Gradients", "Normed", "rms_norm_lora_backward", "rms_norm_lora_round"]
