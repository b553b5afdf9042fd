"""Responses in a rendered conversation: what the generation prompt leaves the assistant to say.

If a template marks responses (`{% generation %} … {% endgeneration %}`), the marks are their ranges, and one rendering
is enough. Otherwise a response is the text added by the assistant's message: it lies between the rendering of all
messages before it, with the generation prompt, and the rendering of all messages up to it; a response is never
searched for. Where the whole conversation's text begins with both, but for the token that ends the turn (gpt-oss ends
the last one with another), the response is learnt there. Where it does not, since the template rewrites the past (Qwen3
and others cut the thoughts of earlier turns), it is learnt in a row of its own that ends with it: what generation sees.

A generation prompt may be no beginning of the answer's text, as one that opens a thought which the answer has not. Such
an answer is learnt from where the two part, and counted: generation begins it otherwise.

A message of another role begins where its content does, which a rendering with other content in its place shows, and
ends with its turn; the results of several tools in one turn are one range.
"""

import itertools
import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from fastjax.data.notes import left_out
from fastjax.data.records import Message
from fastjax.data.template import ChatTemplate, RenderedChat, thought_of, with_reasoning
from fastjax.data.turns import PROBE
from fastjax.errors import DataError

_QUESTION: list[Message] = [{"role": "user", "content": "a"}]


class Conversation:
    """Messages under a template; each beginning of theirs is rendered once.

    Attributes:
        messages: In order.
        turns: Indices of the assistant's messages.
    """

    def __init__(
        self,
        template: ChatTemplate,
        messages: Sequence[Message],
        where: str,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
    ):
        """Take a conversation; nothing is rendered yet.

        Args:
            template: The chat template.
            messages: The messages in order.
            where: Their place, for errors.
            tools: The functions that the assistant may call.
            options: Further variables; see `ChatTemplate.render`.
        """
        self.messages = messages
        self.turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        self._template, self._ends, self._where = template, template.turns, where
        self._variables: dict[str, Any] = {**(options or {}), "tools": tools}
        self._known: dict[tuple[int, bool], RenderedChat] = {}

    def whole(self) -> RenderedChat:
        """The text as one response: every token is learnt.

        Raises:
            DataError: The template refuses the messages.
        """
        text = self._beginning(len(self.messages)).text
        return RenderedChat(
            text, [(0, len(text))], left_out=self._left_out(text, dict.fromkeys(self.turns, (text, text)))
        )

    def learnt(
        self,
        *,
        given: int = 0,
        last: bool = False,
        train: Sequence[bool | None] | None = None,
        roles: Sequence[str] = ("assistant",),
    ) -> list[RenderedChat]:
        """Find what is learnt.

        Args:
            given: Messages at the beginning that are not learnt.
            last: Only the last response counts.
            train: Each message's flag; False: it is not learnt.
            roles: Whose messages are learnt.

        Returns:
            The text with the ranges in it of the responses and of the other messages, behind the beginnings of the
            conversation that end with a response which the text itself has otherwise, if any.

        Raises:
            DataError: The template refuses the messages, or does not keep what stands before a response.
        """
        wanted = [i for i in range(given, len(self.messages)) if not (train and train[i] is False)]
        learnt = [i for i in self.turns[-1 if last else 0 :] if i in wanted and "assistant" in roles]
        others = [i for i in wanted if i not in self.turns and self.messages[i]["role"] in roles]
        chat = self._beginning(len(self.messages))
        chat = chat._replace(others=self._others(chat.text, others))
        return self._by_marks(chat, learnt) if chat.marked else self._by_renderings(chat, learnt)

    def _by_renderings(self, chat: RenderedChat, learnt: Sequence[int]) -> list[RenderedChat]:
        said: dict[int, tuple[str, str]] = {}
        alone, responses, elsewhere = [], [], 0
        for index in learnt:
            through, start, follows = self._start(index)
            end, reached = self._ends.last(through, chat.text)
            said[index] = self._checked(through[start:end], index), through
            if reached is None or start > end:
                alone.append(RenderedChat(through, [(start, max(start, end))], elsewhere=not follows))
                continue
            responses.append((start, reached))
            elsewhere += not follows
        missing = self._left_out(chat.text, said)
        if alone and not responses and not chat.others:
            return [*alone[:-1], alone[-1]._replace(left_out=missing)]
        return [*alone, chat._replace(responses=responses, elsewhere=elsewhere, left_out=missing)]

    def _by_marks(self, chat: RenderedChat, learnt: Sequence[int]) -> list[RenderedChat]:
        chat = self._without_closing(chat, len(self.turns))
        rewritten = self._rewritten(chat.text, learnt)
        kept = [index for index in learnt if index not in rewritten]
        alone = [
            through._replace(responses=self._marked(through, self.turns[: self.turns.index(index) + 1], [index]))
            for index, through in rewritten.items()
        ]
        said = {index: (chat.text, chat.text) for index in kept}
        if len(self.turns) == len(chat.responses):
            for index in kept:
                start, end = chat.responses[self.turns.index(index)]
                said[index] = self._checked(chat.text[start:end], index), chat.text
        said |= {index: (through.text, through.text) for index, through in rewritten.items()}
        whole = chat._replace(responses=self._marked(chat, self.turns, kept), left_out=self._left_out(chat.text, said))
        return [*alone, *([whole] if kept or whole.others or not alone else [])]

    def _beginning(self, count: int, prompted: bool = False) -> RenderedChat:
        """The first messages, and behind them the generation prompt if it is asked for."""
        if (count, prompted) not in self._known:
            self._known[count, prompted] = self._rendered(self.messages[:count], prompted)
        return self._known[count, prompted]

    def _rendered(self, messages: Sequence[Message], prompted: bool = False) -> RenderedChat:
        return self._template.render(messages, self._where, self._variables, add_generation_prompt=prompted)

    def _left_out(self, text: str, learnt: Mapping[int, tuple[str, str]]) -> Collection[str]:
        """`left_out`, of the messages as the template sees them."""
        seen = [with_reasoning(message) for message in self.messages]
        template = self._template
        return left_out(seen, {**template.options, **self._variables}, text, learnt, template.reads)

    def _checked(self, said: str, index: int) -> str:
        """A turn's text; refused is one of which the template writes nothing but the end."""
        if self._ends.end.sub("", said).strip():
            return said
        message = self.messages[index]
        given = {
            "tool calls": message.get("tool_calls"),
            "content": message.get("content"),
            "thought": thought_of(message),
        }
        if what := next((kind for kind, it in given.items() if it and self._ends.end.sub("", str(it)).strip()), ""):
            raise DataError(
                f"{self._where}: the chat template does not write the {what} of messages[{index}], so that only the "
                "end of its turn would be learnt; name a template that does (data.chat_template), or leave the turn "
                "out (train: false)"
            )
        return said

    def _start(self, index: int) -> tuple[str, int, bool]:
        """The text that ends with a response, its place, and whether all of the generation prompt stands before it.

        Where the text before is another one than generation sees, as gpt-oss' that drops the thoughts before a tool's
        call once the answer is there, the response stands behind the generation prompt instead.
        """
        through = self._beginning(index + 1).text
        if not index:  # a template may look at the first message, or write what comes before any with it
            opening, _ = self._opening([], _QUESTION)
            if opening and through.startswith(opening):
                return through, len(opening), True
        prompt = self._beginning(index, True).text
        if through.startswith(prompt):
            return through, len(prompt), True
        start = self._ends.undivided(len(os.path.commonprefix([prompt, through])), prompt, through)
        before = self._ends.core(self._beginning(index).text)[0] if index else ""
        if start >= len(before):
            return through, start, False
        opening, head = self._opening(self.messages[:index], self.messages[:index])
        if opening and head == self._opening(_QUESTION, _QUESTION)[1] and through.startswith(opening):
            return prompt + through[len(opening) :], len(prompt), True
        raise DataError(
            f"{self._where}: the chat template writes the text before messages[{index}] otherwise when the assistant "
            "is to answer than when it has, so what it says there cannot be told apart; learn every token (loss_on: "
            "all), or name another template (data.chat_template)"
        )

    def _opening(self, messages: Sequence[Message], asked: Sequence[Message]) -> tuple[str, str]:
        """The text before an answer to messages, the beginning of its turn included, and what stands between that and
        its content; the beginning is what the generation prompt adds to the messages `asked`.

        The former is "" where the answer's text has no such beginning.
        """
        before, prompt = (self._rendered(asked, prompted).text for prompted in (False, True))
        answered = [*messages, {"role": "assistant", "content": PROBE}]
        said = self._rendered(answered).text.partition(PROBE)[0]
        begun, turn, head = said.rpartition(prompt.removeprefix(before) or PROBE)
        return (begun + turn, head) if turn else ("", head)

    def _others(self, text: str, learnt: Sequence[int]) -> list[tuple[int, int]]:
        """The ranges of messages of other roles than the assistant's; one for successive ones of a role in one turn."""
        ranges, taken, behind = [], set(learnt), 0
        for first in learnt:
            if first < behind:
                continue
            role = self.messages[first]["role"]
            other = [*self.messages[:first], {**self.messages[first], "content": PROBE}]
            begun, probe, _ = self._rendered(other).text.partition(PROBE)
            through, behind = "", first
            while behind == first or not text.startswith(through):
                behind += 1
                through = self._beginning(behind).text
                if behind not in taken or self.messages[behind]["role"] != role:
                    break
            if not (probe and text.startswith(begun) and text.startswith(through) and len(begun) <= len(through)):
                raise DataError(
                    f"{self._where}: the chat template does not write messages[{first}], the {role}'s, by itself, so "
                    "it cannot be told apart; learn other tokens (loss_on: responses, or all)"
                )
            ranges.append((len(begun), len(through)))
        return ranges

    def _rewritten(self, text: str, learnt: Sequence[int]) -> dict[int, RenderedChat]:
        """The learnt turns that a conversation's text has otherwise than the text that ends with them → the latter."""
        rewritten = {}
        for index in learnt if self._ends.rewrites else ():
            if index + 1 < len(self.messages):
                through = self._beginning(index + 1)
                if self._ends.last(through.text, text)[1] is None:
                    rewritten[index] = self._without_closing(through, self.turns.index(index) + 1)
        return rewritten

    def _without_closing(self, chat: RenderedChat, turns: int) -> RenderedChat:
        """The marks up to the end of the last turn; where they are more than the turns, those that hold anything."""
        last = len(chat.text.removesuffix(self._ends.closing))
        marks = [(start, min(end, last)) for start, end in chat.responses if start < last]
        if len(marks) > turns:
            marks = [(start, end) for start, end in marks if start < end]
        return chat._replace(responses=marks)

    def _marked(self, chat: RenderedChat, turns: Sequence[int], learnt: Sequence[int]) -> list[tuple[int, int]]:
        """The marked responses of the learnt turns; a turn's marks follow those of the messages before it."""
        if not learnt or len(learnt) == len(turns):
            return chat.responses if learnt else []
        runs = [(is_learnt, next(run)) for is_learnt, run in itertools.groupby(turns, learnt.__contains__)]
        before = (self._without_closing(self._beginning(at), turns.index(at)) for _, at in runs[1:])
        starts = [0, *(len(part.responses) for part in before)]
        ends = [*starts[1:], len(chat.responses)]
        kept = [(start, end) for (is_learnt, _), start, end in zip(runs, starts, ends, strict=True) if is_learnt]
        return [response for start, end in kept for response in chat.responses[start:end]]
