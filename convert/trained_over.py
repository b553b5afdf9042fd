"""The base that an adapter was trained over: its name and its matrices' format as the run held them.

An adapter belongs to these values: over a model in NF4 it is another one than over the same in 16 bits. They are noted
in the header of the adapter's arrays, where PEFT and safetensors read past them.
"""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from convert.errors import ConvertError, listed
from convert.formats import FORMATS
from convert.formats.nf4_format import NF4_NESTED
from convert.model.spec import QUANTIZED
from convert.tensor_file import read_metadata
from convert.weights import Weights

_KEY = "trained_over"
_PLAIN = "16 bits"
_OPTION = "load_in_4bit (of convert --base_in_nf4)"


class TrainedOver(NamedTuple):
    """A base as it was held.

    Attributes:
        name: Its folder, or its name on the hub.
        revision: Of that name.
        format: Of the layers' matrices: the coarsest one's `convert.formats.Format.target`, or "16 bits".
        when_read: Whether the matrices of a folder with more bits were quantised as they were read, to NF4 with blocks
            of 64 and nested scales.
        skipped: Modules that were not quantised then.
    """

    name: str
    revision: str | None
    format: str
    when_read: bool = False
    skipped: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        """The format in words."""
        label = next((form.label for form in FORMATS.values() if form.target == self.format), self.format)
        return f"{label} (but {listed(self.skipped)})" if self.skipped else label

    @property
    def told(self) -> str:
        """The base in words."""
        where = f"{self.name}{'' if self.revision is None else f'@{self.revision}'}"
        return f"{where} in {self.kind}{', quantised as it was read' if self.when_read else ''}"

    def metadata(self) -> dict[str, str]:
        """The entry for the header of the adapter's arrays."""
        return {_KEY: json.dumps(self._asdict())}


def held_as(
    weights: Weights, in_nf4: bool, *, name: str, revision: str | None = None, skipped: Iterable[str] = ()
) -> TrainedOver:
    """A base as it is held.

    Args:
        weights: Its folder's.
        in_nf4: Whether its layers' matrices are quantised to NF4 unless they have 4 bits.
        name: Its folder, or its name on the hub.
        revision: Of that name.
        skipped: Modules that are not quantised.
    """
    formats = [FORMATS[weights.format(path)] for path, spec in weights.specs.items() if spec.kind in QUANTIZED]
    coarsest = min(formats, key=lambda form: form.bits)
    if in_nf4 and coarsest.bits > 4:
        return TrainedOver(name, revision, NF4_NESTED.target, True, tuple(sorted(skipped)))
    return TrainedOver(name, revision, coarsest.target if coarsest.bits <= 8 else _PLAIN)


def read_trained_over(file: str | os.PathLike[str]) -> TrainedOver | None:
    """The base of an adapter, as it was noted; None: it was not, as by other libraries.

    Args:
        file: The adapter's arrays.

    Raises:
        ConvertError: The file is damaged.
    """
    text = read_metadata(file).get(_KEY)
    try:
        raw: Any = None if text is None else json.loads(text)
        return None if raw is None else TrainedOver(**raw)._replace(skipped=tuple(map(str, raw["skipped"])))
    except (ValueError, TypeError, KeyError, RecursionError):
        raise ConvertError(f"{file}: __metadata__.{_KEY}: expected what fastjax writes, got {text!r:.200}") from None


def base_notes(named: str | None, over: TrainedOver | None, given: TrainedOver) -> list[str]:
    """Sentences for the user about a base unlike the one that an adapter was trained over.

    Args:
        named: The base in the adapter's settings.
        over: The base that it was trained over; None: its folder does not tell.
        given: The base that it is put on.
    """
    notes, name = [], Path(given.name).name
    if named and Path(named).name != name:
        notes.append(f"the adapter names {named} as its base; it was added to {name}, whose shapes fit")
    together = over is not None and over.when_read and given.when_read
    if over is None or (over.format == given.format and (not together or over.skipped == given.skipped)):
        return notes
    way = f"take that base for it: {over.name}"
    if together:
        way = "float32_modules (of convert --skip) keeps modules out"
    elif given.when_read:
        way = f"leave {_OPTION} out for it"
    elif over.when_read:
        way = f"{_OPTION} quantises this base so"
    other = f"{name} in {given.kind}, which is another model"
    return [*notes, f"the adapter was trained over {over.told}, and is added to {other}; {way}"]
