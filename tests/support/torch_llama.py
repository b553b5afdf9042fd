"""transformers' Llama with the weights of `tiny.arrays`, and its training step in torch.

Import only after `pytest.importorskip("torch")`.
"""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

torch.set_num_threads(1)

#: PEFT's warnings in cases that the tests try on purpose.
NOTES_OF_PEFT = [
    pytest.mark.filterwarnings(f"ignore:{text}")
    for text in (
        "`is_gradient_checkpointing` is deprecated:FutureWarning",
        "Model has `tie_word_embeddings=True`:UserWarning",
        "Model with `tie_word_embeddings=True`:UserWarning",
        "Setting `save_embedding_layers` to `True`:UserWarning",
    )
]


def build(config, arrays):
    """LlamaForCausalLM in float32 and evaluation mode, with eager attention (it takes any mask)."""
    settings = LlamaConfig(**config, attn_implementation="eager")
    model = LlamaForCausalLM(settings).float()
    left = model.load_state_dict({name: torch.from_numpy(array.copy()) for name, array in arrays.items()}, strict=False)
    tied = ["lm_head.weight"] if config["tie_word_embeddings"] else []
    assert left.unexpected_keys == [] and left.missing_keys in ([], tied), left
    model.tie_weights()
    return model.eval()


def logits(model, tokens, positions=None, segment_ids=None):
    """Logits [B, S, V] as numpy; positions and segments as ours take them."""
    with torch.no_grad():
        return forward(model, tokens, positions, segment_ids).numpy()


def forward(model, tokens, positions=None, segment_ids=None):
    tokens = torch.from_numpy(np.array(tokens)).long()
    if segment_ids is None:
        segment_ids = np.ones(tokens.shape, np.int32)
    if positions is None:
        positions = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
    segment_ids, positions = torch.from_numpy(np.array(segment_ids)), torch.from_numpy(np.array(positions)).long()
    visible = torch.tril(segment_ids[:, :, None] == segment_ids[:, None, :])
    mask = torch.where(visible, 0.0, torch.finfo(torch.float32).min)[:, None]
    return model(tokens, attention_mask=mask, position_ids=positions, use_cache=False).logits


def backward(model, batch, each=lambda number: None):
    """Accumulate the gradients of a batch [A, B, S]; its mean loss over target tokens.

    Args:
        model: In training mode.
        batch: As our step takes it.
        each: Called with a microbatch's number before its forward pass.
    """
    total, targets = 0.0, int((np.asarray(batch.targets) != -100).sum())
    for number, (tokens, labels, segments, positions) in enumerate(zip(*batch[:4], strict=True)):
        each(number)
        out = forward(model, tokens, positions, segments)
        labels = torch.from_numpy(np.array(labels)).long()
        loss = F.cross_entropy(out.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum") / targets
        loss.backward()
        total += loss.item()
    return total


def set_lora_dropout(model, make):
    """Replace every adapter's dropout by `make(module name)`."""
    for name, module in model.named_modules():
        if hasattr(module, "lora_dropout") and "default" in module.lora_dropout:
            module.lora_dropout["default"] = make(name)
