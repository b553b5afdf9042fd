"""Root mean square normalisation before projections with LoRA adapters."""

from pallas_kernels.rms_norm.lora.api import Gradients, Normed, rms_norm_lora_backward, rms_norm_lora_round
from pallas_kernels.rms_norm.lora.implementations import REGISTRY, ROUND

__all__ = ["REGISTRY", "ROUND", "Gradients", "Normed", "rms_norm_lora_backward", "rms_norm_lora_round"]
