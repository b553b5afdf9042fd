"""A gated linear unit between projections with LoRA adapters."""

from pallas_kernels.glu.lora.api import Gradients, Inner, glu_lora_backward, glu_lora_forward
from pallas_kernels.glu.lora.implementations import REGISTRY, Case

__all__ = ["REGISTRY", "Case", "Gradients", "Inner", "glu_lora_backward", "glu_lora_forward"]
