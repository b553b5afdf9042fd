"""Fast, lean fine-tuning of language models on NVIDIA GPUs in JAX."""
