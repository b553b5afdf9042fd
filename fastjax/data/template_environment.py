"""The Jinja environment of chat templates.

It equals transformers': sandboxed Jinja with trimmed blocks, `raise_exception`, `strftime_now`, a `tojson` without HTML
escapes, the `generation` tag. It is built here because transformers' own imports torch if it is installed, and has no
limits (`template_limits`).
"""

import functools
import json
import re
from collections.abc import Callable
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser

from fastjax.data.template_limits import LimitedEnvironment


class _Mark(str):
    """An empty piece of a rendering, recognised by identity. A macro joins its pieces, which loses the mark: responses
    in macros are found like unmarked ones.
    """

    def __str__(self) -> str:
        return self  # and not a plain copy


START, END = _Mark(), _Mark()
"""The pieces before and behind a response in a rendering."""


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %} … {% endgeneration %}` puts a mark before and behind a response."""

    tags = {"generation"}
    start, end = START, END

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        start, end = (jinja2.nodes.Output([self.attr(name, lineno=line)], lineno=line) for name in ("start", "end"))
        # What a response sets stays within it, as in transformers, which makes it a block of its own.
        return jinja2.nodes.Scope([start, *body, end], lineno=line)


_DICT = frozenset(dir(dict))


class _Environment(LimitedEnvironment):
    """The sandbox with limits, and a fast path for lookups in messages."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        if type(obj) is dict and attribute not in _DICT:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)


class _Namespace(jinja2.utils.Namespace):
    """Jinja's namespace, without the underscored attributes by which a template could leave the sandbox."""

    def __init__(*args: Any, **kwargs: Any):
        # No names for the positional arguments, so that a template may set an attribute called self.
        self, args = args[0], args[1:]
        attributes = dict(*args, **kwargs)
        for name in attributes:
            _check_attribute(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)


class _Dict:
    """`dict` for templates: callable, without access to the class."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict:
        return dict.fromkeys(*args)


def _check_attribute(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a chat template may not set the attribute {name!r}")


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    # Special tokens that are hidden in content (special_texts) stay as long as they are.
    return _ESCAPE.sub(lambda found: chr(int(found[1], 16)) if found[1] else found[0], text) if ensure_ascii else text


_ESCAPE = re.compile(r"\\(?:u(fd[de][0-9a-f])|.)")


def strftime_at(moment: str | None) -> Callable[[str], str]:
    """The function `strftime_now` of templates.

    Args:
        moment: the time that it tells, in ISO 8601; None: that of each call.
    """

    def strftime_now(pattern: str) -> str:
        return (datetime.now() if moment is None else datetime.fromisoformat(moment)).strftime(pattern)

    return strftime_now


@functools.lru_cache(maxsize=16)
def variables_of(source: str) -> frozenset[str]:
    """The names of the variables that a template reads or sets.

    Args:
        source: The source of a template that `compile_template` takes.
    """
    return frozenset(name.name for name in _environment().parse(source).find_all(jinja2.nodes.Name))


@functools.lru_cache(maxsize=16)
def compile_template(source: str) -> jinja2.Template:
    """Compile a template; it is rendered with a `Budget` as the variable `BUDGET`.

    Args:
        source: The Jinja source.

    Returns:
        The template, cached by source.

    Raises:
        Exception: Whatever Jinja and Python raise for a source that is not valid, or too deep.
    """
    environment = _environment()
    environment.filters["tojson"] = _tojson
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": strftime_at(None),
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    del environment.globals["lipsum"]
    template = environment.from_string(source)
    # Each rendering copies these, and the chain of mappings that they are is slow to copy.
    template.globals = dict(template.globals)
    return template


def _environment() -> _Environment:
    return _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols])
