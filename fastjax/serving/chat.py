"""Answers as /v1/chat/completions tells them."""

import time
import uuid
from collections.abc import Sequence
from typing import Any, cast

from fastjax.generation.answers import GrowingAnswer
from fastjax.generation.replies import Delta
from fastjax.generation.replies.growing import GrowingReply
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
        events, delta = [], _delta(cast(GrowingReply, growth.answer).deltas())
        if delta or growth.tokens.start < growth.tokens.stop:
            events.append(self._event(growth.choice, delta, **self._tokens(growth)))
        if growth.answer.finish_reason is not None:
            events.append(self._event(growth.choice, {}, finish_reason=_reason(growth.answer)))
        return events

    def usage(self) -> dict[str, Any]:
        """The event with the tokens."""
        return {**self._head, "object": "chat.completion.chunk", "choices": [], "usage": self._answers.usage()}

    def whole(self) -> dict[str, Any]:
        """The response, once all have ended."""
        choices = []
        for choice, one in enumerate(self._answers.growing):
            told = self._tokens(Growth(choice, one, "", slice(0, one.kept)))
            choices.append({"index": choice, "message": _message(one), "finish_reason": _reason(one)} | told)
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


def _message(one: GrowingAnswer) -> dict[str, Any]:
    """The message of an answer that has ended."""
    reply = cast(GrowingReply, one).reply()
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in reply.tool_calls
    ]
    message: dict[str, Any] = {"role": "assistant", "content": None if calls and not reply.content else reply.content}
    message |= {"reasoning_content": reply.reasoning} if reply.reasoning else {}
    return message | {"refusal": None} | ({"tool_calls": calls} if calls else {})


def _reason(one: GrowingAnswer) -> str | None:
    """Why an answer has ended; a call is a reason of its own, unless the limit came before the answer's end."""
    called = one.finish_reason == "stop" and cast(GrowingReply, one).reply().tool_calls
    return "tool_calls" if called else one.finish_reason


def _delta(deltas: Sequence[Delta]) -> dict[str, Any]:
    """An event's delta; pieces of one call's arguments that came together are one."""
    said: dict[str, Any] = {}
    calls: list[dict[str, Any]] = []
    for delta in deltas:
        if delta.kind != "tool_call":
            key = "content" if delta.kind == "content" else "reasoning_content"
            said[key] = said.get(key, "") + delta.text
        elif delta.id is None and calls and calls[-1]["index"] == delta.index:
            calls[-1]["function"]["arguments"] += delta.text
        else:
            function = {"arguments": delta.text} | ({} if delta.name is None else {"name": delta.name})
            begun = {} if delta.id is None else {"id": delta.id, "type": "function"}
            calls.append({"index": delta.index, **begun, "function": function})
    return said | ({"tool_calls": calls} if calls else {})
