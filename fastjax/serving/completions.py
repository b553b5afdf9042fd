"""Answers as /v1/completions tells them."""

import time
import uuid
from typing import Any

from fastjax.serving.answers import Answers, Growth
from fastjax.serving.requests import Echo


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

        self._begun: set[int] = set()  # answers whose prompt was told

    def begin(self) -> list[dict[str, Any]]:
        """The events before any token: none. A prompt that is echoed comes with its answer's first tokens."""
        return []

    def grow(self, growth: Growth) -> list[dict[str, Any]]:
        """The events of what an answer has gained.

        Args:
            growth: that.
        """
        events = []
        reason = growth.answer.finish_reason
        echo = self._echo(growth.choice)
        if growth.text or growth.tokens.start < growth.tokens.stop or echo is not None:
            text = growth.text if echo is None else echo.text + growth.text
            told = {"index": growth.choice, "text": text, "finish_reason": None} | self._tokens(growth, echo)
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
            echo = self._echo(choice)
            told = self._tokens(Growth(choice, one, "", slice(0, one.kept)), echo)
            text = one.answer().text if echo is None else echo.text + one.answer().text
            choices.append({"index": choice, "text": text, "finish_reason": one.finish_reason} | told)
        return self._head | {"choices": choices, "usage": self._answers.usage()}

    def _echo(self, choice: int) -> Echo | None:
        """The prompt of an answer, if it is to be told now."""
        echo = self._answers.request.echo
        if echo is None or choice in self._begun:
            return None
        self._begun.add(choice)
        return echo[self._answers.prompt_of(choice)]

    def _tokens(self, growth: Growth, echo: Echo | None) -> dict[str, Any]:
        """Log-probabilities and ids, as the request wants them, behind those of a prompt."""
        one, here, request = growth.answer, growth.tokens, self._answers.request
        told: dict[str, Any] = {"logprobs": None}
        if request.log_probs:
            before = 0 if request.echo is None else len(request.echo[self._answers.prompt_of(growth.choice)].text)
            ids, log_probs = one.token_ids[here], one.log_probs[here]
            likeliest, offsets = one.likeliest[here], [before + place for place in one.offsets(here)]
            if echo is not None:
                ids, log_probs = [*one.prompt_token_ids, *ids], [*one.prompt_log_probs, *log_probs]
                likeliest, offsets = [*one.prompt_likeliest, *likeliest], [*echo.offsets, *offsets]
            told["logprobs"] = self._names.completion_logprobs(ids, log_probs, likeliest, offsets)
        ids = {"token_ids": one.token_ids[here], "prompt_token_ids": list(one.prompt_token_ids)}
        return told | (ids if request.token_ids else {})
