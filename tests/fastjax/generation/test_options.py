"""Options of an answer: their limits, told with the field, what is expected and what was given."""

import dataclasses

import pytest

from fastjax.errors import ConfigError
from fastjax.generation.options import GenerationOptions

VOCABULARY = 1000
IDS = "token ids from 0 to 999"
MAPPING = "a mapping from token ids to numbers"


@pytest.mark.parametrize(
    ("settings", "expected", "given"),
    [
        ({"temperature": -1.0}, "a number from 0 to 100", "-1.0"),
        ({"temperature": 1e6}, "a number from 0 to 100", "1000000.0"),
        ({"temperature": float("nan")}, "a value that is finite", "nan"),
        ({"temperature": "1"}, "a number from 0 to 100", "'1'"),
        ({"top_k": -2}, "an integer of at least -1 or null", "-2"),
        ({"top_k": 1.5}, "an integer of at least -1 or null", "1.5"),
        ({"top_k": True}, "an integer of at least -1 or null", "True"),
        ({"top_p": -1.0}, "a number from 0 to 1 or null", "-1.0"),
        ({"min_p": 1.5}, "a number from 0 to 1 or null", "1.5"),
        ({"repetition_penalty": 0.0}, "a number from 0.01 to 100", "0.0"),
        ({"repetition_penalty": float("inf")}, "a value that is finite", "inf"),
        ({"presence_penalty": 2.1}, "a number from -2 to 2", "2.1"),
        ({"frequency_penalty": -3}, "a number from -2 to 2", "-3"),
        ({"logit_bias": {VOCABULARY: 1.0}}, IDS, "1000"),
        ({"logit_bias": {-1: 1.0}}, IDS, "-1"),
        ({"logit_bias": {"word": 1.0}}, MAPPING, "{'word': 1.0}"),
        ({"logit_bias": {True: 1.0}}, MAPPING, "{True: 1.0}"),
        ({"logit_bias": {1: "a"}}, MAPPING, "{1: 'a'}"),
        ({"logit_bias": [1]}, MAPPING, "[1]"),
        ({"logit_bias": {1: float("nan")}}, "a value that is finite", "nan"),
        ({"logit_bias": dict.fromkeys(range(301), 1.0)}, "at most 300 token ids", "301"),
        ({"logit_bias": dict.fromkeys(range(VOCABULARY), -100)}, "at most 300 token ids", "1000"),
        ({"seed": -1}, "an integer from 0 to 4294967295", "-1"),
        ({"seed": 2**40}, "a value of at most 4294967295", str(2**40)),
        ({"n": 0}, "an integer from 1 to 128", "0"),
        ({"n": 10_000}, "an integer from 1 to 128", "10000"),
        ({"top_logprobs": -1}, "an integer from 0 to 20 or null", "-1"),
        ({"top_logprobs": 21}, "an integer from 0 to 20 or null", "21"),
        ({"top_logprobs": VOCABULARY}, "an integer from 0 to 20 or null", "1000"),
        ({"max_new_tokens": 0}, "an integer from 1, or 0 with prompt_logprobs", "0"),
        ({"max_new_tokens": -1}, "an integer from 0 to 16777216", "-1"),
        ({"prompt_logprobs": 21}, "an integer from 0 to 20 or null", "21"),
        ({"stop_tokens": [VOCABULARY]}, IDS, "1000"),
        ({"stop_tokens": (3, -1)}, IDS, "-1"),
        ({"stop_tokens": [True]}, "token ids", "[True]"),
        ({"stop_tokens": [1.5]}, "token ids", "[1.5]"),
        ({"stop_tokens": 7}, "token ids", "7"),
        ({"stop_tokens": range(17)}, "at most 16 token ids", "17"),
        ({"stop_strings": [""]}, "strings of at least one character", "''"),
        ({"stop_strings": "word"}, "strings", "'word'"),
        ({"stop_strings": ["\ud83d"]}, "a value without NUL or half a character", r"'\ud83d'"),
        ({"stop_strings": list("abcdefghijklmnopq")}, "at most 16 strings", "17"),
    ],
    ids=lambda case: str(case)[:40] if isinstance(case, dict) else "",
)
def test_what_is_refused(settings, expected, given):
    (field,) = settings
    with pytest.raises(ConfigError) as error:
        GenerationOptions(**settings).checked(VOCABULARY)
    assert str(error.value) == f"{field}: expected {expected}, got {given}"


def test_a_bias_is_named_by_its_token():
    with pytest.raises(ConfigError, match=r"^logit_bias\[7\]: expected a number from -100 to 100, got 1000000000.0$"):
        GenerationOptions(logit_bias={3: 1.0, 7: 1e9})


def test_every_token_banned_and_an_unknown_field_are_refused():
    with pytest.raises(ConfigError, match=r"^logit_bias: expected a token that is not banned, got -100 for all 3$"):
        GenerationOptions(logit_bias=dict.fromkeys(range(3), -100)).checked(3)
    with pytest.raises(ConfigError, match=r"^top: unknown; expected one of max_new_tokens, temperature, top_k, "):
        GenerationOptions(top=1)  # pyright: ignore[reportCallIssue]


def test_the_limits_themselves_pass():
    for settings in (
        {"temperature": 0, "top_k": -1, "top_p": 0, "min_p": 0, "repetition_penalty": 0.01, "presence_penalty": -2},
        {"temperature": 100, "top_k": 2**32 - 1, "top_p": 1, "min_p": 1, "repetition_penalty": 100, "n": 128},
        {"logit_bias": dict.fromkeys(range(300), -100), "seed": 2**32 - 1, "top_logprobs": 20, "frequency_penalty": 2},
        {"stop_tokens": list(range(16)), "stop_strings": ["a"] * 16, "top_logprobs": 0, "max_new_tokens": 1},
    ):
        options = GenerationOptions(**settings).checked(VOCABULARY)
        found = {name: list(one) if isinstance(one, tuple) else one for name, one in vars(options).items()}
        assert {name: found[name] for name in settings} == settings
        assert dataclasses.replace(options, n=2).n == 2
