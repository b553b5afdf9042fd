"""Prompts as token ids: texts and conversations through the chat template, beginnings of texts, ids as they are."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np

from fastjax.data import DataOptions, Encoder
from fastjax.data.cells import describe
from fastjax.data.columns import parse_messages
from fastjax.data.records import Message
from fastjax.data.settings import SpecialTokens
from fastjax.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Prompt: TypeAlias = str | Sequence[Message] | Sequence[int] | np.ndarray | Any
"""A user's message or, with `chat=False`, the beginning of a text; a conversation; token ids [S] as a list or array."""


@dataclasses.dataclass(frozen=True)
class Reading:
    """How prompts are read.

    Attributes:
        chat: texts are a user's messages, and go through the chat template as in training; False: they are beginnings
            of texts.
        special_tokens: the reading of special tokens in prompts; see `Encoder`.
        chat_template_kwargs: variables of the chat template, as `enable_thinking`; see `Encoder`.
        continue_final_message: a conversation's last message is the beginning of the answer, or of its reasoning where
            the message has no content.
    """

    chat: bool = True
    special_tokens: SpecialTokens = "control"
    chat_template_kwargs: Mapping[str, Any] | None = None
    continue_final_message: bool = False

    def encoder(self, tokenizer: "PreTrainedTokenizerBase | None") -> Encoder | None:
        """The encoder of a tokenizer; None without one.

        Args:
            tokenizer: with a Rust backend.

        Raises:
            ConfigError: a tokenizer that cannot encode prompts.
        """
        if tokenizer is None:
            return None
        variables = self.chat_template_kwargs or {}
        if not isinstance(variables, Mapping):
            raise ConfigError(
                f"chat_template_kwargs: expected a mapping, as {{'enable_thinking': False}}, got {describe(variables)}"
            )
        variables = dict(variables)
        return Encoder(
            cast(Any, tokenizer), DataOptions(special_tokens=self.special_tokens, chat_template_kwargs=variables)
        )


def encode_prompts(encoder: Encoder | None, prompts: Sequence[Prompt], reading: Reading) -> list[Sequence[int]]:
    """The prompts' tokens.

    Args:
        encoder: of the model's tokenizer; None: prompts are token ids.
        prompts: see `Prompt`.
        reading: how texts become tokens.

    Returns:
        The token ids of each.

    Raises:
        ConfigError: a prompt that is none, or a text without a tokenizer.
        DataError: a prompt that the chat template refuses, or invalid Unicode.
    """
    if isinstance(prompts, str):
        raise ConfigError(
            f"prompts: expected a list of texts or conversations, got a text alone; write [{describe(prompts)}]"
        )
    return [_encoded(encoder, prompt, f"prompts[{index}]", reading) for index, prompt in enumerate(prompts)]


def _encoded(encoder: Encoder | None, prompt: Prompt, place: str, reading: Reading) -> Sequence[int]:
    if isinstance(prompt, Mapping):
        raise ConfigError(
            f"{place}: expected a text or a list of messages, got one message; write [[message, …]] for one "
            "conversation"
        )
    ids = token_ids(prompt)
    if ids is not None:
        return ids
    if not isinstance(prompt, str | list | tuple):
        raise ConfigError(f"{place}: expected a text, a list of messages or token ids, got {describe(prompt)}")
    if encoder is None:
        raise ConfigError(f"{place}: expected token ids for a model without a tokenizer, got {describe(prompt)}")
    if isinstance(prompt, str):
        if not reading.chat:
            return encoder.encode_beginning(prompt)
        question = [{"role": "user", "content": prompt}]
        return encoder.encode_prompt(question, continue_final_message=reading.continue_final_message)
    if not reading.chat:
        raise ConfigError(f"{place}: expected a text, got a conversation; leave chat at True")
    try:
        messages = parse_messages(list(prompt), place)
    except DataError as error:
        raise ConfigError(str(error)) from error
    return encoder.encode_prompt(messages, continue_final_message=reading.continue_final_message)


def token_ids(prompt: Any) -> Sequence[int] | None:
    """A prompt's token ids, if it is a list or an array [S] of whole numbers; else None.

    Args:
        prompt: any value; ids of Python, NumPy, JAX or PyTorch.
    """
    if isinstance(prompt, list | tuple):
        plain = bool(prompt) and not isinstance(prompt[0], str | Mapping)
        return prompt if plain and not isinstance(prompt[0], list | tuple) else None
    if getattr(prompt, "ndim", None) != 1 or not hasattr(prompt, "tolist"):
        return None
    return prompt.tolist()
