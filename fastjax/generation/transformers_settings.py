"""Settings by the names of transformers' `generate`: the call's, a generation_config's, the folder's, in this order.

What of these cannot be served is refused by its name, unless its value changes nothing.
"""

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

from convert.errors import shown
from convert.generation_config import GENERATION_CONFIG, generation_settings
from fastjax.errors import ConfigError
from fastjax.execution.language_model import LanguageModel
from fastjax.generation.options import GenerationOptions

_LOG = logging.getLogger(__name__)

#: The longest answer where nobody says it, and transformers' `top_k` where sampling is asked for without one.
_LENGTH, _TOP_K = 256, 50
_SAMPLING = ("temperature", "top_k", "top_p", "min_p")
_PLAIN = ("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "seed")
_SERVED = ("max_new_tokens", "max_length", "do_sample", *_SAMPLING, *_PLAIN, "num_return_sequences")
_SERVED = (*_SERVED, "stop_strings", "eos_token_id", "pad_token_id")
#: Settings of how transformers computes, or of what is refused itself: they change no answer here.
_WITHOUT_EFFECT = set(
    "use_cache cache_implementation cache_config max_cache_len return_legacy_cache compile_config disable_compile "
    "low_memory prefill_chunk_size synced_gpus renormalize_logits remove_invalid_values early_stopping length_penalty "
    "num_assistant_tokens num_assistant_tokens_schedule assistant_confidence_threshold assistant_lookbehind "
    "target_lookbehind assistant_ensemble_weight is_assistant max_matching_ngram_size bos_token_id "
    "decoder_start_token_id encoder_no_repeat_ngram_size encoder_repetition_penalty trust_remote_code "
    "transformers_version".split()
)
#: Settings of transformers that are not served → the value that switches them off, besides None and False.
_UNSERVED: dict[str, Any] = {
    **dict.fromkeys(("num_beams", "num_beam_groups", "guidance_scale", "typical_p"), 1),
    **dict.fromkeys(("penalty_alpha", "diversity_penalty", "epsilon_cutoff", "eta_cutoff"), 0),
    **dict.fromkeys(("no_repeat_ngram_size", "min_length", "min_new_tokens"), 0),
    **dict.fromkeys(("output_attentions", "output_hidden_states", "output_scores", "output_logits"), False),
    **dict.fromkeys(("return_dict_in_generate", "token_healing", "use_mtp"), False),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens")),
    **dict.fromkeys(("bad_words_ids", "sequence_bias", "exponential_decay_length_penalty", "max_time", "top_h")),
    **dict.fromkeys(("constraints", "force_words_ids", "dola_layers", "watermarking_config", "speculation_type")),
    **dict.fromkeys(("prompt_lookup_num_tokens", "assistant_early_exit", "assistant_model", "assistant_tokenizer")),
    **dict.fromkeys(("logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn", "custom_generate")),
    **dict.fromkeys(("negative_prompt_ids", "negative_prompt_attention_mask")),
}


#: Names of other libraries' functions → what to use instead.
_ELSEWHERE = {
    "tools": "generate(**ids) with ids = tokenizer.apply_chat_template(messages, tools=…, return_tensors='np', …)",
    **dict.fromkeys(("enable_thinking", "reasoning_effort"), "chat_template_kwargs={…} for variables of the template"),
    **dict.fromkeys(("max_tokens", "max_completion_tokens"), "max_new_tokens"),
    "stop": "stop_strings",
    "n": "num_return_sequences",
    "system_prompt": "a conversation that begins with a message of the system",
    **dict.fromkeys(("sampling_params", "lora_request"), "the names below, and adapter=… of generate"),
}


class Length(NamedTuple):
    """The most tokens of an answer.

    Attributes:
        new: of the answer; None: `total` counts.
        total: of prompt and answer together.
        asked: whether the call says so; otherwise the answer also ends where the model's rows do.
        room: tokens of the model's rows.
    """

    new: int | None
    total: int | None
    asked: bool
    room: int

    def of(self, prompt: int) -> int:
        """The most new tokens behind a prompt.

        Args:
            prompt: its tokens.

        Raises:
            ConfigError: a prompt that fills `max_length` already.
        """
        if self.new is None and self.total is not None and self.total <= prompt and self.asked:
            raise ConfigError(
                f"max_length: expected more tokens than the prompt's {prompt}, got {self.total}; it counts prompt and "
                "answer together, max_new_tokens the answer alone"
            )
        most = self.new if self.new is not None else (self.total or 0) - prompt
        return most if self.asked else max(1, min(most, self.room - prompt))


class Settings(NamedTuple):
    """Settings of a call of `generate`.

    Attributes:
        options: of the answers, but for their length.
        length: of the answers.
        ends: the end tokens that replace the model's; None: the model's.
        pad: the token behind answers that are shorter than others; None: nobody names one.
    """

    options: GenerationOptions
    length: Length
    ends: tuple[int, ...] | None
    pad: int | None


def settings_of(model: LanguageModel, given: Mapping[str, Any], generation_config: Any = None) -> Settings:
    """Settings of a call.

    Args:
        model: whose folder's generation_config.json says what the call leaves open.
        given: the call's keywords; None: not said.
        generation_config: transformers' object, or a dict; what is None there is not said.

    Raises:
        ConfigError: names the keyword that is unknown, not served, or out of its range.
        ConvertError: a generation_config.json that cannot be read.
    """
    called = _stated(given)
    if unknown := sorted(called.keys() - {*_SERVED, *_WITHOUT_EFFECT, *_UNSERVED}):
        instead = f"use {_ELSEWHERE[unknown[0]]}; " if unknown[0] in _ELSEWHERE else ""
        raise ConfigError(f"generate: {unknown[0]}: unknown; {instead}expected some of {', '.join(_SERVED)}")
    called = _stated(_fields(generation_config)) | called
    folder = {} if model.folder is None else _stated(generation_settings(model.folder))
    merged = folder | called
    for name, off in _UNSERVED.items():
        value = merged.get(name)
        if value is not None and value is not False and value != off and not (isinstance(value, list) and not value):
            place = "" if name in called else f" of the folder's {GENERATION_CONFIG}"
            way = (
                "leave it out" if name in called else f"pass {name}={off!r} to switch it off" if off is not None else ""
            )
            raise ConfigError(f"generate: {name}{place} is not served, got {shown(value, 60)}" + (way and f"; {way}"))
    stops = merged.get("stop_strings", ())
    options = {name: merged[name] for name in _PLAIN if name in merged}
    options |= _sampling(called, merged)
    options |= {"n": merged.get("num_return_sequences", 1)}
    options |= {"stop_strings": (stops,) if isinstance(stops, str) else tuple(stops)}
    ends = called.get("eos_token_id")
    ends = None if ends is None else tuple(_listed(ends))
    return Settings(
        GenerationOptions(**options, stop_tokens=ends or ()),
        _length(called, folder, model.max_seq_length),
        ends,
        called.get("pad_token_id", _pad(model, folder)),
    )


def _stated(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if value is not None}


def _fields(config: Any) -> Mapping[str, Any]:
    """The settings of a generation_config."""
    if config is None or isinstance(config, Mapping):
        return config or {}
    if hasattr(config, "to_dict"):
        return config.to_dict()
    raise ConfigError(f"generation_config: expected a GenerationConfig or a dict, got {shown(config, 60)}")


def _sampling(called: Mapping[str, Any], merged: Mapping[str, Any]) -> dict[str, Any]:
    """Temperature and filters; greedy decoding is temperature 0.

    A temperature of the call's samples by itself. Where transformers' word for it, `do_sample`, does, what is not said
    is transformers' default.
    """
    temperature = called.get("temperature")
    by_word = called.get("do_sample")
    if by_word is None and temperature is None:
        by_word = merged.get("do_sample", False)
    if by_word or (by_word is None and temperature):
        defaults = {"temperature": 1.0} | ({"top_k": _TOP_K} if by_word or merged.get("do_sample") else {})
        return defaults | {name: merged[name] for name in _SAMPLING if name in merged}
    unused = [name for name in _SAMPLING if called.get(name) and temperature != 0]
    if unused:
        _LOG.warning("generate: %s: without effect, since nothing is sampled; set do_sample=True", unused[0])
    return {"temperature": 0.0}


def _length(called: Mapping[str, Any], folder: Mapping[str, Any], room: int) -> Length:
    for settings in (called, folder):
        if settings.keys() & {"max_new_tokens", "max_length"}:
            new, total = (settings.get(name) for name in ("max_new_tokens", "max_length"))
            return Length(new, total if new is None else None, settings is called, room)
    return Length(_LENGTH, None, False, room)


def _listed(ids: Any) -> list[Any]:
    """One id or several, of Python or an array, as a list."""
    ids = ids.tolist() if hasattr(ids, "tolist") else ids
    return list(ids) if isinstance(ids, list | tuple) else [ids]


def _pad(model: LanguageModel, folder: Mapping[str, Any]) -> int | None:
    """The tokenizer's pad token, or the folder's."""
    own = getattr(model.tokenizer, "pad_token_id", None)
    return folder.get("pad_token_id") if own is None else own
