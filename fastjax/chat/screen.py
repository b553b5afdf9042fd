"""Answers shown as they come: on a terminal with dimmed thoughts, in a pipe as plain text.

What a model says is shown as text: its control characters, by which it could steer the terminal, are made visible.
"""

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from fastjax.chat.voices import Asked

#: C0 and C1 control characters → what is shown; new lines and tabs stay.
_CONTROL = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\n\t"}
_CONTROL |= {0x7F: "\u2421"} | dict.fromkeys(range(0x80, 0xA0), "\ufffd")


def visible(text: str) -> str:
    """A text whose control characters steer no terminal."""
    return text.translate(_CONTROL)


class Screen:
    """Where a conversation is shown.

    Attributes:
        asks: whether a person answers: input and output are a terminal.
    """

    def __init__(self, output: Console | None = None, notes: Console | None = None, asks: bool | None = None):
        """Take the outputs.

        Args:
            output: of answers; None: standard output.
            notes: of all else; None: the same on a terminal, standard error otherwise.
            asks: None: found out.
        """
        self._output = output or Console(highlight=False, soft_wrap=True)
        terminal = self._output.is_terminal
        self.asks = terminal and sys.stdin.isatty() if asks is None else asks
        self._notes = notes or (self._output if terminal else Console(stderr=True, highlight=False, soft_wrap=True))

    def note(self, text: str) -> None:
        """Tell something beside the conversation."""
        self._notes.print(Text(visible(text), style="dim"))

    def error(self, text: str) -> None:
        """Tell what went wrong."""
        self._notes.print(Text(visible(text), style="red"))

    def answer(self, asked: Asked) -> None:
        """Show an answer as it comes; Ctrl-C of a person ends it."""
        kind, blank = "content", True
        with self._interruptible() as stopped:
            while not asked.done and not stopped():
                for delta in asked.step():
                    if delta.kind != kind and not blank:
                        self._say("\n\n", kind)
                    kind, blank = delta.kind, False
                    self._say(delta.text, kind)
            if not asked.done:
                asked.cancel()
        self._say("\n", "content")
        self.note(asked.status())

    def compare(self, several: Sequence[Asked]) -> None:
        """Show answers side by side; in a pipe one after another."""
        terminal = self._output.is_terminal
        with self._interruptible() as stopped:
            if terminal:
                self._grow_side_by_side(several, stopped)
            for asked in several:
                while not asked.done and not stopped():
                    asked.step()
                if not asked.done:
                    asked.cancel()
        if terminal:
            self._output.print(self._table(several, None))
        for asked in several if not terminal else ():
            self._output.out(f"== {asked.voice.name}\n{asked.reply.reply().content}", highlight=False)
        for asked in several:
            self.note(asked.status())

    @contextlib.contextmanager
    def _interruptible(self) -> Iterator[Callable[[], bool]]:
        """Whether a person has pressed Ctrl-C within it; the second time leaves.

        An exception at any place could leave an engine's step half done, and its state lost.
        """
        pressed = 0

        def press(number: int, frame: FrameType | None) -> None:
            nonlocal pressed
            pressed += 1
            if pressed > 1:
                sys.exit(130)

        before = signal.signal(signal.SIGINT, press) if self.asks else None
        try:
            yield lambda: pressed > 0
        finally:
            if before is not None:
                signal.signal(signal.SIGINT, before)

    def _grow_side_by_side(self, several: Sequence[Asked], stopped: Callable[[], bool]) -> None:
        height = max(4, self._output.height - 4)
        with Live(console=self._output, transient=True, refresh_per_second=8) as live:
            while not all(asked.done for asked in several) and not stopped():
                for asked in several:
                    if not asked.done:
                        asked.step()
                live.update(self._table(several, height))

    def _table(self, several: Sequence[Asked], height: int | None) -> Table:
        """The answers in columns, of each as many last lines as there is room for."""
        table = Table(expand=True, box=None, padding=(0, 1), header_style="bold")
        width = max(8, self._output.width // len(several) - 2)
        cells = []
        for asked in several:
            table.add_column(Text(asked.voice.name), ratio=1, overflow="fold")
            reply = asked.reply.reply()
            text = Text(visible(reply.reasoning), style="dim")
            text.append(("\n\n" if reply.reasoning and reply.content else "") + visible(reply.content), "not dim")
            lines = text.wrap(self._output, width)
            cells.append(Text("\n").join(lines if height is None else lines[-height:]))
        table.add_row(*cells)
        return table

    def _say(self, text: str, kind: str) -> None:
        terminal = self._output.is_terminal
        if kind == "reasoning":
            self._notes.out(visible(text), style="dim", highlight=False, end="")
        else:
            self._output.out(visible(text) if terminal else text, highlight=False, end="")
