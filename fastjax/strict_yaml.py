"""Strict YAML settings: every failure is a `YamlError` with the line.

PyYAML accepts duplicate keys (the last wins), unfolds aliases without bounds, recurses as deep as a file nests, and
lets its scalars' own exceptions out. All of these are a `YamlError` here. Numbers are YAML 1.2's (1e-4 is one), and a
date is a string.
"""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import yaml

from convert.errors import shorten
from convert.strict_json import MAX_DEPTH, MAX_DIGITS, has_surrogate
from fastjax.limits import MAX_YAML_VALUES


class YamlError(ValueError):
    """An error in a YAML text.

    Attributes:
        problem: Its description.
        line: From 1; None if unknown.
    """

    def __init__(self, problem: str, line: int | None = None):
        super().__init__(problem if line is None else f"line {line}: {problem}")
        self.problem, self.line = problem, line


class Document(NamedTuple):
    """A YAML document.

    Attributes:
        value: lists, mappings and scalars.
        root: the node that it was made of; None: the document is empty.
    """

    value: Any
    root: yaml.Node | None

    def line(self, path: Sequence[str | int]) -> int | None:
        """The line of a key or an item, from 1; of the last one on the way to it if it is not there; None: of neither.

        Args:
            path: keys and indices, from the outermost.
        """
        line, node = None, self.root
        for part in path:
            pairs = node.value if isinstance(node, yaml.MappingNode) else []
            inside: dict[Any, tuple[yaml.Node, yaml.Node]]
            inside = {key.value: (key, value) for key, value in pairs if isinstance(key, yaml.ScalarNode)}
            if isinstance(node, yaml.SequenceNode):
                inside = {index: (item, item) for index, item in enumerate(node.value)}
            if part not in inside:
                break
            key, node = inside[part]
            line = key.start_mark.line + 1
        return line


def parse(text: str) -> Any:
    """The value of a YAML document, as `read` reads it."""
    return read(text).value


def read(text: str) -> Document:
    """Parse a text of one YAML document.

    Args:
        text: The text.

    Raises:
        YamlError: Invalid YAML, a duplicate key, nesting deeper than `MAX_DEPTH`, more than `MAX_YAML_VALUES` values,
            an alias inside its own anchor, or a malformed scalar.
    """
    try:
        loader = _Loader(text)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise YamlError(f"a character that YAML does not allow: {error.character:#x}", line) from None
    try:
        node = loader.get_single_node()
        return Document(None if node is None else loader.construct_document(node), node)
    except yaml.MarkedYAMLError as error:
        line = None if error.problem_mark is None else error.problem_mark.line + 1
        problem = error.problem or str(error)
        if problem.startswith("but"):  # the second half of a sentence
            problem = f"{error.context}, {problem}"
        raise YamlError(shorten(problem), line) from None
    except (ValueError, OverflowError):  # of PyYAML's own code: an escape beyond Unicode, a directive's number
        raise YamlError("an escape or a directive that stands for nothing", loader.line + 1) from None


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with bounds and without duplicates."""

    def __init__(self, text: str):
        super().__init__(text)
        self.level = 0
        self.sizes: dict[yaml.Node, tuple[int, int]] = {}  # of a node: its values and its depth

    def fetch_flow_collection_start(self, TokenClass: type[yaml.Token]) -> None:
        # The scanner runs ahead of the composer, and visits every open bracket with each token.
        if self.flow_level > MAX_DEPTH:
            raise _problem(_TOO_DEEP, self.get_mark())
        super().fetch_flow_collection_start(TokenClass)

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        mark = self.peek_event().start_mark
        self.level += 1
        if self.level > MAX_DEPTH:
            raise _problem(_TOO_DEEP, mark)
        node = super().compose_node(parent, index)
        self.level -= 1
        if node is None or node.end_mark is None:
            raise _problem("an alias within what it stands for", mark)
        if node not in self.sizes:
            self.sizes[node] = self._size(node)
        values, depth = self.sizes[node]
        if values > MAX_YAML_VALUES:
            raise _problem(f"more than {MAX_YAML_VALUES} values, those of an alias counted wherever it stands", mark)
        if self.level + depth > MAX_DEPTH:
            raise _problem(_TOO_DEEP, mark)
        return node

    def _size(self, node: yaml.Node) -> tuple[int, int]:
        inner = node.value if isinstance(node, yaml.SequenceNode) else []
        if isinstance(node, yaml.MappingNode):
            inner = [part for pair in node.value for part in pair]
        sizes = [self.sizes[part] for part in inner]
        return 1 + sum(values for values, _ in sizes), 1 + max((depth for _, depth in sizes), default=0)

    def compose_scalar_node(self, anchor: str | None) -> yaml.ScalarNode:
        node = super().compose_scalar_node(anchor)  # pyright: ignore[reportArgumentType]
        if has_surrogate(node.value):
            raise _problem("an escape that is half a character (a lone surrogate)", node.start_mark)
        if node.tag in _NUMBERS and len(node.value) > MAX_DIGITS:
            raise _problem(f"a number of more than {MAX_DIGITS} digits", node.start_mark)
        return node

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)  # pyright: ignore[reportArgumentType]
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if (key.tag, key.value) in seen:
                    raise _problem(f"the same key twice: {shorten(key.value, 60)}", key.start_mark)
                seen.add((key.tag, key.value))
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError, TypeError):  # of the scalars' constructors
            kind = node.tag.removeprefix(_TAG)
            raise _problem(f"what cannot be read as {kind}: {shorten(str(node.value), 60)}", node.start_mark) from None


_TAG = "tag:yaml.org,2002:"
_NUMBERS = (f"{_TAG}int", f"{_TAG}float")
_OTHER = tuple(f"{_TAG}{kind}" for kind in ("binary", "set", "omap", "pairs"))  # nothing that JSON has
_TOO_DEEP = f"nested more than {MAX_DEPTH} deep"
_FLOAT = re.compile(
    r"[-+]?(?:(?:\d[\d_]*\.[\d_]*|\.\d[\d_]*)(?:[eE][-+]?\d+)?|\d[\d_]*[eE][-+]?\d+|\.(?:inf|Inf|INF))$|\.(?:nan|NaN|NAN)$"
)
_Loader.yaml_constructors = {tag: make for tag, make in yaml.SafeLoader.yaml_constructors.items() if tag not in _OTHER}
_Loader.yaml_implicit_resolvers = {
    first: [(tag, expression) for tag, expression in resolvers if tag not in (f"{_TAG}timestamp", f"{_TAG}float")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(f"{_TAG}float", _FLOAT, list("-+0123456789."))


def _problem(text: str, mark: yaml.Mark) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=text, problem_mark=mark)
