"""Limits of rendering a chat template, a program that comes with a model and may never end.

The parsed template is changed: its output, sums, slices and lists pass through filters that charge a budget, and so
does every turn of a loop and every call of a macro or block. The sandbox's hooks for operators and calls do the same,
and so do the filters. A value that can be much larger than its operands is charged before it is made. A budget belongs
to one rendering.

The clock is processor time, so that a busy or sleeping machine refuses nothing. It is read now and then between
operations; the size of its operands limits the time of one operation.

Rendering stays in this process: of GSM8K's rows one takes 12 to 43 µs, charges included, and as long without them. A
worker under the system's limits would start in 0.12 s of processor time with Jinja alone, in 0.46 with all that finds
responses, and a row there and back takes 32 to 48 µs.
"""

import functools
import re
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jinja2
import jinja2.nodes as nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

SECONDS = 2.0
"""Processor time of one rendering."""

CHARACTERS = 100_000_000
"""Characters of one rendering, intermediate values included; see `_ITEM`."""

SOURCE = 1_000_000
"""Characters of a template."""

_ITEM = 100
"""Charge for an item of a list or mapping, in characters: about its memory and time."""

_SLOW = 100
"""Charge for a character in slow filters."""

_WORD = 20
"""Charge for a character that may become a word of its own in a list."""

_BITS = 100_000
"""Binary digits of an integer, at most."""

_LOOK = 64
"""Charges between two readings of the clock."""

BUDGET = "budget "
"""The budget's name among a template's variables; its space keeps it out of a template's reach."""

_STEP, _MADE, _CUT, _ADD, _CONCAT = "step ", "made ", "cut ", "add ", "concat "

# Tuples, since this is asked for everything that a template does, and a union is made anew each time.
_TEXT = (str, bytes)
_SIZED = (list, tuple, dict, set, range)

_NUMBER = re.compile(r"\d+")


class Budget:
    """The remaining time and size of one rendering."""

    __slots__ = ("_charges", "_end", "_left", "_start")

    def __init__(self):
        self._left = CHARACTERS
        self._charges = 0
        self._start = time.perf_counter()
        self._end: float | None = None

    def charge(self, characters: int) -> None:
        """Charge characters.

        Args:
            characters: Their number.

        Raises:
            jinja2.TemplateRuntimeError: The budget is spent.
        """
        self._left -= characters
        self._charges += 1
        if self._left < 0:
            raise jinja2.TemplateRuntimeError(f"it makes more than {CHARACTERS:,} characters")
        if not self._charges % _LOOK and time.perf_counter() - self._start > SECONDS / 2:
            # The processor's clock is slow to read, and is started when half of the time may be over.
            now = time.thread_time()
            self._end = self._end or now + SECONDS / 2
            if now > self._end:
                raise jinja2.TemplateRuntimeError(f"it takes more than {SECONDS:g} seconds")

    def charge_value(self, value: Any) -> None:
        """Charge a new value with all its contents.

        So no value ever exceeds the budget, shared parts counted at each occurrence.

        Args:
            value: The value.

        Raises:
            jinja2.TemplateRuntimeError: The budget is spent.
        """
        self.charge(len(value) if type(value) is str else _deep(value))


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox with charges; its templates are rendered with a `Budget` as the variable `BUDGET`."""

    intercepted_binops = frozenset(("*", "**", "%"))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Charge an operator before its execution, and its result."""
        budget = context.parent[BUDGET]
        numbers = isinstance(left, int) and isinstance(right, int)
        if operator == "*":
            if numbers:
                _check_bits(left.bit_length() + right.bit_length())
            for repeated, times in ((left, right), (right, left)):
                if isinstance(times, int) and not isinstance(repeated, int | float):
                    budget.charge(_deep(repeated) * max(times, 0))
        elif operator == "**" and numbers:
            _check_bits(left.bit_length() * max(right, 1))
        elif operator == "%" and isinstance(left, _TEXT):
            budget.charge(_formatted(str(left), "%", (right,)))
        result = self.binop_table[operator](left, right)
        budget.charge_value(result)
        return result

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Charge a call before its execution, and its result."""
        budget = context.parent[BUDGET]
        if type(getattr(function, "__self__", None)) is not dict:
            name = getattr(function, "__name__", None)
            # Jinja wraps the methods that format.
            owner = getattr(getattr(function, "__wrapped__", function), "__self__", None)
            if isinstance(owner, _TEXT):
                budget.charge(_of_text(name, owner, (*args, *kwargs.values())))
            elif name == "strftime_now":
                budget.charge(_ITEM * _deep(args))
        result = super().call(context, function, *args, **kwargs)
        budget.charge_value(result)
        return result

    def from_string(self, source: Any, *args: Any, **kwargs: Any) -> jinja2.Template:
        """Compile a template, whose filters charge too."""
        limited = {name: _limited_filter(name, filter_) for name, filter_ in self.filters.items()}
        self.filters = limited | {_STEP: _step, _MADE: _made, _CUT: _cut, _ADD: _add, _CONCAT: _concat}
        return super().from_string(source, *args, **kwargs)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _Limiter().visit(super()._parse(source, name, filename))


def _size(value: Any) -> int:
    """The charge for a value without its contents."""
    if isinstance(value, _TEXT):
        return len(value)
    return _ITEM * len(value) if isinstance(value, _SIZED) else 1


def _within(value: Any) -> Iterator[Any]:
    """A value and all its contents, shared parts at each occurrence."""
    stack = [value]
    while stack:
        item = stack.pop()
        yield item
        if isinstance(item, dict):
            stack += item.keys()
            stack += item.values()
        elif isinstance(item, list | tuple | set):
            stack += item


def _deep(value: Any) -> int:
    """The charge for a value with its contents, or any number above the budget."""
    if isinstance(value, str):
        return len(value)
    total = 0
    for item in _within(value):
        total += _size(item) + 1
        if total > CHARACTERS:
            break
    return total


def _number(value: Any) -> int:
    return abs(value) if isinstance(value, int) else 1


def _largest(values: Iterable[Any]) -> int:
    """The largest integer among values, or length of a text."""
    return max((len(value) if isinstance(value, str) else _number(value) for value in values), default=1)


def _of_text(name: str | None, text: str | bytes, args: tuple[Any, ...]) -> int:
    """The size of the result of a text's method, or of the same filter, at most."""
    if name == "join":
        joined = args[0] if args and isinstance(args[0], list | tuple) else ()
        return _deep(joined) + len(joined) * len(text)
    if name == "replace" and len(args) > 1 and isinstance(args[0], str) and isinstance(args[1], str):
        return len(text) + str(text).count(args[0]) * len(args[1])
    if name in ("split", "rsplit", "splitlines"):
        separator = args[0] if args and isinstance(args[0], str) and args[0] else None
        return len(text) + (_ITEM * str(text).count(separator) if separator else _WORD * len(text))
    if name == "expandtabs":
        return len(text) + str(text).count("\t") * _largest(args)
    if name in ("ljust", "rjust", "center", "zfill"):
        return len(text) + _largest(args)
    if name == "translate":
        return len(text) * max((_largest(table.values()) for table in args if isinstance(table, dict)), default=1)
    if name in ("format", "format_map"):
        return _formatted(str(text), "{", args)
    return len(text)


def _formatted(pattern: str, mark: str, args: tuple[Any, ...]) -> int:
    """The size of a formatted text at most: widths are numbers in the pattern or, by * and nested braces, arguments."""
    widths = sum(int(number[:20]) for number in _NUMBER.findall(pattern))
    total = len(pattern) + pattern.count(mark) * _deep(args) + widths
    if total <= CHARACTERS and ("*" in pattern or mark == "{"):
        total += sum(_number(value) for value in _within(args))
    return total


def _check_bits(bits: int) -> None:
    if bits > _BITS:
        raise jinja2.TemplateRuntimeError(f"it makes integers of more than {_BITS:,} binary digits")


def _of_filter(name: str, value: Any, args: tuple[Any, ...]) -> int:
    """The size of a filter's result and intermediate values at most."""
    if name in _QUICK:
        return _size(value)
    if name == "join":
        joined = value if isinstance(value, list | tuple) else ()
        return _deep(value) + (_size(value) + len(joined)) * _largest(args[:1])
    if name in ("replace", "center") and isinstance(value, str):
        return _of_text(name, value, args)
    if name == "format":
        return _formatted(str(value), "%", args)
    if name == "indent":
        return _deep(value) + (str(value).count("\n") + 1) * _largest(args)
    if name == "tojson":
        return _deep(value) * max(1, _largest(args))
    if name in ("batch", "slice"):
        return _size(value) + _ITEM * _largest(args)
    if name == "sum":
        return _size(value) * max((_size(item) for item in value), default=1) if isinstance(value, list | tuple) else 1
    if name in _ONE:
        return 1
    if isinstance(value, str):
        return len(value) * (_ITEM if name == "list" else _SLOW * _largest(args))
    return _deep(value)


_ONE = {"d", "default", "length", "count", "first", "last", "attr", "items", "float", "int", "abs", "round", "safe"}
"""Filters of constant time."""

_QUICK = {"trim", "upper", "lower", "capitalize", "e", "escape", "reverse", "map", "select", "selectattr", "reject"}
_QUICK |= {"rejectattr", "random"}
"""Fast filters with results no larger than their input."""


def _limited_filter(name: str, filter_: Callable[..., Any]) -> Callable[..., Any]:
    # Jinja passes a filter what this attribute says; the one around it always wants the context, and is by that never
    # called while a template is compiled.
    wanted = getattr(filter_, "jinja_pass_arg", None)
    wanted = wanted.name if wanted is not None else None

    @jinja2.pass_context
    @functools.wraps(filter_, updated=())
    def limited_filter(context: Any, value: Any = None, *args: Any, **kwargs: Any) -> Any:
        budget = context.parent[BUDGET]
        budget.charge(_of_filter(name, value, (*args, *kwargs.values())))
        if wanted is None:
            result = filter_(value, *args, **kwargs)
        else:
            passed = {"context": context, "eval_context": context.eval_ctx, "environment": context.environment}[wanted]
            result = filter_(passed, value, *args, **kwargs)
        budget.charge_value(result)
        return result

    return limited_filter


@jinja2.pass_context
def _step(context: Any, characters: int) -> None:
    context.parent[BUDGET].charge(characters)


@jinja2.pass_context
def _made(context: Any, value: Any) -> Any:
    context.parent[BUDGET].charge_value(value)
    return value


@jinja2.pass_context
def _cut(context: Any, value: Any) -> Any:
    context.parent[BUDGET].charge(_size(value))
    return value


@jinja2.pass_context
def _add(context: Any, *terms: Any) -> Any:
    budget = context.parent[BUDGET]
    if all(type(term) is str for term in terms):
        budget.charge(sum(map(len, terms)))
        return "".join(terms)
    total = terms[0]
    for term in terms[1:]:
        total = total + term
        budget.charge_value(total)
    return total


@jinja2.pass_context
def _concat(context: Any, *values: Any) -> str:
    context.parent[BUDGET].charge(sum(map(_deep, values)))
    return "".join(map(str, values))


class _Limiter(NodeTransformer):
    """Inserts charging filters into a template."""

    def visit_Output(self, node: nodes.Output) -> nodes.Output:
        self.generic_visit(node)
        free = nodes.TemplateData, nodes.Const, nodes.ExtensionAttribute
        for index, child in enumerate(node.nodes):
            if not isinstance(child, free) and getattr(child, "name", None) not in (_ADD, _CONCAT):
                node.nodes[index] = _filtered(child, _MADE)
        return node

    def visit_Add(self, node: nodes.Add) -> nodes.Expr:
        first, terms = node, []
        while isinstance(first, nodes.Add):
            terms.append(self.visit(first.right))
            first = first.left
        return _filtered(self.visit(first), _ADD, reversed(terms))

    def visit_Concat(self, node: nodes.Concat) -> nodes.Expr:
        self.generic_visit(node)
        return _filtered(node.nodes[0], _CONCAT, node.nodes[1:])

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:
        self.generic_visit(node)
        return _filtered(node, _CUT) if isinstance(node.arg, nodes.Slice) else node

    def _made(self, node: Any) -> nodes.Expr:
        self.generic_visit(node)
        stored = isinstance(node, nodes.Tuple) and node.ctx != "load"
        return node if stored or node.find(nodes.Name) is None else _filtered(node, _MADE)

    visit_List = visit_Tuple = visit_Dict = _made

    def _repeated(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        # What is written as it stands costs nothing but here, each time.
        texts = [data.data for data in node.find_all(nodes.TemplateData)]
        texts += [const.value for const in node.find_all(nodes.Const) if isinstance(const.value, str)]
        charged = _filtered(nodes.Const(1 + sum(map(len, texts)), lineno=node.lineno), _STEP)
        node.body.insert(0, nodes.ExprStmt(charged, lineno=node.lineno))
        return node

    visit_For = visit_Macro = visit_CallBlock = visit_Block = _repeated


def _filtered(node: nodes.Expr, name: str, args: Iterable[nodes.Expr] = ()) -> nodes.Filter:
    return nodes.Filter(node, name, list(args), [], None, None, lineno=node.lineno)
