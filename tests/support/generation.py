"""Answers in token ids; and log-probabilities of a row by one forward pass, the oracle of what an engine generates."""

import jax
import numpy as np

from fastjax.generation import text
from fastjax.generation.options import GenerationOptions
from tests.support import tiny


def whole_logits(model, prompt, answer, width=128):
    """Logits [answer, vocabulary], by one forward pass, of what stands in the place of each token of the answer."""
    padded, count = np.zeros((1, width), np.int32), len(prompt) + len(answer)
    padded[0, :count] = [*prompt, *answer]
    logits = tiny.logits(model, padded, segment_ids=(np.arange(width)[None] < count).astype(np.int32))
    return logits[0, len(prompt) - 1 : count - 1]


def whole_passes(model, prompt, answer, width=128):
    """Log-probabilities [answer, vocabulary], as of `whole_logits`."""
    return jax.nn.log_softmax(whole_logits(model, prompt, answer, width), axis=-1)


def answers_in_ids(model, prompts, **options):
    """The tokens of an answer to each prompt of token ids, by default of the likeliest ones and up to the limit."""
    plain = model.replace(tokenizer=None)
    found = text.answers(plain, prompts, GenerationOptions(**options), ignore_eos=True)
    return [list(one.token_ids) for [one] in found]
