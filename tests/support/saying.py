"""A model that says what it is told to: one-hot embeddings and a head that maps each token to the one behind it."""

import functools
import tempfile
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from fastjax.generation import engine as engine_module
from fastjax.generation import text
from fastjax.generation.engine import Engine
from tests.support import tiny
from tests.support import tokenizers as made

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
END = made.SPECIAL.index("<|im_end|>")
_WORDS = 320


@functools.cache
def _base():
    changes = {"attention_bias": False, "mlp_bias": False, "num_hidden_layers": 1, "tie_word_embeddings": False}
    config = tiny.config(vocab_size=_WORDS, hidden_size=_WORDS, max_position_embeddings=512, **changes)
    tensors = tiny.arrays(config)
    tensors["model.embed_tokens.weight"] = np.eye(_WORDS, dtype=np.float32)
    for name in ("layers.0.self_attn.o_proj", "layers.0.mlp.down_proj"):
        tensors[f"model.{name}.weight"] *= 0
    tensors["model.norm.weight"][:] = 1
    folder = tiny.write_folder(Path(tempfile.mkdtemp()), config, tensors)
    return tiny.model(folder, config, max_seq_length=512).value


def model(after, otherwise=END, *, folder=None, template=TEMPLATE, tokenizer=True):
    """A model whose likeliest next token follows from the last one.

    Args:
        after: token → the next one.
        otherwise: the next one of all others.
        folder: of the model.
        template: of its tokenizer's chats.
        tokenizer: whether it has one.
    """
    head = np.zeros((_WORDS, _WORDS), np.float32)
    head[[after.get(token, otherwise) for token in range(_WORDS)], np.arange(_WORDS)] = 2
    own = made.byte_level() if tokenizer else None
    if own is not None:
        own.chat_template, own.pad_token = template, "[INST]"
    frozen = {**_base().frozen, "lm_head": {"weight": jnp.asarray(head)}}
    return _base().replace(frozen=frozen, tokenizer=own, folder=folder, hf_config={})


def chain(*sentences):
    """The map in which the tokens of each list follow each other, and the last one ends the turn."""
    links = [pair for tokens in sentences for pair in zip(tokens, [*tokens[1:], END], strict=True)]
    assert len(dict(links)) == len({*links}), "a token is followed by two"
    return dict(links)


class Watched(Engine):
    """An engine that keeps what it is asked.

    Attributes:
        asked: (prompt, options) of each request.
        cancelled: (request, choice) that were cancelled.
    """

    def __init__(self, model, steps):
        super().__init__(model, rows=8, tokens=2048, steps=steps)
        self.asked, self.cancelled = [], []

    def add(self, prompt, options=None, *, adapter=None):
        number = super().add(prompt, options, adapter=adapter)
        self.asked.append((list(prompt), options))
        return number

    def cancel(self, request, choice=None):
        self.cancelled.append((request, choice))
        super().cancel(request, choice)


def watch(monkeypatch, steps=3):
    """Let every engine be one that keeps what it is asked; returns the list of those that are made."""
    engines = []

    def engine_for(model, lengths, new_tokens, adapters):
        engines.append(Watched(model, steps))
        return engines[-1]

    monkeypatch.setattr(text, "engine_for", engine_for)
    monkeypatch.setattr(engine_module, "LEAST", 512)  # one program for all prompts, and one for all rows
    monkeypatch.setattr(engine_module, "WIDTHS", (8,))
    return engines
