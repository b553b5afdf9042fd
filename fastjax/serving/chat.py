"""Answers as /v1/chat/completions tells them."""

import time
import uuid
from typing import Any

from fastjax.serving.answers import Answers, Growth


class ChatForm:
    """The objects of one request."""

    def __init__(self, answers: Answers):
        """Begin.

        Args:
            answers: of the request.
        """
        self._answers, self._names = answers, answers.request.model.tokens
        self._head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": answers.request.name}

    def begin(self) -> list[dict[str, Any]]:
        """The first event of each answer, with the role."""
        first = {"role": "assistant", "content": ""}
        prompt = {"prompt_token_ids": list(self._answers.growing[0].prompt_token_ids)}
        more = prompt if self._answers.request.token_ids else {}
        return [self._event(choice, first) | more for choice in range(len(self._answers.growing))]

    def grow(self, growth: Growth) -> list[dict[str, Any]]:
        """The events of what an answer has gained.

        Args:
            growth: that.
        """
        events = []
        if growth.text or growth.tokens.start < growth.tokens.stop:
            events.append(self._event(growth.choice, {"content": growth.text}, **self._tokens(growth)))
        if growth.answer.finish_reason is not None:
            events.append(self._event(growth.choice, {}, finish_reason=growth.answer.finish_reason))
        return events

    def usage(self) -> dict[str, Any]:
        """The event with the tokens."""
        return {**self._head, "object": "chat.completion.chunk", "choices": [], "usage": self._answers.usage()}

    def whole(self) -> dict[str, Any]:
        """The response, once all have ended."""
        choices = []
        for choice, one in enumerate(self._answers.growing):
            message = {"role": "assistant", "content": one.answer().text, "refusal": None}
            told = self._tokens(Growth(choice, one, "", slice(0, one.kept)))
            choices.append({"index": choice, "message": message, "finish_reason": one.finish_reason} | told)
        prompt = {"prompt_token_ids": list(self._answers.growing[0].prompt_token_ids)}
        more = prompt if self._answers.request.token_ids else {}
        return {**self._head, "object": "chat.completion", "choices": choices, "usage": self._answers.usage()} | more

    def _event(self, choice: int, delta: dict[str, Any], **more: Any) -> dict[str, Any]:
        told = {"index": choice, "delta": delta, "logprobs": None, "finish_reason": None} | more
        return {**self._head, "object": "chat.completion.chunk", "choices": [told]}

    def _tokens(self, growth: Growth) -> dict[str, Any]:
        """Log-probabilities and ids, as the request wants them."""
        one, here, request = growth.answer, growth.tokens, self._answers.request
        told: dict[str, Any] = {"logprobs": None}
        if request.log_probs:
            told["logprobs"] = self._names.chat_logprobs(
                one.token_ids[here], one.log_probs[here], one.likeliest[here] if one.likeliest else []
            )
        return told | ({"token_ids": one.token_ids[here]} if request.token_ids else {})
