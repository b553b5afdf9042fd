"""The options of an answer: how long it is, how its tokens are chosen and where it ends.

Declared, explained and checked here alone, without JAX. Names are those of transformers' GenerationConfig, and of the
OpenAI API where that has none.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Annotated

from annotated_types import Interval
from pydantic import Strict

from convert.errors import shown
from fastjax.errors import ConfigError
from fastjax.limits import MAX_ROW_TOKENS
from fastjax.options import checked
from fastjax.options.kinds import Seed

MAX_BIASES = 300
"""Token ids of a `logit_bias`."""
MAX_BIAS = 100
"""The largest bias, which forces a token; its negative bans one."""
MAX_STOPS = 16
"""Stop tokens, and stop strings."""
MAX_LIKELIEST = 20
"""Alternatives beside a chosen token."""
STEPS = 4
"""Tokens of an answer that come at a time; 8 and 16 are no faster (docs/lab/generation.md)."""

Share = Annotated[float, Interval(ge=0, le=1)]
Penalty = Annotated[float, Interval(ge=-2, le=2)]


@checked("")
class GenerationOptions:
    """How an answer is generated.

    Raises:
        ConfigError: names a field that is out of its range, the range and the value.
    """

    max_new_tokens: Annotated[int, Interval(ge=0, le=MAX_ROW_TOKENS)] = 256
    """the most tokens of an answer; 0, with `prompt_logprobs`: the prompt is scored, and none is made."""
    temperature: Annotated[float, Interval(ge=0, le=100)] = 0.0
    """divides the logits before a token is drawn; 0, or what is 0 among normal float32, takes the likeliest token."""
    top_k: Annotated[int, Interval(ge=-1)] | None = None
    """draw among the k likeliest tokens, and those level with the last of them; null, 0, -1, the vocabulary's size or
    more: among all."""
    top_p: Share | None = None
    """draw among the likeliest tokens whose probabilities add up to this (nucleus sampling); 0 leaves the likeliest
    token, null or 1 leave all."""
    min_p: Share | None = None
    """draw among the tokens of at least this share of the likeliest one's probability; null or 0: among all."""
    repetition_penalty: Annotated[float, Interval(ge=0.01, le=100)] = 1.0
    """divides the positive logits, and multiplies the negative ones, of tokens in prompt and answer; 1: off."""
    presence_penalty: Penalty = 0.0
    """taken from the logits of tokens in the answer."""
    frequency_penalty: Penalty = 0.0
    """taken from the logits of tokens in the answer, once for each time that they stand there."""
    logit_bias: Annotated[Mapping[int, float], "a mapping from token ids to numbers"] = dataclasses.field(
        default_factory=dict
    )
    """token id → number from -100 to 100 that is added to its logit, for at most 300 tokens; -100 bans the token, 100
    bans all tokens that do not have it."""
    seed: Seed = 0
    """of the random numbers: equal seeds and prompts give equal answers, whatever else is generated beside them."""
    n: Annotated[int, Interval(ge=1, le=128)] = 1
    """answers of one prompt, of which each draws its own numbers."""
    stop_tokens: Annotated[tuple[int, ...], Strict(False), "token ids"] = ()
    """tokens that end the answer and are no part of it, at most 16."""
    stop_strings: Annotated[tuple[str, ...], Strict(False), "strings"] = ()
    """texts that end the answer where the first of them begins, at most 16."""
    top_logprobs: Annotated[int, Interval(ge=0, le=MAX_LIKELIEST)] | None = None
    """the number of likeliest tokens told with each chosen one, with their log-probabilities by the model's own logits:
    before bias, penalties, temperature and filters; null: none."""
    prompt_logprobs: Annotated[int, Interval(ge=0, le=MAX_LIKELIEST)] | None = None
    """tell the log-probability of each of the prompt's tokens, and so many of the likeliest in its place; null: nothing
    of the prompt."""

    def __post_init__(self) -> None:
        if self.max_new_tokens == 0 and self.prompt_logprobs is None:
            raise ConfigError("max_new_tokens: expected an integer from 1, or 0 with prompt_logprobs, got 0")
        _require_most("logit_bias", len(self.logit_bias), MAX_BIASES, "token ids")
        for token, bias in self.logit_bias.items():
            if not abs(bias) <= MAX_BIAS:
                expected = f"a number from -{MAX_BIAS} to {MAX_BIAS}"
                raise ConfigError(f"logit_bias[{shown(token)}]: expected {expected}, got {shown(bias)}")
        _require_most("stop_tokens", len(self.stop_tokens), MAX_STOPS, "token ids")
        _require_most("stop_strings", len(self.stop_strings), MAX_STOPS, "strings")
        if "" in self.stop_strings:
            raise ConfigError("stop_strings: expected strings of at least one character, got ''")

    def checked(self, vocabulary: int) -> "GenerationOptions":
        """These options, known to fit a model.

        Args:
            vocabulary: the number of the model's tokens.

        Raises:
            ConfigError: a token id beyond the vocabulary, or every token banned; names the field.
        """
        for where, token in self._tokens():
            if not 0 <= token < vocabulary:
                raise ConfigError(f"{where}: expected token ids from 0 to {vocabulary - 1}, got {shown(token)}")
        if sum(bias == -MAX_BIAS for bias in self.logit_bias.values()) == vocabulary:
            raise ConfigError(f"logit_bias: expected a token that is not banned, got {-MAX_BIAS} for all {vocabulary}")
        return self

    def _tokens(self) -> Iterator[tuple[str, int]]:
        """The fields with token ids, and the ids."""
        yield from (("logit_bias", token) for token in self.logit_bias)
        yield from (("stop_tokens", token) for token in self.stop_tokens)


def _require_most(field: str, given: int, most: int, what: str) -> None:
    """Refuse a longer list."""
    if given > most:
        raise ConfigError(f"{field}: expected at most {most} {what}, got {given}")
