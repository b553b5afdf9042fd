"""The way from the qkv projection with LoRA adapters to attention."""

from pallas_kernels.split_rope.lora.api import (
    REGISTRY,
    Gradients,
    split_rope_lora_backward,
    split_rope_lora_forward,
)

__all__ = ["REGISTRY", "Gradients", "split_rope_lora_backward", "split_rope_lora_forward"]
