"""Root mean square normalisation before projections with LoRA adapters."""

from pallas_kernels.rms_norm.lora.api import Gradients, Normed, rms_norm_lora_backward
from pallas_kernels.rms_norm.lora.implementations import REGISTRY

__all__ = ["REGISTRY", "Gradients", "Normed", "rms_norm_lora_backward"]
