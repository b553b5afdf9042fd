"""The deltas of a reply while it is parsed, and the functions that it may call."""

from collections.abc import Mapping, Sequence
from typing import Any

from fastjax.generation.replies.reply import Delta, Reply, ToolCall, new_id


class Tools:
    """The functions that a reply may call."""

    def __init__(self, tools: Sequence[Mapping[str, Any]]):
        """Take descriptions, each with its "function" or that itself."""
        functions = [tool.get("function", tool) for tool in tools]
        self._schemas: dict[str, Mapping[str, Any]] = {
            function["name"]: function.get("parameters") or {} for function in functions
        }

    def __bool__(self) -> bool:
        return bool(self._schemas)

    def __contains__(self, name: str) -> bool:
        return name in self._schemas

    def types(self, name: str, argument: str) -> tuple[str, ...]:
        """JSON types of an argument; empty: not known."""
        properties = self._schemas[name].get("properties")
        schema = properties.get(argument) if isinstance(properties, Mapping) else None
        found = schema.get("type") if isinstance(schema, Mapping) else None
        return (found,) if isinstance(found, str) else tuple(found) if isinstance(found, list) else ()


class Sink:
    """Deltas not yet taken, and the reply so far."""

    def __init__(self) -> None:
        self._deltas: list[Delta] = []
        self._texts: dict[str, list[str]] = {"reasoning": [], "content": []}
        self._calls: list[ToolCall] = []
        self._begun = 0
        self._current: tuple[str, str, list[str]] | None = None

    def say(self, kind: Any, text: str) -> None:
        """Add text of the thought or the content."""
        if text:
            self._texts[kind].append(text)
            self._add(Delta(kind, text))

    def begin(self, name: str) -> None:
        """Begin a call."""
        self._current = new_id(), name, []
        self._begun += 1
        self._add(Delta("tool_call", "", self._begun - 1, self._current[0], name))

    def argue(self, text: str) -> None:
        """Add text to the arguments of the call that was begun."""
        assert self._current is not None
        self._current[2].append(text)
        self._add(Delta("tool_call", text, self._begun - 1))

    def complete(self) -> None:
        """Complete the call that was begun."""
        assert self._current is not None
        id_, name, arguments = self._current
        self._calls.append(ToolCall(id_, name, "".join(arguments)))
        self._current = None

    def said(self, kind: str) -> bool:
        """Whether there is text of the kind."""
        return bool(self._texts[kind])

    def taken(self) -> list[Delta]:
        """The deltas since the last call."""
        deltas, self._deltas = self._deltas, []
        return deltas

    def reply(self) -> Reply:
        """The reply so far."""
        return Reply("".join(self._texts["reasoning"]), "".join(self._texts["content"]), tuple(self._calls))

    def _add(self, delta: Delta) -> None:
        last = self._deltas[-1] if self._deltas else None
        if last is not None and (last.kind, last.index) == (delta.kind, delta.index):
            self._deltas[-1] = last._replace(text=last.text + delta.text)
        else:
            self._deltas.append(delta)
