"""The way from the qkv projection with LoRA adapters to attention."""

from pallas_kernels.split_rope.lora.api import Gradients, split_rope_lora_backward, split_rope_lora_forward
from pallas_kernels.split_rope.lora.implementations import REGISTRY, Case

__all__ = ["REGISTRY", "Case", "Gradients", "split_rope_lora_backward", "split_rope_lora_forward"]
