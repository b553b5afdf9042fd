"""`model.generate` and `model.stream`: the names of transformers' `generate`, and texts besides.

Settings that a call leaves open are those of the folder's generation_config.json, as in transformers.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from fastjax.data.settings import SpecialTokens
from fastjax.errors import ConfigError
from fastjax.execution.language_model import LanguageModel
from fastjax.generation import text
from fastjax.generation.answers import GrowingAnswer, grown
from fastjax.generation.engines import AnyEngine
from fastjax.generation.prompts import Prompt, Reading, encode_prompts
from fastjax.generation.stops import stop_tokens
from fastjax.generation.text import ask, with_ends
from fastjax.generation.token_arrays import are_token_ids, like, on_host, prompt_rows, with_answers
from fastjax.generation.transformers_settings import Settings, settings_of


def generate(
    model: LanguageModel,
    inputs: Sequence[Prompt] | Mapping[str, Any] | Any = None,
    *,
    input_ids: Any = None,
    attention_mask: Any = None,
    token_type_ids: Any = None,
    chat: bool = True,
    special_tokens: SpecialTokens = "control",
    chat_template_kwargs: Mapping[str, Any] | None = None,
    continue_final_message: bool = False,
    generation_config: Any = None,
    streamer: Any = None,
    tokenizer: Any = None,
    adapter: text.Adapter = None,
    **settings: Any,
) -> Any:
    """Let the model answer: texts to texts, or, as in transformers, token ids to token ids.

    Args:
        model: with or without an adapter.
        inputs: texts, each a user's message or, with `chat=False`, the beginning of a text; conversations, as lists of
            messages; or token ids, as `input_ids`; also a tokenizer's mapping with both arrays.
        input_ids: token ids [B, S], padded on either side: arrays of NumPy, JAX or PyTorch, or lists.
        attention_mask: [B, S], 1 at tokens and 0 at padding. None: pad tokens are padding, unless they are end tokens
            too, as in transformers.
        token_type_ids: zeros, which some tokenizers give.
        chat: put texts through the chat template, exactly as training does.
        special_tokens: the reading of special tokens in texts; see `Encoder`.
        chat_template_kwargs: variables of the chat template, as `enable_thinking`; see `Encoder`.
        continue_final_message: the last message of a conversation is the beginning of the answer.
        generation_config: transformers' GenerationConfig, or a dict, of settings; keywords come before it.
        streamer: transformers' TextStreamer, TextIteratorStreamer or the like, for one answer: its `put` gets the
            prompt's ids [1, S], then each new id [1]; then its `end` is called, after an error too.
        tokenizer: that decodes the answers, for texts and stop strings; None: the model's.
        adapter: a model with a low-rank adapter over this one, which answers in its place; or a list with one, or None,
            for each prompt, all in one batch.
        settings: `max_new_tokens` or `max_length` (256 new tokens); `do_sample`, `temperature`, `top_k`, `top_p`,
            `min_p`; `repetition_penalty`, `presence_penalty`, `frequency_penalty`, `logit_bias`; `seed` (0, of which
            each prompt draws its own numbers); `num_return_sequences`; `stop_strings`; `eos_token_id`, one or a list,
            in place of the model's; `pad_token_id`. What is not said is the folder's generation_config.json's, if
            that says it; a `temperature` alone samples too, and without any word of sampling the likeliest tokens are
            taken. Those that change no answer here, as `use_cache`, are passed by.

    Returns:
        Of texts and conversations the answers, list[str], without special tokens. Of token ids an array
        [B · num_return_sequences, T] of the kind that was given (NumPy of lists): the prompts with their padding, the
        answers, each with the token that ended it, and pad tokens behind those that are shorter.

    Raises:
        ConfigError: a setting that is unknown, not served (beams, logits processors, …) or out of its range, prompts
            that are none, or prompt and answer longer than `max_seq_length`.
        DataError: a prompt that the chat template refuses, or invalid Unicode.
    """
    try:
        wanted = settings_of(model, settings, generation_config)
        decoder = model.tokenizer if tokenizer is None else getattr(tokenizer, "tokenizer", tokenizer)
        ids, mask = _ids(inputs, input_ids, attention_mask, token_type_ids)
        if ids is not None:
            return _continued(model, ids, mask, wanted, decoder, streamer, adapter)
        reading = Reading(chat, special_tokens, chat_template_kwargs, continue_final_message)
        return _answered(model, inputs, reading, wanted, decoder, streamer, adapter)
    finally:
        if streamer is not None:
            streamer.end()


def stream(
    model: LanguageModel, prompt: Prompt, *, adapter: LanguageModel | None = None, **settings: Any
) -> Iterator[str]:
    """Let the model answer one prompt, and give the text as it comes.

    Args:
        model: with a tokenizer.
        prompt: a text, a conversation or token ids.
        adapter: as of `generate`.
        settings: as of `generate`; `chat`, `special_tokens`, `chat_template_kwargs` and `continue_final_message` too.

    Returns:
        Pieces of the text, none empty: joined they are the answer. Closing the iterator ends the generation.

    Raises:
        ConfigError: at once, as of `generate`.
        DataError: a prompt that the chat template refuses, or invalid Unicode.
    """
    names = ("chat", "special_tokens", "chat_template_kwargs", "continue_final_message")
    reading = Reading(**{name: settings.pop(name) for name in names if name in settings})
    wanted = settings_of(model, settings, settings.pop("generation_config", None))
    ignore_eos = wanted.ends is not None
    given = {"reading": reading, "ignore_eos": ignore_eos, "adapter": adapter, "length": wanted.length.of}
    return text.stream(model, prompt, wanted.options, **given)


def _ids(inputs: Any, input_ids: Any, attention_mask: Any, token_type_ids: Any) -> tuple[Any, Any]:
    """Token ids and their mask, in any of the places where they may stand; None: the inputs are texts."""
    if inputs is not None and input_ids is not None:
        raise ConfigError("generate: expected either prompts or input_ids, got both")
    if token_type_ids is not None and np.any(np.asarray(token_type_ids)):
        raise ConfigError("token_type_ids: expected zeros, which mean nothing, got others")
    given = inputs if input_ids is None else input_ids
    if isinstance(given, Mapping) and "input_ids" in given:  # a tokenizer's, as apply_chat_template gives it
        return given["input_ids"], given.get("attention_mask", attention_mask)
    if given is None:
        raise ConfigError("generate: expected prompts or input_ids, got neither")
    if input_ids is not None or are_token_ids(given):
        return given, attention_mask
    if attention_mask is not None:
        raise ConfigError("attention_mask: expected input_ids beside it, got texts")
    return None, None


def _answered(
    model: LanguageModel,
    prompts: Any,
    reading: Reading,
    wanted: Settings,
    tokenizer: Any,
    streamer: Any,
    adapter: text.Adapter,
) -> list[str]:
    """Texts to texts."""
    if tokenizer is None:
        raise ConfigError("generate: expected a model with a tokenizer, got one without; load it from a folder")
    encoder = reading.encoder(tokenizer)
    encoded = encode_prompts(encoder, prompts, reading)
    if not encoded:
        return []
    options = wanted.options if wanted.ends is not None else with_ends(wanted.options, stop_tokens(model, encoder))
    each = [dataclasses.replace(options, max_new_tokens=wanted.length.of(len(prompt))) for prompt in encoded]
    engine, asked = ask(model, encoded, each, tokenizer, adapter)
    if streamer is not None:
        _check_streamed(asked)
        streamer.put(np.asarray(encoded, np.int64))
    return [one.answer().text for one in _generated(engine, asked, streamer, None)]


def _continued(
    model: LanguageModel,
    ids: Any,
    mask: Any,
    wanted: Settings,
    tokenizer: Any,
    streamer: Any,
    adapter: text.Adapter,
) -> Any:
    """Token ids to token ids, as in transformers."""
    options = wanted.options
    if wanted.ends is None:
        learns = getattr(tokenizer, "eos_token_id", None) is not None
        options = with_ends(options, stop_tokens(model, Reading().encoder(tokenizer) if learns else None))
    ends, pad = options.stop_tokens, wanted.pad
    prompts = prompt_rows(ids, mask, None if pad in ends else pad)
    options = dataclasses.replace(options, max_new_tokens=wanted.length.of(prompts.width))
    decoder = tokenizer if options.stop_strings else None
    engine, asked = ask(model, prompts.prompts, [options] * len(prompts.prompts), decoder, adapter)
    if streamer is not None:
        _check_streamed(asked)
        streamer.put(on_host(like(prompts.given, np.asarray(prompts.rows, np.int64))))
    answers = _generated(engine, asked, streamer, prompts.given)
    last = [[one.stop] if isinstance(one.stop, int) else [] for one in answers]
    pad = next(iter(ends), 0) if pad is None else pad
    return with_answers(prompts, [[*one.token_ids, *end] for one, end in zip(answers, last, strict=True)], pad)


def _check_streamed(asked: Mapping[int, Sequence[GrowingAnswer]]) -> None:
    count = sum(map(len, asked.values()))
    if count != 1:
        raise ConfigError(f"streamer: expected one prompt and one answer, got {count}; leave the streamer out")


def _generated(
    engine: AnyEngine, asked: Mapping[int, Sequence[GrowingAnswer]], streamer: Any, given: Any
) -> list[GrowingAnswer]:
    """The answers once they have ended; a streamer gets each token on the way, in the kind of ids that were given."""
    told = 0
    with contextlib.closing(grown(engine, asked)) as growing:
        for one, _ in growing:
            if streamer is not None:
                new = [*one.token_ids[told:], *([one.stop] if isinstance(one.stop, int) else [])]
                told = len(one.token_ids)
                for token in new:
                    streamer.put(on_host(like(given, np.asarray([token], np.int64))))
    return [one for choices in asked.values() for one in choices]
