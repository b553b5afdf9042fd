"""PEFT's adapters on a mixture's experts, in files and in the tree.

PEFT adapts all experts' matrices as one parameter (``target_parameters``): "mlp.experts.gate_up_proj" and
"mlp.experts.down_proj". Its two wrappers are nested, so that the arrays of the inner one lie under
"mlp.experts.base_layer". In a file A is [X·r, in], the expert slowest, and B [out, X·r], the expert fastest; in the
tree A is [X, r, in] and B [X, out, r], gate's rows before up's. The change of an expert's matrix is s · B · A.

Before transformers 5 each expert's projections are modules of their own, with an adapter each. Of gate and up, which
are one parameter now, A becomes [A of gate; A of up] and B diag(B of gate, B of up), of twice the rank.

PEFT before 0.19 takes the sizes of an expert's matrix [out, in] the other way round: A is [X·r, out], B [in, X·r], and
the change s · Aᵀ · Bᵀ. Sizes tell the two apart; where out = in, the version does.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
from jaxtyping import Shaped

from convert.adapter_config import EXPERT_PARAMETERS, AdapterConfig, targets_parameter
from convert.errors import ConvertError, unexpected
from convert.families import Family
from convert.model.paths import EXPERTS, WeightPath
from convert.model.spec import INTERLEAVED, WeightSpec
from convert.tensor_file import TensorInfo, read_tensor

_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_INNER = ".base_layer"
#: PEFT's version since which A belongs to the inputs of a matrix [out, in].
_SWAPPED_BEFORE = (0, 19)


class ExpertsShape(NamedTuple):
    """Matrices of a mixture's experts that have one adapter.

    Attributes:
        experts: X.
        rows: outputs of an expert, those of gate before those of up.
        columns: inputs.
        turns: number of projections whose rows lie by turns in transformers, and each expert transposed; 0: not so.
    """

    experts: int
    rows: int
    columns: int
    turns: int = 0


class ExpertsLayout(NamedTuple):
    """How an adapter's arrays lie in a file.

    Attributes:
        shape: of the matrices.
        rank: r.
        swapped: whether A belongs to the outputs.
        slowest: whether the expert is the slowest index of B too.
    """

    shape: ExpertsShape
    rank: int
    swapped: bool = False
    slowest: bool = False

    def tree_shape(self, leaf: str) -> tuple[int, int, int]:
        """Shape of "lora_A" or "lora_B" in the tree."""
        shape = self.shape
        a, b = (shape.experts, self.rank, shape.columns), (shape.experts, shape.rows, self.rank)
        return a if leaf == "lora_A" else b

    def to_tree(self, a: Shaped[np.ndarray, "Xr in"], b: Shaped[np.ndarray, "out Xr"]) -> tuple[np.ndarray, np.ndarray]:
        """A [X, r, in] and B [X, out, r] from a file's arrays."""
        experts, rank = self.shape.experts, self.rank
        first = a.reshape(experts, rank, -1)
        if self.slowest:
            second = b.reshape(-1, experts, rank).transpose(1, 0, 2)
        else:
            second = b.reshape(-1, rank, experts).transpose(2, 0, 1)
        if self.swapped:
            first, second = second.transpose(0, 2, 1), first.transpose(0, 2, 1)
        if self.shape.turns > 1:
            parts = second.reshape(experts, -1, self.shape.turns, rank)
            second = parts.transpose(0, 2, 1, 3).reshape(second.shape)
        return np.ascontiguousarray(first), np.ascontiguousarray(second)

    def to_file(
        self, a: Shaped[np.ndarray, "X r in"], b: Shaped[np.ndarray, "X out r"]
    ) -> tuple[np.ndarray, np.ndarray]:
        """The inverse of `to_tree`, as PEFT writes them now."""
        experts, rank, columns = a.shape
        if self.shape.turns > 1:
            parts = b.reshape(experts, self.shape.turns, -1, rank)
            b = parts.transpose(0, 2, 1, 3).reshape(b.shape)
        flat = b.transpose(1, 2, 0).reshape(b.shape[1], rank * experts)
        return np.ascontiguousarray(a.reshape(experts * rank, columns)), np.ascontiguousarray(flat)


class SingleExperts(NamedTuple):
    """The arrays of adapters on experts one by one, for one adapter on all of them.

    Attributes:
        parts: A and B of each expert, for each projection of the parameter; None: it has no adapter.
    """

    parts: tuple[tuple[tuple[TensorInfo, TensorInfo], ...] | None, ...]

    def stored(self) -> tuple[TensorInfo, TensorInfo]:
        """A and B of one adapter, by the shapes that PEFT's file would have."""
        present = [part for part in self.parts if part is not None]
        a, b = present[0][0]
        rank = len(present[0]) * len(present) * a.shape[0]
        shapes = (rank, a.shape[1]), (b.shape[0] * len(self.parts), rank)
        return a._replace(shape=shapes[0]), b._replace(shape=shapes[1])

    def places(self) -> Iterator[tuple[tuple[int, int, int], TensorInfo]]:
        """(projection, expert, 0 for A and 1 for B) and its array, for all of them."""
        for number, part in enumerate(self.parts):
            for expert, pair in enumerate(part or ()):
                yield from (((number, expert, side), info) for side, info in enumerate(pair))

    def to_tree(self, module: WeightPath) -> tuple[np.ndarray, np.ndarray]:
        """A [X, R, in] and B [X, out, R].

        Args:
            module: The adapter's, for messages.
        """
        present = [part for part in self.parts if part is not None]
        (first_a, first_b), *_ = present[0]
        rank, rows = first_a.shape[0], first_b.shape[0]
        a = np.empty((len(present[0]), rank * len(present), first_a.shape[1]), first_a.dtype)
        b = np.zeros((len(a), rows * len(self.parts), a.shape[1]), first_b.dtype)
        for position, part in enumerate(present):
            columns, number = slice(position * rank, (position + 1) * rank), self.parts.index(part)
            for expert, (one, other) in enumerate(part):
                a[expert, columns] = read_tensor(module, one)
                b[expert, number * rows : (number + 1) * rows, columns] = read_tensor(module, other)
        return a, b


def single_experts(
    arrays: Mapping[WeightPath, Mapping[int, TensorInfo]], file: object
) -> dict[WeightPath, SingleExperts]:
    """Adapters on experts one by one as one a parameter: its module -> their arrays.

    Args:
        arrays: Path of a projection's A or B -> expert -> its array.
        file: The file, for messages.

    Raises:
        ConvertError: An expert without an array, or with one of another shape.
    """
    modules: dict[WeightPath, SingleExperts] = {}
    for module in dict.fromkeys(map(parameter_module, arrays)):
        every = [
            [arrays.get(WeightPath(module.layer, EXPERTS, part, leaf), {}) for leaf in ("lora_A", "lora_B")]
            for part in _PARTS[module.part]
        ]
        present = [pair for pair in every if any(pair)]
        count = max(len(one) for pair in present for one in pair)
        kinds = [{(info.shape, info.dtype) for pair in present for info in pair[n].values()} for n in (0, 1)]
        alike = all(len(kind) == 1 and all(len(shape) == 2 for shape, _ in kind) for kind in kinds)
        if not alike or any(one.keys() != set(range(count)) for pair in present for one in pair):
            expected = f"an A [r, in] and a B [out, r] of one shape and dtype for each of the experts 0 to {count - 1}"
            raise unexpected(str(file), module, expected, [sorted(map(str, kind)) for kind in kinds])
        parts = [tuple((a[x], b[x]) for x in range(count)) if a else None for a, b in every]
        modules[module] = SingleExperts(tuple(parts))
    return modules


def expert_shapes(specs: Iterable[WeightSpec]) -> dict[WeightPath, ExpertsShape]:
    """The matrices with one adapter: path of the adapter's module -> their shape."""
    weights = {spec.path.module: spec for spec in specs if spec.kind == "experts"}
    shapes: dict[WeightPath, ExpertsShape] = {}
    for layer in dict.fromkeys(path.layer for path in weights):
        for parameter, parts in _PARTS.items():
            specs_of = [weights[WeightPath(layer, EXPERTS, part, "")] for part in parts]
            experts, _, columns = specs_of[0].shape
            rows = sum(spec.shape[1] for spec in specs_of)
            turns = len(parts) if specs_of[0].layout == INTERLEAVED else 0
            shapes[WeightPath(layer, EXPERTS, parameter, "")] = ExpertsShape(experts, rows, columns, turns)
    return shapes


def expert_module(specs: Mapping[str, WeightSpec], path: WeightPath) -> tuple[WeightPath, slice]:
    """The module with the adapter of an expert's projection, and the projection's rows of B.

    Args:
        specs: Path -> weight.
        path: Of the projection's weight.
    """
    module = parameter_module(path)
    first = 0
    for part in _PARTS[module.part]:
        rows = specs[WeightPath(path.layer, EXPERTS, part)].shape[1]
        if part == path.part:
            break
        first += rows
    return module, slice(first, first + rows)


def parameter_module(path: WeightPath) -> WeightPath:
    """The module with the adapter of an expert's projection.

    Args:
        path: The projection's, or of an array of it.
    """
    parameter = next(parameter for parameter, parts in _PARTS.items() if path.part in parts)
    return WeightPath(path.layer, EXPERTS, parameter, "")


def find_layout(
    module: WeightPath,
    shape: ExpertsShape,
    rank: int,
    a: tuple[int, ...],
    b: tuple[int, ...],
    *,
    version: object,
    slowest: bool,
    file: str,
) -> ExpertsLayout:
    """How an adapter's arrays lie in a file, from their sizes and PEFT's version.

    Args:
        module: The adapter's module.
        shape: Of the experts' matrices.
        rank: r.
        a: Shape of A in the file.
        b: Shape of B.
        version: ``peft_version`` of adapter_config.json.
        slowest: Whether the expert is the slowest index of B.
        file: The file's path, for messages.

    Raises:
        ConvertError: The sizes fit neither order, or both and the version is not known.
    """
    together = shape.experts * rank
    now, before = ((together, one) for one in (shape.columns, shape.rows))
    fits_now = a == now and b == (shape.rows, together)
    fits_before = not shape.turns and a == before and b == (shape.columns, together)
    if not fits_now and not fits_before:
        expected = f"A {list(now)} and B {[shape.rows, together]} ({shape.experts} experts, rank {rank})"
        raise unexpected(file, module, expected, f"{list(a)} and {list(b)}")
    swapped = fits_before
    if fits_now and fits_before:
        number = _number(version)
        if number is None:
            expected = "a version, as an expert's square matrix does not tell the side of A"
            raise unexpected(file, f"{module}: peft_version", expected, version)
        swapped = number < _SWAPPED_BEFORE
    return ExpertsLayout(shape, rank, swapped, slowest)


def _number(version: object) -> tuple[int, int] | None:
    """The first two numbers of a version."""
    numbers = re.match(r"(\d{1,6})\.(\d{1,6})", version) if isinstance(version, str) else None
    return None if numbers is None else (int(numbers[1]), int(numbers[2]))


def nested_module(name: str, config: AdapterConfig, family: Family) -> WeightPath | None:
    """The module of arrays under a name in a file: "model.layers.3.mlp.experts.base_layer" -> the inner parameter's.

    Args:
        name: What is before ".lora_A.weight", without PEFT's prefix.
        config: The adapter's settings.
        family: The base model's.

    Returns:
        None for a name that is not an adapter's on experts.
    """
    container = name.removesuffix(_INNER)
    wrapped = _wrapped(container, config)
    depth = 1 + (container != name)
    if depth > len(wrapped):
        return None
    try:
        return family.module_path(f"{container}.{wrapped[-depth]}")
    except ConvertError:
        return None


def nested_name(module: WeightPath, config: AdapterConfig, family: Family) -> str:
    """The inverse of `nested_module`."""
    container = family.module_name(module).removesuffix(f".{module.part}")
    return container if _wrapped(container, config)[-1] == module.part else f"{container}{_INNER}"


def written_layout(module: WeightPath, a: tuple[int, ...], b: tuple[int, ...], family: Family) -> ExpertsLayout:
    """The layout in which an adapter is written.

    Args:
        module: Its module.
        a: Shape of A in the tree.
        b: Shape of B in the tree.
        family: The base model's.
    """
    interleaved = family.mixture is not None and family.mixture.layout == INTERLEAVED
    parts = len(_PARTS[module.part])
    return ExpertsLayout(ExpertsShape(a[0], b[1], a[2], parts if interleaved else 0), a[1])


def _wrapped(container: str, config: AdapterConfig) -> list[str]:
    """The adapted parameters of a module of experts, from the inner wrapper to the outer one."""
    return [parameter for parameter in EXPERT_PARAMETERS if targets_parameter(config, f"{container}.{parameter}")]
