"""Text in, text out: prompts through the chat template, the engine and the tokenizer."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fastjax.data import Encoder
from fastjax.data.settings import SpecialTokens
from fastjax.errors import ConfigError
from fastjax.execution.language_model import LanguageModel
from fastjax.generation.answers import READ, Answer, GrowingAnswer, grown
from fastjax.generation.engines import AnyEngine
from fastjax.generation.generate import engine_for, seeded
from fastjax.generation.options import GenerationOptions
from fastjax.generation.prompts import Prompt, Reading, encode_prompts
from fastjax.generation.stops import stop_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def answer(
    model: LanguageModel,
    prompts: Sequence[Prompt],
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
        prompts: user messages, one conversation each, or conversations as lists of messages, or token ids; with
            `chat=False` beginnings of texts.
        chat: put the prompt through the chat template, exactly as training does.
        special_tokens: the reading of special tokens in prompts; see `Encoder`.
        chat_template_kwargs: variables of the chat template, as `enable_thinking`; see `Encoder`.
        max_new_tokens: longest answer, in tokens.
        temperature: 0 takes the likeliest token.
        top_k: sample among the k likeliest tokens.
        top_p: sample among the likeliest tokens of this total probability.
        seed: of the sampling; each prompt draws its own numbers.

    Returns:
        The answers, without special tokens, in the order of the prompts.

    Raises:
        ConfigError: a model without tokenizer, a tokenizer without chat template, prompts that are none, a setting out
            of range, a prompt too long for `max_seq_length`.
        DataError: a prompt that the chat template refuses, or invalid Unicode.
    """
    if model.tokenizer is None:
        raise ConfigError("answer: expected a model with a tokenizer, got one without; load it from a folder")
    sampling = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
    options = GenerationOptions(max_new_tokens=max_new_tokens, **sampling)
    reading = Reading(chat, special_tokens, chat_template_kwargs)
    return [one.text for [one] in answers(model, prompts, options, reading=reading)]


def answers(
    model: LanguageModel,
    prompts: Sequence[Prompt],
    options: GenerationOptions | None = None,
    *,
    reading: Reading | None = None,
    ignore_eos: bool = False,
) -> list[list[Answer]]:
    """Let the model answer, and tell tokens and log-probabilities too.

    All prompts wait for one engine, which takes them in as there is room. They are checked before the first token.

    Args:
        model: with or without a tokenizer; without one prompts are token ids and answers have no text.
        prompts: texts, conversations or token ids, as of `answer`.
        options: of the answers; each prompt draws its own random numbers.
        reading: how texts become tokens.
        ignore_eos: answers do not end at the model's end tokens, but only at the `stop_tokens` of the options.

    Returns:
        `options.n` answers of each prompt.

    Raises:
        ConfigError: a prompt or a setting that does not fit, as of `answer`; stop strings without a tokenizer.
        DataError: a prompt that the chat template refuses, or invalid Unicode.
    """
    options, reading = options or GenerationOptions(), reading or Reading()
    encoder = reading.encoder(model.tokenizer)
    encoded = encode_prompts(encoder, prompts, reading)
    if not encoded:
        return []
    options = options if ignore_eos else with_ends(model, encoder, options)
    engine, asked = ask(model, encoded, options, model.tokenizer)
    for _ in grown(engine, asked):
        pass
    return [[one.answer() for one in choices] for choices in asked.values()]


def stream(
    model: LanguageModel,
    prompt: Prompt,
    options: GenerationOptions | None = None,
    *,
    reading: Reading | None = None,
    ignore_eos: bool = False,
    length: Callable[[int], int] | None = None,
) -> Iterator[str]:
    """Let the model answer one prompt, and give the text as it comes.

    Args:
        model: with a tokenizer.
        prompt: a text, a conversation or token ids, as of `answer`.
        options: of the answer; `n` is 1.
        reading: how texts become tokens.
        ignore_eos: as of `answers`.
        length: as of `ask`.

    Returns:
        Pieces of the text, none empty: joined they are the answer. Closing the iterator ends the generation.

    Raises:
        ConfigError: at once, as of `answers`; a model without tokenizer; `n` above 1.
        DataError: a prompt that the chat template refuses, or invalid Unicode.
    """
    options, reading = options or GenerationOptions(), reading or Reading()
    if model.tokenizer is None:
        raise ConfigError("stream: expected a model with a tokenizer, got one without; load it from a folder")
    if options.n != 1:
        raise ConfigError(f"n: expected 1 answer to stream, got {options.n}; use answers(…) for several")
    encoder = reading.encoder(model.tokenizer)
    encoded = encode_prompts(encoder, [prompt], reading)
    options = options if ignore_eos else with_ends(model, encoder, options)
    engine, asked = ask(model, encoded, options, model.tokenizer, length)
    return _pieces(engine, asked)


def _pieces(engine: AnyEngine, asked: dict[int, list[GrowingAnswer]]) -> Iterator[str]:
    with contextlib.closing(grown(engine, asked, READ)) as growing:
        for _, text in growing:
            if text:
                yield text


def with_ends(model: LanguageModel, encoder: Encoder | None, options: GenerationOptions) -> GenerationOptions:
    """Options whose answers end at the model's end tokens too.

    Args:
        model: the model.
        encoder: of its tokenizer; None: it has none.
        options: the options.
    """
    ends = dict.fromkeys([*stop_tokens(model, encoder), *options.stop_tokens])
    return dataclasses.replace(options, stop_tokens=tuple(ends))


def ask(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    options: GenerationOptions,
    tokenizer: "PreTrainedTokenizerBase | None",
    length: Callable[[int], int] | None = None,
) -> tuple[AnyEngine, dict[int, list[GrowingAnswer]]]:
    """Ask a new engine for answers; `grown` generates them.

    Args:
        model: the model.
        prompts: token ids, at least one prompt.
        options: of the answers.
        tokenizer: of the answers' text; None: they have none.
        length: the most new tokens of a prompt of so many tokens, in place of the options'.

    Returns:
        The engine, and number of the request → its answers, in the order of the prompts.

    Raises:
        ConfigError: a prompt or a setting that does not fit the model; stop strings without a tokenizer.
    """
    if tokenizer is None and options.stop_strings:
        raise ConfigError("stop_strings: expected a model with a tokenizer, got one without; load it from a folder")
    each = [
        options if length is None else dataclasses.replace(options, max_new_tokens=length(len(prompt)))
        for prompt in prompts
    ]
    longest = max(each, key=lambda one: one.max_new_tokens)
    engine = engine_for(model, [len(prompt) for prompt in prompts], longest)
    asked = {}
    for place, (prompt, own) in enumerate(zip(prompts, each, strict=True)):
        growing = [GrowingAnswer(prompt, tokenizer, options.stop_strings) for _ in range(options.n)]
        asked[engine.add(prompt, seeded(own, place))] = growing
    return engine, asked
