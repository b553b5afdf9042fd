"""Model FLOPs of a train step: the multiplications and additions that the mathematics asks for, recomputation not."""

from fastjax.models.config import ModelConfig


def matrix_parameters(config: ModelConfig) -> int:
    """Elements of the matrices that every token is multiplied by: the layers' and the head's."""
    width, head = config.hidden_size, config.head_dim
    attention = width * head * (2 * config.num_attention_heads + 2 * config.num_key_value_heads)
    layer = attention + 3 * width * config.intermediate_size
    return config.num_hidden_layers * layer + width * config.vocab_size


def step_flops(
    config: ModelConfig, *, tokens: int, document_length: int, adapter_parameters: int, frozen: bool = True
) -> float:
    """FLOPs of one step.

    A matrix element costs two a token forward, two for the gradient of its input, and two for its own gradient when
    it is trained. Attention costs 2·S·H·D a token and layer forward (two products over the causal half of S keys) and
    twice that backward.

    Args:
        config: the model.
        tokens: tokens of the step.
        document_length: S, the length of a document: attention does not reach beyond it.
        adapter_parameters: trained elements of LoRA's A and B.
        frozen: whether the model's own matrices are; with False every one has a gradient.
    """
    products = (4 if frozen else 6) * matrix_parameters(config) + 6 * adapter_parameters
    attention = 6 * document_length * config.num_attention_heads * config.head_dim * config.num_hidden_layers
    return float(tokens) * (products + attention)
