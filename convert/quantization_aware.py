"""The note that a result of quantisation-aware training carries, for the folders that are made of it."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from convert.errors import unexpected
from convert.files import read_json

#: In the folder of a result: what it was trained for.
FILE = "quantization_aware.json"


class QuantizationAware(NamedTuple):
    """The quantisation that a model is trained for.

    Attributes:
        weights: Format of the layers' matrices, a key of `fastjax.quantization.fake.WEIGHTS`.
        activations: Of their inputs, a key of `ACTIVATIONS` there; None: these stay.
        modules_to_not_quantize: Names of modules, or ends of names, that are left out.
    """

    weights: str
    activations: str | None = None
    modules_to_not_quantize: tuple[str, ...] = ()

    def write(self, folder: Path) -> None:
        """Write `FILE` into a folder."""
        (folder / FILE).write_text(json.dumps(self._asdict(), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> "QuantizationAware | None":
        """Read a folder's `FILE`; None without one.

        Raises:
            ConvertError: A file of another form.
        """
        if not (folder / FILE).is_file():
            return None
        raw = read_json(folder / FILE)
        names = raw.get("modules_to_not_quantize")
        texts = isinstance(names, list) and all(isinstance(name, str) for name in names)
        if raw.keys() != set(cls._fields) or not texts:
            raise unexpected(folder / FILE, "", f"the keys {', '.join(cls._fields)}, the last a list of names", raw)
        return cls(raw["weights"], raw["activations"], tuple(raw["modules_to_not_quantize"]))

    def differences(self, weights: str, activations: str | None, skip: Sequence[str]) -> list[str]:
        """How a folder that is made of the result is not what was trained, in clauses.

        Args:
            weights: Format of its matrices.
            activations: Of their inputs, as it tells servers; None: these stay.
            skip: Modules, or ends of names, that are left out of it.
        """
        if weights != self.weights:
            return [f"trained for {self.weights} ({FILE}), not for {weights}"]
        clauses = []
        if activations != self.activations:
            clauses.append(
                f"trained with inputs {_inputs(self.activations)} ({FILE}), and is written for inputs "
                f"{_inputs(activations)}"
            )
        if set(skip) != set(self.modules_to_not_quantize):
            left, here = (", ".join(names) or "nothing" for names in (self.modules_to_not_quantize, skip))
            clauses.append(f"trained with {left} left out ({FILE}), and is written with {here} left out")
        return clauses


def _inputs(activations: str | None) -> str:
    return "in 16 bits" if activations is None else f"in {activations}"
