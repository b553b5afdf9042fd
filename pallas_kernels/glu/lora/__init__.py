"""A gated linear unit between projections with LoRA adapters."""

from pallas_kernels.glu.lora.api import REGISTRY, Gradients, Inner, glu_lora_backward, glu_lora_forward

__all__ = ["REGISTRY", "Gradients", "Inner", "glu_lora_backward", "glu_lora_forward"]
