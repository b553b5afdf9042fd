"""Text in, text out: prompts through the chat template, the model and the tokenizer."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from fastjax.data import DataOptions, Encoder
from fastjax.data.cells import describe
from fastjax.data.columns import parse_messages
from fastjax.data.records import Message
from fastjax.data.settings import SpecialTokens
from fastjax.errors import ConfigError, DataError
from fastjax.execution.language_model import LanguageModel
from fastjax.generation.generate import generate
from fastjax.generation.stops import stop_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def answer(
    model: LanguageModel,
    prompts: Sequence[str | Sequence[Message]],
    *,
    chat: bool = True,
    special_tokens: SpecialTokens = "control",
    chat_template_kwargs: Mapping[str, Any] | None = None,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
) -> list[str]:
    """Let the model answer.

    Args:
        model: with a tokenizer.
        prompts: user messages, one conversation each, or conversations as lists of messages; with `chat=False`
            beginnings of texts.
        chat: put the prompt through the chat template, exactly as training does.
        special_tokens: the reading of special tokens in prompts; see `Encoder`.
        chat_template_kwargs: variables of the chat template, as `enable_thinking`; see `Encoder`.
        max_new_tokens: longest answer, in tokens.
        temperature: 0 takes the likeliest token.
        top_k: sample among the k likeliest tokens.
        top_p: sample among the likeliest tokens of this total probability.
        seed: of the sampling.

    Returns:
        The answers, without special tokens, in the order of the prompts.

    Raises:
        ConfigError: a model without tokenizer, a tokenizer without chat template, prompts that are neither texts nor
            conversations, a setting out of range.
        DataError: a prompt that the chat template refuses, or invalid Unicode.
    """
    if model.tokenizer is None:
        raise ConfigError("answer: expected a model with a tokenizer, got one without; load it from a folder")
    tokenizer = cast("PreTrainedTokenizerFast", model.tokenizer)
    variables = dict(chat_template_kwargs or {})
    encoder = Encoder(tokenizer, DataOptions(special_tokens=special_tokens, chat_template_kwargs=variables))
    encoded = encode_prompts(encoder, prompts, chat=chat)
    stops = stop_tokens(model, encoder)
    options = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed, "stop_tokens": stops}
    answers = generate(model, encoded, max_new_tokens=max_new_tokens, **options)
    return [str(tokenizer.decode(tokens, skip_special_tokens=True)) for tokens in answers]


def encode_prompts(encoder: Encoder, prompts: Sequence[str | Sequence[Message]], *, chat: bool) -> list[list[int]]:
    """The prompts' tokens; see `answer`.

    Args:
        encoder: of the model's tokenizer.
        prompts: texts or conversations.
        chat: put them through the chat template.

    Returns:
        The token ids of each.

    Raises:
        ConfigError: a prompt that is neither text nor conversation.
        DataError: a prompt that the chat template refuses, or invalid Unicode.
    """
    if isinstance(prompts, str):
        raise ConfigError(
            f"prompts: expected a list of texts or conversations, got a text alone; write [{describe(prompts)}]"
        )
    encoded = []
    for index, prompt in enumerate(prompts):
        place = f"prompts[{index}]"
        if isinstance(prompt, dict):
            raise ConfigError(
                f"{place}: expected a text or a list of messages, got one message; write [[message, …]] for one "
                "conversation"
            )
        if not isinstance(prompt, str | list | tuple):
            raise ConfigError(f"{place}: expected a text or a list of messages, got {describe(prompt)}")
        if isinstance(prompt, str):
            question = [{"role": "user", "content": prompt}]
            encoded.append(encoder.encode_prompt(question) if chat else encoder.encode_beginning(prompt))
        elif chat:
            encoded.append(encoder.encode_prompt(_conversation(prompt, place)))
        else:
            raise ConfigError(f"{place}: expected a text, got a conversation; leave chat at True")
    return encoded


def _conversation(prompt: Sequence[Message], place: str) -> list[Message]:
    try:
        return parse_messages(list(prompt), place)
    except DataError as error:
        raise ConfigError(str(error)) from error
