"""transformers' model of any family with the weights of `tiny.arrays`, each document by itself in a row of its own.

Import only after `pytest.importorskip("torch")`.
"""

import copy

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from convert.families import family_for

torch.set_num_threads(1)


def build(config, arrays):
    """The model in float32 and evaluation mode, with eager attention."""
    family = family_for(config)
    fields = {name: value for name, value in copy.deepcopy(config).items() if name != "model_type"}  # it changes them
    settings = AutoConfig.for_model(config["model_type"], **fields)
    kind = AutoModelForCausalLM if family.section is None else AutoModelForImageTextToText
    model = kind.from_config(settings, attn_implementation="eager", dtype=torch.float32)
    tensors = {}
    for name, array in in_memory(family, config, arrays).items():
        start = next((start for start in family.modules if name.startswith(start)), "")
        tensors[family.modules.get(start, "") + name.removeprefix(start)] = torch.from_numpy(array)
    left = model.load_state_dict(tensors, strict=False)
    missing = [name for name in left.missing_keys if not any(part in name for part in ("vision_tower", "multi_modal"))]
    tied = ["lm_head.weight"] if family.text_config(config)["tie_word_embeddings"] else []
    assert left.unexpected_keys == [] and missing in ([], tied), left
    model.tie_weights()
    return model.eval()


def in_memory(family, config, arrays):
    """A checkpoint's arrays by name, with experts as transformers holds them."""
    weights = {}
    for tensor in family.tensors(config).values():
        for spec in tensor.weights:
            weights.setdefault(spec.path, []).append(tensor.share(spec, arrays[tensor.name]))
    whole = {path: np.stack(shares) if len(shares) > 1 else shares[0] for path, shares in weights.items()}
    found = family.in_memory.tensors(config).values()
    return {tensor.name: np.array(tensor.join([whole[spec.path] for spec in tensor.weights])) for tensor in found}


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
