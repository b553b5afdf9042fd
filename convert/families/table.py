"""What a family's table is made of: rows that give a checkpoint name, a tree path, a shape and a transform.

A family is data. Its rows are templates with ``{i}`` for the layer and shapes in named dimensions; `Family` fills
both in from a config.json. A new family is a new table, no new code here.
"""

import itertools
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from convert.errors import ConvertError, unexpected

Config = Mapping[str, Any]


@dataclass(frozen=True)
class Transform:
    """A reversible change of layout between file and tree.

    Attributes:
        load: File array -> tree array.
        save: Tree array -> file array.
    """

    load: Callable[[np.ndarray], np.ndarray]
    save: Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Row:
    """One tensor.

    Attributes:
        name: Its name in the checkpoint; in a table with ``{i}`` for the layer's number.
        path: Its path in the model's tree, likewise.
        shape: Its dimensions in the file; in a table as names of the family's dimensions.
        when: In a table: the flag that the config must raise for the tensor to exist; None for always.
        transform: Change of layout on the way in and out; None for none.
    """

    name: str
    path: str
    shape: tuple[Any, ...]
    when: str | None = None
    transform: Transform | None = None


@dataclass(frozen=True)
class Ignored:
    """A checkpoint name that is read past.

    Attributes:
        pattern: Regular expression for the whole name.
        reason: Why, for people.
        when: The flag that the config must raise; None for always.
        same_as: Path of the tensor that it must equal byte for byte; None for unchecked.
        copied: Whether a folder that is written from this one gets the tensor as it is.
    """

    pattern: str
    reason: str
    when: str | None = None
    same_as: str | None = None
    copied: bool = False


@dataclass(frozen=True)
class Family:
    """A table and how to fill it in.

    Attributes:
        model_type: ``model_type`` in config.json.
        table: Rows; those with ``{i}`` stand together and are repeated layer by layer.
        ignored: Names to read past.
        dimensions: config -> the sizes that the rows' shapes name, and "L", the number of layers.
        flags: config -> the conditions that hold, for ``when``.
        defaults: What transformers takes for fields that config.json leaves out, where it is not Llama's.
        section: Key of config.json under which the text model's fields are; None: they stand at the top.
        modules: How names of modules in transformers and PEFT begin where the checkpoint's tensors begin otherwise.
        beside: Modules of the whole model, by their names in transformers, that are no part of the text model.
        others: The same family under other names in files, as other versions of the libraries write them.
    """

    model_type: str
    table: tuple[Row, ...]
    ignored: tuple[Ignored, ...]
    dimensions: Callable[[Config, str], dict[str, int]]
    flags: Callable[[Config, str], frozenset[str]]
    defaults: Config = field(default_factory=dict)
    section: str | None = None
    modules: Mapping[str, str] = field(default_factory=dict)
    beside: tuple[str, ...] = ()
    others: "tuple[Family, ...]" = ()

    def named_as(self, names: Iterable[str]) -> "Family":
        """The family itself, or the one of `others` whose layers a checkpoint's names have."""
        names = list(names)
        for family in self.others:
            start = next(row.name for row in family.table if "{i}" in row.name).partition("{i}")[0]
            if any(name.startswith(start) for name in names):
                return family
        return self

    def text_config(self, config: Config, file: str | os.PathLike[str] = "config.json") -> Config:
        """The fields of the text model.

        Raises:
            ConvertError: They should be a section of their own, and there is none.
        """
        if self.section is None:
            return config
        inner = config.get(self.section)
        if not isinstance(inner, dict):
            raise unexpected(str(file), self.section, "an object with the fields of the text model", inner)
        return inner

    def rows(self, config: Config, file: str | os.PathLike[str] = "config.json") -> tuple[Row, ...]:
        """All tensors of a model, in order: embeddings, layer by layer, norm, head.

        Args:
            config: Contents of config.json.
            file: Its path, for messages.

        Returns:
            Rows with the layer's number and the sizes filled in.

        Raises:
            ConvertError: A config field is missing or of the wrong type; the message names it.
        """
        sizes = self.dimensions(config, str(file))
        flags = self.flags(config, str(file))
        rows: list[Row] = []
        wanted = (row for row in self.table if row.when is None or row.when in flags)
        for layered, group in itertools.groupby(wanted, key=lambda row: "{i}" in row.name):
            templates = list(group)
            for i in range(sizes["L"]) if layered else (0,):
                for row in templates:
                    shape = tuple(sizes[name] for name in row.shape)
                    rows.append(Row(row.name.format(i=i), row.path.format(i=i), shape, row.when, row.transform))
        return tuple(rows)

    def ignores(self, name: str, config: Config, file: str | os.PathLike[str] = "config.json") -> Ignored | None:
        """The rule by which a checkpoint name is read past, or None."""
        flags = self.flags(config, str(file))
        for rule in self.ignored:
            if (rule.when is None or rule.when in flags) and re.fullmatch(rule.pattern, name):
                return rule
        return None

    def module_name(self, path: str) -> str:
        """What transformers and PEFT call a module of the tree: "layers.0.mlp.up_proj" -> "model.layers.0.mlp.up_proj".

        Raises:
            ConvertError: The family has no such module.
        """
        return _renamed(path, {_module(row.path): self._public(row) for row in self.table}, self.model_type)

    def module_path(self, name: str) -> str:
        """The way back from `module_name`.

        Raises:
            ConvertError: The family has no such module.
        """
        return _renamed(name, {self._public(row): _module(row.path) for row in self.table}, self.model_type)

    def unquantized(self, paths: Iterable[str]) -> list[str]:
        """Names of the modules that stay plain in a quantised folder, as ``llm_int8_skip_modules`` has them.

        Args:
            paths: The layers' matrices that are not quantised.

        Returns:
            Sorted: these, the head, and what stands beside the text model, which other libraries know without "model.".
        """
        named = (self.module_name(_module(path)) for path in paths)
        return sorted({*named, "lm_head", *self.beside, *(name.removeprefix("model.") for name in self.beside)})

    def is_layer_linear(self, name: str) -> bool:
        """Whether a module, by its name in PEFT, is a matrix inside a layer (what PEFT calls "all-linear")."""
        template, _ = _template(name)
        matrices = (row for row in self.table if "{i}" in row.name and row.path.endswith("_proj.weight"))
        return any(self._public(row) == template for row in matrices)

    def _public(self, row: Row) -> str:
        return _begun(_module(row.name), self.modules)


def nested(
    family: Family,
    *,
    model_type: str,
    files: Mapping[str, str],
    modules: Mapping[str, str],
    ignored: tuple[Ignored, ...],
    beside: tuple[str, ...] = (),
    others: tuple[Family, ...] = (),
) -> Family:
    """The family of checkpoints in which a family's model is one half.

    Args:
        family: Of the half that is read.
        model_type: Of the whole.
        files: How a tensor's name begins in the family's own checkpoints -> how it begins in these.
        modules: How a module's name begins in the family's own models -> how it begins in these.
        ignored: The rest.
        beside: The rest as modules.
        others: The same under other names.
    """
    own = tuple(replace(rule, pattern=rf"(language_model\.)?{rule.pattern}") for rule in family.ignored)
    whole = replace(family, section="text_config")
    return replace(
        whole,
        model_type=model_type,
        table=tuple(replace(row, name=_begun(row.name, files)) for row in family.table),
        ignored=(*own, *ignored),
        dimensions=lambda config, file: family.dimensions(whole.text_config(config, file), file),
        flags=lambda config, file: family.flags(whole.text_config(config, file), file),
        modules={files[start]: modules.get(start, start) for start in files},
        beside=beside,
        others=others,
    )


def size(config: Config, field: str, file: str, default: int | None = None) -> int:
    """A positive integer of config.json, of 31 bits.

    Args:
        config: Contents of config.json.
        field: Its key.
        file: Path of config.json, for the message.
        default: Value for an absent or null field; None if it must be there.

    Raises:
        ConvertError: It is missing or no positive integer.
    """
    value = config.get(field)
    if value is None and default is not None:
        return default
    if type(value) is not int or value <= 0:
        raise unexpected(file, field, "a positive integer", value)
    if value >= 2**31:
        raise unexpected(file, field, "a positive integer below 2³¹", value)
    return value


def flag(config: Config, field: str, file: str, default: bool) -> bool:
    """A boolean of config.json, or `default` where it is absent or null.

    Raises:
        ConvertError: It is something else.
    """
    value = config.get(field)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise unexpected(file, field, "true or false", value)
    return value


def _module(tensor: str) -> str:
    return tensor.rpartition(".")[0]


def _template(name: str) -> tuple[str, str]:
    """Take the layer's number out of a name: "layers.12.mlp" -> ("layers.{i}.mlp", "12")."""
    match = re.search(r"(?<=\.)\d+(?=\.)", name)
    if match is None:
        return name, ""
    return f"{name[: match.start()]}{{i}}{name[match.end() :]}", match.group()


def _begun(name: str, starts: Mapping[str, str]) -> str:
    """A name with its beginning exchanged."""
    start = next((start for start in starts if name.startswith(start)), "")
    return starts.get(start, "") + name.removeprefix(start)


def _renamed(name: str, names: Mapping[str, str], model_type: str) -> str:
    template, i = _template(name)
    if template not in names:
        raise ConvertError(f"{name}: no such module in the table of {model_type}")
    return names[template].replace("{i}", i)
