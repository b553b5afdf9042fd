"""The way from the qkv projection with LoRA adapters to attention."""

from pallas_kernels.rope.lora.api import rope_lora_backward, rope_lora_forward
from pallas_kernels.rope.lora.implementations import REGISTRY, Case

__all__ = ["REGISTRY", "Case", "rope_lora_backward", "rope_lora_forward"]
