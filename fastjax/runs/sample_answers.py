"""Answers of a trained model to held-out prompts, for people to read beside the figures."""

from typing import TYPE_CHECKING, cast

import numpy as np

from fastjax.data.documents import IGNORE
from fastjax.data.packing import PackedRows
from fastjax.generation.options import GenerationOptions
from fastjax.generation.text import answers
from fastjax.language_model import LanguageModel

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

#: Tokens of a document that is learnt from its beginning that are its prompt, and the most of an answer.
_BEGINNING, _LONGEST = 16, 256


def sample_answers(model: LanguageModel, rows: PackedRows, count: int) -> list[dict[str, str]]:
    """Let a model answer the first held-out prompts, greedily.

    The prompt is what of an example is not learnt, up to its first learnt token; of one that is all learnt, the first
    tokens.

    Args:
        model: with a tokenizer.
        rows: held-out examples; those that are not learnt, or whose prompt leaves no room for an answer, are passed by.
        count: of the answers; there may be fewer examples.

    Returns:
        Texts: "prompt" with its special tokens, "expected", and "answer".
    """
    tokenizer = cast("PreTrainedTokenizerFast", model.tokenizer)
    prompts, expected = [], []
    for first, last in zip(rows.documents.offsets[:-1], rows.documents.offsets[1:], strict=True):
        tokens, targets = rows.documents.tokens[first:last], rows.documents.targets[first:last]
        learnt = np.flatnonzero(targets != IGNORE)
        if not len(learnt):
            continue
        start = int(learnt[0]) or min(_BEGINNING, len(tokens)) - 1
        behind = np.flatnonzero(targets[start:] == IGNORE)
        answer = targets[start:][: behind[0] if len(behind) else None]
        if len(answer) and start + 1 < model.max_seq_length:
            prompts.append(tokens[: start + 1].tolist())
            expected.append(answer.tolist())
        if len(prompts) == count:
            break
    if not prompts:
        return []
    rooms = [model.max_seq_length - len(prompt) for prompt in prompts]
    options = [GenerationOptions(max_new_tokens=min(_LONGEST, room)) for room in rooms]
    return [
        {
            "prompt": str(tokenizer.decode(prompt)),
            "expected": str(tokenizer.decode(right, skip_special_tokens=True)),
            "answer": one.text,
        }
        for prompt, right, [one] in zip(prompts, expected, answers(model, prompts, options), strict=True)
    ]
