"""The text and the bytes of single tokens, for log-probabilities."""

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fastjax.generation.token_text import token_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: The log-probability of a token that cannot come, as OpenAI documents it: JSON has no infinity.
NEVER = -9999.0

Likeliest = Sequence[tuple[int, float]]


class TokenNames:
    """Token ids as texts and bytes."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase"):
        """Begin.

        Args:
            tokenizer: with a Rust backend.
        """
        self.data = functools.lru_cache(maxsize=2**17)(token_bytes(tokenizer))
        """The bytes of a token in a text; those of a special token are its name's."""

    def chat(self, token: int, log_prob: float) -> dict[str, Any]:
        """A token with its log-probability, as /v1/chat/completions tells it.

        Args:
            token: id.
            log_prob: natural logarithm.
        """
        data = self.data(token)
        return {"token": data.decode(errors="replace"), "logprob": value(log_prob), "bytes": list(data)}

    def text(self, token: int) -> str:
        r"""A token as /v1/completions tells it: its text, or `bytes:\xf0\x9f` where that ends within a character.

        Args:
            token: id.
        """
        data = self.data(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def chat_logprobs(self, ids: Sequence[int], log_probs: Sequence[float], likeliest: Sequence[Likeliest]) -> dict:
        """`logprobs` of /v1/chat/completions.

        Args:
            ids: tokens.
            log_probs: of each.
            likeliest: (id, log-probability) in the place of each; empty: none are told.
        """
        told = []
        for place, (token, log_prob) in enumerate(zip(ids, log_probs, strict=True)):
            others = likeliest[place] if likeliest else ()
            told.append(self.chat(token, log_prob) | {"top_logprobs": [self.chat(*other) for other in others]})
        return {"content": told, "refusal": None}

    def completion_logprobs(
        self,
        ids: Sequence[int],
        log_probs: Sequence[float | None],
        likeliest: Sequence[Likeliest],
        offsets: Sequence[int],
    ) -> dict[str, Any]:
        """`logprobs` of /v1/completions. The chosen token is always among the likeliest.

        Args:
            ids: tokens.
            log_probs: of each; None: of a first token, before which nothing stands.
            likeliest: (id, log-probability) in the place of each; empty: the chosen one alone is told.
            offsets: place of each in the text, in characters.
        """
        tops: list[dict[str, float] | None] = []
        for place, (token, log_prob) in enumerate(zip(ids, log_probs, strict=True)):
            if log_prob is None:
                tops.append(None)
                continue
            others = likeliest[place] if likeliest else ()
            tops.append({self.text(other): value(each) for other, each in reversed([*others, (token, log_prob)])})
        tops = [None if top is None else dict(sorted(top.items(), key=lambda one: -one[1])) for top in tops]
        return {
            "tokens": [self.text(token) for token in ids],
            "token_logprobs": [None if each is None else value(each) for each in log_probs],
            "top_logprobs": tops,
            "text_offset": list(offsets),
        }


def value(log_prob: float) -> float:
    """A log-probability that JSON can say.

    Args:
        log_prob: natural logarithm; -inf, or what is no number: of a token that cannot come.
    """
    return log_prob if log_prob > NEVER else NEVER
