"""The fields of requests: those that are served, those that pass, and those that pass at their neutral value alone.

The sampling fields are `GenerationOptions`' own, checked there. A field that would be taken and do nothing is refused.
"""

import difflib
from collections.abc import Mapping
from typing import Annotated, Any

from annotated_types import Interval

from convert import strict_json
from convert.errors import shorten, shown
from fastjax.errors import ConfigError
from fastjax.generation.options import MAX_LIKELIEST, MAX_STOPS
from fastjax.limits import MAX_ROW_TOKENS
from fastjax.options.fields import fits
from fastjax.options.words import describe
from fastjax.serving.errors import ApiError

Tokens = Annotated[int, Interval(ge=0, le=MAX_ROW_TOKENS)]
Likeliest = Annotated[int, Interval(ge=0, le=MAX_LIKELIEST)]
Object = Annotated[dict[str, Any], "an object"]
Objects = Annotated[list[dict[str, Any]], "a list of objects"]

#: Fields of `GenerationOptions` by their own names.
SAMPLING = (
    *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("logit_bias", "seed", "n"),
)
_COMMON: dict[str, Any] = {
    **dict.fromkeys(SAMPLING, Any),
    "model": str,
    "stream": bool,
    "stream_options": Object,
    "max_tokens": Tokens,
    "stop": Any,
    "stop_token_ids": Annotated[list[int], "a list of token ids"],
    "ignore_eos": bool,
    "return_token_ids": bool,
}
CHAT: dict[str, Any] = {
    **_COMMON,
    "messages": Objects,
    "max_completion_tokens": Tokens,
    "logprobs": bool,
    "top_logprobs": Likeliest,
    "tools": Objects,
    "tool_choice": Any,
    "parallel_tool_calls": bool,
    "reasoning_effort": str,
    "chat_template_kwargs": Object,
    "continue_final_message": bool,
    "add_generation_prompt": bool,
}
"""Fields of /v1/chat/completions → their types."""
COMPLETION: dict[str, Any] = {**_COMMON, "prompt": Any, "logprobs": Likeliest, "echo": bool}
"""Fields of /v1/completions → their types."""
TOKENIZE: dict[str, Any] = {
    "model": str,
    "prompt": Any,
    "messages": Objects,
    "tools": Objects,
    "chat_template_kwargs": Object,
    "continue_final_message": bool,
    "add_generation_prompt": bool,
}
"""Fields of /tokenize → their types."""

LOAD: dict[str, Any] = {"lora_name": str, "lora_path": str}
"""Fields of /v1/load_lora_adapter and /v1/unload_lora_adapter → their types; the names are vLLM's."""

#: Fields that say who asks or what for, and change no answer.
_PASSED = ("user", "metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier")
#: Fields that are not served → the values at which they change nothing, besides null.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "response_format": ({"type": "text"},),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "modalities": (["text"],),
    "verbosity": ("medium",),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "best_of": (1,),
    "suffix": ("",),
    **dict.fromkeys(("audio", "prediction", "web_search_options", "moderation"), ()),
    **dict.fromkeys(("chat_template", "guided_json", "structured_outputs"), ()),
}


def parse(data: bytes) -> dict[str, Any]:
    """The object in a body.

    Args:
        data: JSON in UTF-8.

    Raises:
        ApiError: anything else, half a character in a text too.
    """
    try:
        value = strict_json.parse(data.decode())
    except UnicodeDecodeError as error:
        raise ApiError(400, f"body: expected JSON in UTF-8, got an invalid byte at {error.start}") from None
    except strict_json.JsonError as error:
        raise ApiError(400, f"body: expected JSON (RFC 8259), got an error in {error}") from None
    if not isinstance(value, dict):
        raise ApiError(400, f"body: expected a JSON object, got {shown(value, 60)}")
    return value


def read(body: Mapping[str, Any], kinds: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a request that say something; null is as if the field were absent.

    Args:
        body: the object.
        kinds: the route's fields.

    Raises:
        ApiError: names a field that is unknown, not served, or of another type.
    """
    found = {}
    for name, value in body.items():
        if name in _PASSED or value is None and (name in kinds or name in _NEUTRAL):
            continue
        if name in kinds:
            if not fits(value, kinds[name]):
                raise _refused(name, f"expected {describe(kinds[name])}, got {shown(value, 60)}")
            found[name] = value
        elif name in _NEUTRAL:
            if not any(value == neutral and type(value) is type(neutral) for neutral in _NEUTRAL[name]):
                neutral = " or ".join(shown(each) for each in _NEUTRAL[name])
                way = f"expected {neutral}" if neutral else "leave it out"
                raise _refused(name, f"is not served; {way}, got {shown(value, 60)}", "unsupported_parameter")
        else:
            near = difflib.get_close_matches(name[:80], kinds, n=1)
            way = f"did you mean {near[0]}?" if near else f"expected some of {', '.join(kinds)}"
            raise _refused(shorten(name, 80), f"unknown; {way}", "unknown_parameter")
    return found


def _refused(name: str, problem: str, code: str | None = None) -> ApiError:
    return ApiError(400, f"{name}: {problem}", param=name, code=code)


def sampling(found: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `GenerationOptions` in a request.

    Args:
        found: its fields.

    Raises:
        ConfigError: a key of `logit_bias` that is no token id, or a `stop` that is neither text nor texts.
    """
    options = {name: found[name] for name in SAMPLING if name in found}
    if isinstance(options.get("logit_bias"), dict):
        options["logit_bias"] = {_token(key): value for key, value in options["logit_bias"].items()}
    stop = found.get("stop", ())
    stops = (stop,) if isinstance(stop, str) else stop
    if not isinstance(stops, list | tuple) or not all(isinstance(one, str) and one for one in stops):
        raise ConfigError(f"stop: expected a text or a list of texts that are not empty, got {shown(stop, 60)}")
    if len(stops) > MAX_STOPS:
        raise ConfigError(f"stop: expected at most {MAX_STOPS} texts, got {len(stops)}")
    return options | {"stop_strings": stops}


def _token(key: str) -> int:
    if not (key.isascii() and key.removeprefix("-").isdecimal() and len(key) <= 20):
        raise ConfigError(f"logit_bias: expected token ids as keys, got {shown(key, 60)}")
    return int(key)
