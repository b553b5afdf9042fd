"""Answers as /v1/completions tells them."""

import time
import uuid
from typing import Any

from fastjax.serving.answers import Answers, Growth


class CompletionForm:
    """The objects of one request."""

    def __init__(self, answers: Answers):
        """Begin.

        Args:
            answers: of the request.
        """
        self._answers, self._names = answers, answers.request.model.tokens
        self._head = {"id": f"cmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": answers.request.name}
        self._head["object"] = "text_completion"

    def begin(self) -> list[dict[str, Any]]:
        """The first event of each answer: the prompt, if it is to be told."""
        return []

    def grow(self, growth: Growth) -> list[dict[str, Any]]:
        """The events of what an answer has gained.

        Args:
            growth: that.
        """
        events = []
        reason = growth.answer.finish_reason
        if growth.text or growth.tokens.start < growth.tokens.stop:
            told = {"index": growth.choice, "text": growth.text, "finish_reason": None} | self._tokens(growth)
            events.append(self._head | {"choices": [told]})
        if reason is not None:
            told = {"index": growth.choice, "text": "", "finish_reason": reason, "logprobs": None}
            events.append(self._head | {"choices": [told]})
        return events

    def usage(self) -> dict[str, Any]:
        """The event with the tokens."""
        return self._head | {"choices": [], "usage": self._answers.usage()}

    def whole(self) -> dict[str, Any]:
        """The response, once all have ended."""
        choices = []
        for choice, one in enumerate(self._answers.growing):
            told = self._tokens(Growth(choice, one, "", slice(0, one.kept)))
            text = one.answer().text
            choices.append({"index": choice, "text": text, "finish_reason": one.finish_reason} | told)
        return self._head | {"choices": choices, "usage": self._answers.usage()}

    def _tokens(self, growth: Growth) -> dict[str, Any]:
        """Log-probabilities and ids, as the request wants them."""
        one, here, request = growth.answer, growth.tokens, self._answers.request
        told: dict[str, Any] = {"logprobs": None}
        if request.log_probs:
            likeliest = one.likeliest[here] if one.likeliest else []
            told["logprobs"] = self._names.completion_logprobs(
                one.token_ids[here], one.log_probs[here], likeliest, one.offsets(here)
            )
        ids = {"token_ids": one.token_ids[here], "prompt_token_ids": list(one.prompt_token_ids)}
        return told | (ids if request.token_ids else {})
