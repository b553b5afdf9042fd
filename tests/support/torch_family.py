"""transformers' model of any family with the weights of `tiny.arrays`, each document by itself in a row of its own.

Import only after `pytest.importorskip("torch")`.
"""

import copy

import numpy as np
import torch
import torch.nn.functional as F
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Mistral4Config,
    Mistral4ForCausalLM,
)

from convert.families import family_for
from convert.model.spec import WHOLE
from convert.model.tensors import tensors_of

torch.set_num_threads(1)
AutoModelForCausalLM.register(
    Mistral4Config, Mistral4ForCausalLM, exist_ok=True
)  # a text model inside others alone there
#: Parts that no model here computes.
ABSENT = "vision_", "multi_modal", "visual", "indexer"


def build(config, arrays):
    """The model in float32 and evaluation mode, with eager attention."""
    family = family_for(config)
    fields = {name: value for name, value in copy.deepcopy(config).items() if name != "model_type"}  # it changes them
    settings = AutoConfig.for_model(config["model_type"], **fields)
    kind = AutoModelForCausalLM if family.section is None else AutoModelForImageTextToText
    model = kind.from_config(settings, attn_implementation="eager", dtype=torch.float32)
    tensors = {name: torch.from_numpy(array.copy()) for name, array in in_memory(family, config, arrays)}
    for name in [name for name in tensors if name.endswith(".q_conv1d.weight")]:  # one there
        parts = [tensors.pop(name.replace(".q_", f".{part}_")) for part in "qkv"]
        tensors[name.replace(".q_conv1d", ".conv1d")] = torch.cat(parts)
    left = model.load_state_dict(tensors, strict=False)
    missing = [name for name in left.missing_keys if not any(part in name for part in ABSENT)]
    tied = ["lm_head.weight"] if family.text_config(config)["tie_word_embeddings"] else []
    assert left.unexpected_keys == [] and missing in ([], tied), left
    model.tie_weights()
    return model.eval()


def in_memory(family, config, arrays):
    """Names and arrays as the model holds them: all experts of a mixture together."""
    weights = {}
    for tensor in tensors_of(family.specs(config)).values():
        for spec in tensor.weights:
            share = tensor.share(spec, arrays[tensor.name])
            weights.setdefault(spec.path, []).append(share)
    for tensor in tensors_of(family.in_memory.specs(config)).values():
        if tensor.layout == WHOLE and family.mixture is None:
            path = tensor.weights[0].path
            leaf = f".{path.leaf}" if tensor.name.endswith(f".{path.leaf}") else ""
            yield f"{family.module_name(path.module)}{leaf}", arrays[tensor.name]
        elif tensor.layout == WHOLE:
            yield tensor.name, weights[tensor.weights[0].path][0]
        else:
            shares = [weights[spec.path] for spec in tensor.weights]
            yield tensor.name, tensor.join([np.stack(own) if len(own) > 1 else own[0] for own in shares])


def logits(model, document):
    """Logits [S, V] of one document, float32 numpy."""
    with torch.no_grad():
        return model(torch.from_numpy(np.array(document)).long()[None], use_cache=False).logits[0].float().numpy()


def backward(model, batch):
    """Accumulate the gradients of a batch [A, B, S]; its mean loss over target tokens."""
    total, counted = 0.0, int((np.asarray(batch.targets) != -100).sum())
    for tokens, targets, segments in zip(batch.tokens, batch.targets, batch.segment_ids, strict=True):
        for row, labels, ids in zip(tokens, targets, segments, strict=True):
            for number in range(1, int(ids.max()) + 1):
                inside = torch.from_numpy(ids == number)
                out = model(torch.from_numpy(row).long()[inside][None], use_cache=False).logits[0]
                wanted = torch.from_numpy(labels).long()[inside]
                loss = F.cross_entropy(out, wanted, ignore_index=-100, reduction="sum") / counted
                loss.backward()
                total += loss.item()
    return total
