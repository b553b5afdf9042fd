"""Code of pages and notebooks, read and not run: the project's names in it are there, and take what they are given."""

import ast
import builtins
import dataclasses
import importlib
import inspect
import sys
import typing
from typing import Any

from flax import nnx

from fastjax.execution.language_model import Model
from fastjax.language_model import LanguageModel, ModelHandle

#: Of whose names is read; of other packages the modules and what is imported from them.
OWN = ("fastjax", "convert", "pallas_kernels")


class Instance(typing.NamedTuple):
    """A variable of a known class."""

    of: type


class Literal(typing.NamedTuple):
    """A variable with a known value, such as a number or a text."""

    value: Any


class _Names(dict):
    """A module's names for an annotation; what is imported for type checkers alone may be anything."""

    def __missing__(self, name: str) -> Any:
        return Any


class Reader(ast.NodeVisitor):
    """Reads statements in their order.

    Attributes:
        names: of imports, their values; of variables, `Instance` or `Literal` as far as they are known.
        calls: number of calls whose arguments were checked.
    """

    def __init__(self, **names: Any):
        self.names, self.calls = dict(names), 0

    def read(self, code: str) -> "Reader":
        """Read more code.

        Raises:
            ImportError, AttributeError, TypeError: a name that is not there, or arguments that it does not take.
            ConfigError: values that settings refuse.
            SyntaxError: code that is none.
        """
        self.visit(ast.parse(code))
        return self

    def visit_Import(self, node: ast.Import) -> None:
        for name in node.names:
            module = importlib.import_module(name.name)
            self.names[name.asname or name.name.partition(".")[0]] = (
                module if name.asname else importlib.import_module(name.name.partition(".")[0])
            )

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for name in node.names:
            module = importlib.import_module(node.module or "")
            if not hasattr(module, name.name):
                importlib.import_module(f"{node.module}.{name.name}")
            self.names[name.asname or name.name] = getattr(module, name.name)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        own = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
        inside = Reader(**{name: value for name, value in self.names.items() if name not in {a.arg for a in own}})
        for statement in node.body:
            inside.visit(statement)
        self.names.pop(node.name, None)
        self.calls += inside.calls

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        value = self.value_of(node.value)
        for target in node.targets:
            parts = target.elts if isinstance(target, ast.Tuple) else [target]
            values = typing.get_args(value.of) if isinstance(value, Instance) and len(parts) > 1 else (value,)
            for number, part in enumerate(parts):
                if isinstance(part, ast.Name):
                    self.names.pop(part.id, None)
                    found = values[number] if number < len(values) else None
                    if isinstance(found, Instance | Literal):
                        self.names[part.id] = found
                    elif len(parts) > 1 and isinstance(found, type):
                        self.names[part.id] = Instance(found)

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        function = self.value_of(node.func)
        if not callable(function) or not getattr(function, "__module__", "").startswith(OWN):
            return
        if any(isinstance(one, ast.Starred) for one in node.args):
            return
        given = {one.arg: None for one in node.keywords if one.arg is not None}
        first = (None,) if self._is_method(node.func) else ()
        signature = inspect.signature(function)
        whole = all(one.arg is not None for one in node.keywords)
        (signature.bind if whole else signature.bind_partial)(*first, *(None for _ in node.args), **given)
        self.calls += 1
        if dataclasses.is_dataclass(function) and isinstance(function, type):
            self._make(function, {one.arg: one.value for one in node.keywords if one.arg is not None})

    def _make(self, kind: type, given: dict[str, ast.expr]) -> None:
        """Make settings of the values that are known; those that are not keep their defaults."""
        missing = (dataclasses.MISSING, dataclasses.MISSING)
        if any((field.default, field.default_factory) == missing for field in dataclasses.fields(kind)):
            return
        values = {name: self.value_of(value) for name, value in given.items()}
        kind(**{name: value.value for name, value in values.items() if isinstance(value, Literal)})

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.generic_visit(node)
        self.value_of(node)

    def _is_method(self, node: ast.expr) -> bool:
        """Whether a function is found in the class of an instance, and takes it first."""
        if not isinstance(node, ast.Attribute) or not isinstance(held := self.value_of(node.value), Instance):
            return False
        return inspect.isfunction(inspect.getattr_static(_has(held.of, node.attr), node.attr))

    def value_of(self, node: ast.expr) -> Any:
        """An expression's value or `Instance`; None: it is not known."""
        if isinstance(node, ast.Name):
            return self.names.get(node.id)
        if isinstance(node, ast.Attribute):
            return self._attribute(self.value_of(node.value), node.attr)
        if isinstance(node, ast.Call):
            function = self.value_of(node.func)
            if isinstance(function, type):
                return Instance(function) if function.__module__.startswith(OWN) else None
            return self._returned(function)
        try:
            return Literal(ast.literal_eval(node))
        except ValueError:
            return None

    def _attribute(self, held: Any, name: str) -> Any:
        if isinstance(held, Literal):
            return None
        if not isinstance(held, Instance):
            ours = inspect.ismodule(held) or getattr(held, "__module__", "").startswith(OWN)
            return getattr(held, name) if held is not None and ours else None
        if not held.of.__module__.startswith(OWN) or issubclass(held.of, nnx.Module):  # whose parts are not declared
            return None
        for kind in _has(held.of, name).__mro__:
            if name in vars(kind).get("__annotations__", {}):
                return _instance(vars(kind)["__annotations__"][name], vars(sys.modules[kind.__module__]))
        found = inspect.getattr_static(_has(held.of, name), name)  # AttributeError: no such name
        if isinstance(found, property):
            return self._returned(found.fget)
        return getattr(_has(held.of, name), name)

    def _returned(self, function: Any) -> Any:
        if not callable(function) or not getattr(function, "__module__", "").startswith(OWN):
            return None
        function = inspect.unwrap(function)
        return _instance(getattr(function, "__annotations__", {}).get("return"), getattr(function, "__globals__", {}))


def _has(kind: type, name: str) -> type:
    """The class that has a name of an instance's: a handle's own, or its value's."""
    return LanguageModel if kind is ModelHandle and not hasattr(kind, name) else kind


def _instance(hint: Any, names: dict[str, Any]) -> Instance | None:
    """The instance that an annotation describes; None: it is neither a class nor a tuple of classes."""
    if isinstance(hint, str):
        hint = eval(hint, {}, _Names(vars(builtins) | names))
    if typing.get_origin(hint) is tuple:
        return Instance(hint)
    if hint is Model:  # pages hold handles
        return Instance(ModelHandle)
    return Instance(hint) if isinstance(hint, type) else None
