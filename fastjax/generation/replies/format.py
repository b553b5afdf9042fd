"""How a model's answers say reasoning and tool calls, found by rendering its chat template with probes."""

import dataclasses
import functools

from fastjax.data import Encoder
from fastjax.data.template import ChatTemplate
from fastjax.generation.replies.call_format import CallFormat
from fastjax.generation.replies.probes import Probes


@dataclasses.dataclass(frozen=True)
class ReplyFormat:
    """How answers are written.

    Attributes:
        reasoning: the texts before and behind a thought; None: there is none.
        calls: how calls are written; None: the template writes none, or in a form that is not read.
        channels: whether answers are messages with a header each, as those of gpt-oss (harmony).
        ends: texts that end turns.
    """

    reasoning: tuple[str, str] | None = None
    calls: CallFormat | None = None
    channels: bool = False
    ends: frozenset[str] = frozenset()

    @classmethod
    def of(cls, source: Encoder | ChatTemplate) -> "ReplyFormat":
        """The format of a chat template.

        Args:
            source: the template, or the encoder of a tokenizer with one.

        Returns:
            The format; of an encoder without chat template one that takes all for content.
        """
        if isinstance(source, Encoder):
            if not source.tokenizer.chat_template:
                return cls()
            source = source.template
        probes = Probes(source)
        ends = source.turns.ends
        if probes.has_channels:
            return cls(channels=True, ends=ends)
        return cls(probes.reasoning(), probes.calls(), ends=ends)

    @property
    def takes_tools(self) -> bool:
        """Whether calls are read."""
        return self.calls is not None or self.channels

    @functools.cached_property
    def markers(self) -> frozenset[str]:
        """Texts that part a reply, which may be special tokens."""
        if self.channels:
            return frozenset(CHANNEL_MARKERS)
        found = [*(self.reasoning or ())]
        if self.calls is not None:
            found += [*self.calls.markers, *self.calls.closers, self.calls.opening, self.calls.before]
            found += [self.calls.between, *self.calls.closing]
            argument = self.calls.argument
            found += [] if argument is None else [argument.before, argument.text_between or "", argument.after]
            found += [] if self.calls.literal is None else [self.calls.literal.quote]
        return frozenset(found)

    def parts_reply(self, name: str) -> bool:
        """Whether a special token's name belongs to the format."""
        return any(name in marker for marker in self.markers)

    def begins_in_thought(self, prompt: str) -> bool:
        """Whether a prompt ends within the assistant's reasoning.

        Args:
            prompt: its text, special tokens included.
        """
        if self.channels:
            begin, message, behind = prompt.rpartition("<|message|>")
            header = begin.rpartition("<|start|>")[2]
            return bool(message) and "analysis" in header and not self._ended(behind)
        if self.reasoning is None:
            return False
        opening, closing = self.reasoning
        _, found, behind = prompt.rpartition(opening)
        return bool(found) and closing not in behind and not self._ended(behind)

    def _ended(self, text: str) -> bool:
        return any(end in text for end in self.ends)


CHANNEL_MARKERS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
"""Special tokens of harmony (github.com/openai/harmony)."""
