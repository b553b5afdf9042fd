"""Text in, text out: prompts through the chat template, the engine and the tokenizer."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from convert.errors import shown
from fastjax.data.settings import SpecialTokens
from fastjax.errors import ConfigError
from fastjax.execution.language_model import LanguageModel
from fastjax.generation.answers import Answer, GrowingAnswer, grown
from fastjax.generation.engines import AnyEngine
from fastjax.generation.fitting import engine_for
from fastjax.generation.options import GenerationOptions
from fastjax.generation.prompts import Prompt, Reading, encode_prompts
from fastjax.generation.stops import stop_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


#: Who answers in a model's place: a model with an adapter over it, or one, or none, for each prompt.
Adapter: TypeAlias = LanguageModel | Sequence[LanguageModel | None] | None


def answer(
    model: LanguageModel,
    prompts: Sequence[Prompt],
    *,
    chat: bool = True,
    special_tokens: SpecialTokens = "control",
    chat_template_kwargs: Mapping[str, Any] | None = None,
    **options: Any,
) -> list[str]:
    """Let the model answer.

    Args:
        model: with a tokenizer.
        prompts: user messages, one conversation each, or conversations as lists of messages, or token ids; with
            `chat=False` beginnings of texts.
        chat: put the prompt through the chat template, exactly as training does.
        special_tokens: the reading of special tokens in prompts; see `Encoder`.
        chat_template_kwargs: variables of the chat template, as `enable_thinking`; see `Encoder`.
        options: fields of `GenerationOptions`, by name; `n` is 1.

    Returns:
        The answers, without special tokens, in the order of the prompts.

    Raises:
        ConfigError: a model without tokenizer, a tokenizer without chat template, prompts that are none, a setting out
            of range, a prompt too long for `max_seq_length`.
        DataError: a prompt that the chat template refuses, or invalid Unicode.
    """
    if model.tokenizer is None:
        raise ConfigError("answer: expected a model with a tokenizer, got one without; load it from a folder")
    reading = Reading(chat, special_tokens, chat_template_kwargs)
    return [one.text for [one] in answers(model, prompts, GenerationOptions(**options), reading=reading)]


def answers(
    model: LanguageModel,
    prompts: Sequence[Prompt],
    options: GenerationOptions | Sequence[GenerationOptions] | None = None,
    *,
    reading: Reading | None = None,
    ignore_eos: bool = False,
    adapter: Adapter = None,
) -> list[list[Answer]]:
    """Let the model answer, and tell tokens and log-probabilities too.

    Args:
        model: with or without a tokenizer, as `answers_as_completed` takes it.
        prompts: texts, conversations or token ids.
        options: of the answers, for all prompts or for each.
        reading: how texts become tokens.
        ignore_eos: answers do not end at the model's end tokens.
        adapter: as of `answers_as_completed`.

    Returns:
        The `n` answers of each prompt, in the order of the prompts.

    Raises:
        ConfigError: a prompt or a setting that does not fit.
        DataError: a prompt that the chat template refuses, or invalid Unicode.
    """
    given = {"reading": reading, "ignore_eos": ignore_eos, "adapter": adapter}
    found = dict(answers_as_completed(model, prompts, options, **given))
    return [found[place] for place in range(len(found))]


def answers_as_completed(
    model: LanguageModel,
    prompts: Sequence[Prompt],
    options: GenerationOptions | Sequence[GenerationOptions] | None = None,
    *,
    reading: Reading | None = None,
    ignore_eos: bool = False,
    adapter: Adapter = None,
    progress: Callable[[int, int], None] = lambda ended, tokens: None,
) -> Iterator[tuple[int, list[Answer]]]:
    """Let the model answer, and give the answers of each prompt as soon as they have ended.

    All prompts wait for one engine, which takes them in as there is room. They are checked before the first token.

    Args:
        model: with or without a tokenizer; without one prompts are token ids and answers have no text.
        prompts: texts, conversations or token ids, as of `answer`.
        options: of the answers, for all prompts or for each; each prompt draws its own random numbers.
        reading: how texts become tokens.
        ignore_eos: answers do not end at the model's end tokens, but only at the `stop_tokens` of the options.
        adapter: a model with a low-rank adapter over `model`, which answers in its place; or one for each prompt, all
            in one batch. None: what `model` is by itself.
        progress: told how many answers have ended, and how many tokens have come, whenever there are more.

    Returns:
        Number of the prompt, and its `n` answers. Closing the iterator ends the generation.

    Raises:
        ConfigError: at once, a prompt or a setting that does not fit, as of `answer`; options for another number of
            prompts; stop strings without a tokenizer; an adapter that is none, or over another model.
        DataError: at once, a prompt that the chat template refuses, or invalid Unicode.
    """
    engine, asked = _asked(model, prompts, options, reading or Reading(), ignore_eos, adapter)
    return iter(()) if engine is None else _completed(engine, asked, progress)


def _completed(
    engine: AnyEngine, asked: Mapping[int, Sequence[GrowingAnswer]], progress: Callable[[int, int], None]
) -> Iterator[tuple[int, list[Answer]]]:
    places = {id(one): place for place, choices in enumerate(asked.values()) for one in choices}
    every, counted, ended = list(asked.values()), dict.fromkeys(places, 0), 0
    left, tokens = [len(choices) for choices in every], 0
    with contextlib.closing(grown(engine, asked)) as growing:
        for one, _ in growing:
            tokens += len(one.token_ids) - counted[id(one)]
            counted[id(one)] = len(one.token_ids)
            place = places[id(one)]
            if one.finish_reason is not None:
                ended += 1
                left[place] -= 1
            progress(ended, tokens)
            if left[place] == 0:
                yield place, [each.answer() for each in every[place]]


def stream(
    model: LanguageModel,
    prompt: Prompt,
    options: GenerationOptions | None = None,
    *,
    reading: Reading | None = None,
    ignore_eos: bool = False,
    adapter: Adapter = None,
    length: Callable[[int], int] | None = None,
) -> Iterator[str]:
    """Let the model answer one prompt, and give the text as it comes.

    Args:
        model: with a tokenizer.
        prompt: a text, a conversation or token ids, as of `answer`.
        options: of the answer; `n` is 1.
        reading: how texts become tokens.
        ignore_eos: as of `answers_as_completed`.
        adapter: as of `answers_as_completed`.
        length: the most new tokens of a prompt of so many tokens, in place of the options'.

    Returns:
        Pieces of the text, none empty: joined they are the answer. Closing the iterator ends the generation.

    Raises:
        ConfigError: at once, as of `answer`; a model without tokenizer; `n` above 1.
        DataError: a prompt that the chat template refuses, or invalid Unicode.
    """
    options, reading = options or GenerationOptions(), reading or Reading()
    if model.tokenizer is None:
        raise ConfigError("stream: expected a model with a tokenizer, got one without; load it from a folder")
    if options.n != 1:
        raise ConfigError(f"n: expected 1 answer to stream, got {options.n}; use answers(…) for several")
    [encoded] = encode_prompts(reading.encoder(model.tokenizer), [prompt], reading)
    if length is not None:
        options = dataclasses.replace(options, max_new_tokens=length(len(encoded)))
    engine, asked = _asked(model, [encoded], options, reading, ignore_eos, adapter)
    assert engine is not None, "there is a prompt"
    return _pieces(engine, asked)


def _pieces(engine: AnyEngine, asked: dict[int, list[GrowingAnswer]]) -> Iterator[str]:
    with contextlib.closing(grown(engine, asked)) as growing:
        for _, text in growing:
            if text:
                yield text


def with_ends(options: GenerationOptions, ends: Sequence[int]) -> GenerationOptions:
    """Options whose answers end at further tokens too.

    Args:
        options: the options.
        ends: token ids, as of `stop_tokens`.
    """
    return dataclasses.replace(options, stop_tokens=tuple(dict.fromkeys([*ends, *options.stop_tokens])))


def _asked(
    model: LanguageModel,
    prompts: Sequence[Prompt],
    options: GenerationOptions | Sequence[GenerationOptions] | None,
    reading: Reading,
    ignore_eos: bool,
    adapter: Adapter,
) -> tuple[AnyEngine | None, dict[int, list[GrowingAnswer]]]:
    """An engine that was asked for answers to prompts; None: there is no prompt."""
    encoder = reading.encoder(model.tokenizer)
    encoded = encode_prompts(encoder, prompts, reading)
    if not encoded:
        return None, {}
    ends = () if ignore_eos else stop_tokens(model, encoder)
    if options is None or isinstance(options, GenerationOptions):
        options = [options or GenerationOptions()] * len(encoded)
    if len(options) != len(encoded):
        raise ConfigError(f"options: expected one for each of {len(encoded)} prompts, got {len(options)}")
    return ask(model, encoded, [with_ends(each, ends) for each in options], model.tokenizer, adapter)


def ask(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    options: Sequence[GenerationOptions],
    tokenizer: "PreTrainedTokenizerBase | None",
    adapter: Adapter = None,
) -> tuple[AnyEngine, dict[int, list[GrowingAnswer]]]:
    """Ask a new engine for answers; `grown` generates them.

    Args:
        model: the model.
        prompts: token ids, at least one prompt.
        options: of each prompt's answers.
        tokenizer: of the answers' text; None: they have none.
        adapter: as of `answers_as_completed`.

    Returns:
        The engine, and number of the request → its answers, in the order of the prompts.

    Raises:
        ConfigError: a prompt, a setting or an adapter that does not fit the model; stop strings without a tokenizer.
    """
    if tokenizer is None and any(each.stop_strings for each in options):
        raise ConfigError("stop_strings: expected a model with a tokenizer, got one without; load it from a folder")
    lengths = [len(prompt) for prompt, each in zip(prompts, options, strict=True) for _ in range(each.n)]
    chosen = _of_prompts(adapter, len(prompts))
    adapters = {str(id(each)): each for each in chosen if each is not None}
    engine = engine_for(model, lengths, max(each.max_new_tokens for each in options), adapters)
    asked = {}
    for place, (prompt, own, one) in enumerate(zip(prompts, options, chosen, strict=True)):
        growing = [GrowingAnswer(prompt, tokenizer, own.stop_strings) for _ in range(own.n)]
        name = None if one is None else str(id(one))
        asked[engine.add(prompt, _seeded(own, place), adapter=name)] = growing
    return engine, asked


def _of_prompts(adapter: Adapter, count: int) -> Sequence[LanguageModel | None]:
    """The adapter of each prompt."""
    every: list[Any] = list(adapter) if isinstance(adapter, list | tuple) else [adapter] * count
    if len(every) != count:
        raise ConfigError(f"adapter: expected one for each of {count} prompts, got {len(every)}")
    for each in every:
        if each is not None and not hasattr(each, "lora"):
            expected = "a model with an adapter, as FastLanguageModel.load_adapter gives it"
            raise ConfigError(f"adapter: expected {expected}, got {shown(each)}")
    return every


def _seeded(options: GenerationOptions, place: int) -> GenerationOptions:
    """The options of one of several prompts, which draw other numbers than each other by one seed.

    Args:
        options: of all.
        place: of the prompt among them; the first one's seed is the options' own.
    """
    if place == 0 or not isinstance(options.seed, int):
        return options
    seed = np.random.SeedSequence((abs(options.seed), int(options.seed < 0), place)).generate_state(1)[0]
    return dataclasses.replace(options, seed=int(seed) >> 1)
