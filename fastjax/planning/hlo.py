"""A compiled GPU program, read from its text: kernels with what they move and multiply, and the arrays that they make.

A kernel is an instruction that runs by itself: a fusion, a library's or a Pallas kernel, a copy. What it reads of an
operand that it takes a slice of (a layer's weights out of the stack) is the slice, and of a result that it updates in
place the part that it writes. Kernels of a loop count as often as the loop runs. Kernels that read other devices'
memory take stacks of all layers and read one of each, from all devices (`pallas_kernels.shard_gather`), or one array
(`pallas_kernels.token_exchange`).
"""

import functools
import math
import re
from collections.abc import Iterator
from typing import NamedTuple

_BYTES = {
    **{"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8},
    **{"u64": 8, "f64": 8, "f8e4m3fn": 1, "f8e5m2": 1, "s4": 0.5, "u4": 0.5},
}
_FREE = ("parameter", "get-tuple-element", "bitcast", "tuple", "constant", "after-all", "opt-barrier", "partition-id")
_ENDS = ("-done", "-update")  # of what began in an earlier instruction
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = (.*?) ([\w\-]+)\((.*?)\)(.*)")
_CALLED = re.compile(r"(?:body|to_apply|calls|branch_computations)=\{?%?([\w.\-]+)")
_FLOAT8 = "__cublas$lt$matmul$f8"
#: Kernels that read other devices' memory: the one that copies what it reads of stacks, the one that decodes it; of an
#: array the one that joins the devices' parts, and the one that adds what they have for one device.
_COPIES, _DECODES, _JOINS, _ADDS = "shard_gather", "nf4_dequantize_shared", "gather_tokens", "scatter_tokens"
_SHARED = re.compile(rf'op_name="[^"]*/({_COPIES}|{_DECODES}|{_JOINS}|{_ADDS})/')
#: Behind the type of an array in the host's memory.
IN_HOST = "{S(5)}"
_HEADER = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\{")


class Kernel(NamedTuple):
    """A kernel of the program.

    Attributes:
        scope: the JAX operation that it comes from, as "jit(step)/jvp()/while/body/…".
        result: type of what it makes, as "bf16[4,2048,4096]", with `IN_HOST` behind arrays in the host's memory.
        moved: bytes that it reads and writes.
        flops: of its products by cuBLAS; 0 of others.
        times: how often it runs in one call of the program.
        float8: whether its products are cuBLAS's in float8.
    """

    scope: str
    result: str
    moved: float
    flops: float
    times: int
    float8: bool = False


class Instruction(NamedTuple):
    """A line of a program.

    Attributes:
        root: whether it is its computation's result.
        name: without %.
        shape: type of the result.
        kind: of the operation.
        between: its operands, in parentheses.
        rest: its attributes.
    """

    root: bool
    name: str
    shape: str
    kind: str
    between: str
    rest: str

    @property
    def operands(self) -> list[str]:
        """Names of the instructions that it takes."""
        return re.findall(r"%([\w.\-]+)", self.between)


class SharedReads(NamedTuple):
    """The reads of a kernel that reads other devices' memory.

    Attributes:
        sent: bytes that come from the other devices, and so what a device sends to them.
        own: bytes that it moves in its own memory.
    """

    sent: int
    own: int

    @property
    def moved(self) -> int:
        """Bytes to and from a device's memory: the others read there as much as it reads from them."""
        return self.sent + self.own


def kernels(text: str) -> list[Kernel]:
    """The kernels of a program.

    Args:
        text: `compiled.as_text()`.
    """
    computations, entry = _read(text)
    return list(_kernels(computations, entry))


def instructions(text: str) -> Iterator[tuple[Instruction, int]]:
    """The instructions of a program that are in no fusion, each with how often it runs in one call.

    Args:
        text: `compiled.as_text()`.
    """
    return ((one, times) for _, one, times in _instructions(*_read(text), 1))


def shared_reads(one: Instruction) -> SharedReads | None:
    """The reads of a kernel from arrays that devices share; None: the instruction is no such kernel.

    Args:
        one: in no fusion.
    """
    name = _SHARED.search(one.rest) if one.kind == "custom-call" else None
    if name is None:
        return None
    layouts = re.search(r"operand_layout_constraints=\{((?:[^{}]|\{[^{}]*\})*)\}", one.rest)
    assert layouts is not None, f"{one.name} is a library's call without layouts"
    taken, made = (re.findall(r"\w+\[[\d,]*\]", text) for text in (layouts[1], one.shape))
    if name[1] == _JOINS:
        return SharedReads(size(made[0]) - size(taken[0]), size(taken[0]) + size(made[0]))
    if name[1] == _ADDS:  # [rows, devices, …]; [rows, devices - 1, …] for the others, if in fewer bits; semaphores
        own, others = size(taken[0]) // _dims(taken[0])[1], sum(map(size, taken[1:-1]))
        return SharedReads(others or size(taken[0]) - own, own + size(made[0]))
    _, first, *rest = taken  # behind the layer's index
    if name[1] == _COPIES:  # results are [devices, a layer's shard]
        devices = _dims(one.shape)[0]
        shard = sum(size(stack) // _dims(stack)[0] for stack in (first, *rest))
        return SharedReads((devices - 1) * shard, shard + size(one.shape))
    devices = _dims(rest[0])[0] // _dims(first)[1]  # blocks of all and of one
    shard = size(first) // _dims(first)[0]
    return SharedReads((devices - 1) * shard, shard + sum(map(size, rest)) + size(one.shape))


def size(shape: str) -> int:
    """Bytes of an array, or of a tuple of arrays, by its type in HLO.

    Args:
        shape: as "(bf16[4,2048]{1,0}, s32[])".
    """
    arrays = re.findall(r"(\w+)\[([\d,]*)\]", shape)
    return math.ceil(
        sum(math.prod(map(int, filter(None, dims.split(",")))) * _BYTES.get(kind, 0) for kind, dims in arrays)
    )


def _read(text: str) -> tuple[dict[str, list[Instruction]], str]:
    """Instructions by computation, and the name of the first computation."""
    computations: dict[str, list[Instruction]] = {}
    entry, current = "", []
    for line in text.splitlines():
        if line[:1] not in (" ", "}", "") and (header := _HEADER.match(line)):
            current = computations.setdefault(header[2], [])
            entry = header[2] if header[1] else entry
        elif line[:1] == " " and (match := _INSTRUCTION.match(line)):
            name, shape, *rest = match.groups()[1:]
            current.append(Instruction(bool(match[1]), name, _made(shape), *rest))
    return computations, entry


def _made(shape: str) -> str:
    """The type of an instruction's result; of one that only begins, ((operands), result, …), without the operands."""
    if not shape.startswith("(("):
        return shape
    depth = 0
    for end, character in enumerate(shape[1:], 1):
        depth += (character == "(") - (character == ")")
        if not depth:
            return f"({shape[end + 1 :].lstrip(', ')}"
    return shape


def _instructions(
    computations: dict[str, list[Instruction]], name: str, times: int
) -> Iterator[tuple[str, Instruction, int]]:
    """Name of the computation, instruction, and how often it runs."""
    for one in computations[name]:
        if one.kind in ("while", "call", "conditional"):
            count = re.search(r'"known_trip_count":\{"n":"(\d+)"', one.rest)
            for inner in _CALLED.findall(one.rest):
                yield from _instructions(computations, inner, times * (int(count[1]) if count else 1))
        else:
            yield name, one, times


def _kernels(computations: dict[str, list[Instruction]], entry: str) -> Iterator[Kernel]:
    every = {name: {one.name: one.shape for one in inside} for name, inside in computations.items()}
    for name, one, times in _instructions(computations, entry, 1):
        shapes = every[name]
        if one.kind in _FREE or one.kind.endswith(_ENDS):
            continue
        called = _CALLED.findall(one.rest)
        scope = re.search(r'op_name="([^"]*)"', one.rest)
        inside = computations.get(called[0], []) if called and one.kind.startswith("fusion") else []
        reads, written = [size(shapes.get(operand, "")) for operand in one.operands], _result(one)
        if inside:
            reads, written = _sliced(inside, reads, written)
        elif shared := shared_reads(one):
            reads, written = [shared.moved], 0
        else:  # what a kernel is given twice, so that it reads a tile twice, comes from memory once
            reads = [size(shapes.get(operand, "")) for operand in dict.fromkeys(one.operands)]
        flops = sum(map(_flops, _with_operands(inside or [one], shapes)))
        name, moved = scope[1] if scope else one.name, sum(reads) + written
        yield Kernel(name, _plain(one.shape), moved, flops, times, _FLOAT8 in one.rest)


def _result(one: Instruction) -> int:
    """Bytes of the result; a library's workspace behind it is none, and nothing writes room that is allocated."""
    if '"AllocateBuffer"' in one.rest:
        return 0
    return size(one.shape.split(", s8[")[0] if one.kind == "custom-call" else one.shape)


def _sliced(inside: list[Instruction], reads: list[int], written: int) -> tuple[list[int], int]:
    """Bytes that a fusion reads of each operand and writes, where it takes or sets parts of larger arrays."""
    named = {one.name: one for one in inside}
    users: dict[str, list[Instruction]] = {}
    for one in inside:
        for operand in one.operands:
            users.setdefault(operand, []).append(one)

    def read(name: str, whole: int) -> int:
        total = 0
        for user in users.get(name, []):
            if user.kind == "bitcast":
                total += read(user.name, whole)
            elif user.kind in ("dynamic-slice", "slice", "gather") and user.operands[0] == name:
                total += size(user.shape)
            elif user.kind != "dynamic-update-slice" or user.operands[0] != name:
                return whole
        return min(total, whole)

    def write(name: str) -> int:
        one = named[name]
        if one.kind == "dynamic-update-slice":
            return size(named[one.operands[1]].shape)
        if one.kind == "bitcast":
            return write(one.operands[0])
        return sum(map(write, one.operands)) if one.kind == "tuple" else _result(one)

    for one in inside:
        if one.kind == "parameter" and (number := int(one.between)) < len(reads):
            reads[number] = read(one.name, reads[number])
        if one.root:
            written = write(one.name)
    return reads, written


def _with_operands(inside: list[Instruction], shapes: dict[str, str]) -> Iterator[tuple[Instruction, list[str]]]:
    known = shapes | {one.name: one.shape for one in inside}
    return ((one, [known.get(operand, "") for operand in one.operands]) for one in inside)


def _flops(given: tuple[Instruction, list[str]]) -> float:
    """FLOPs of a product by cuBLAS: 2·m·n·k a matrix, from the sizes of the operands and of the result."""
    one, operands = given
    if one.kind != "custom-call" or "__cublas" not in one.rest or len(operands) < 2:
        return 0.0
    sizes = [_elements(shape) for shape in (operands[0], operands[1], one.shape)]
    batch = re.search(r'"lhs_batch_dimensions":\[([^\]]*)\]', one.rest)
    axes = [int(axis) for axis in re.findall(r"\d+", batch[1])] if batch else []
    dims = _dims(operands[0])
    matrices = math.prod(dims[axis] for axis in axes)
    return 2.0 * math.sqrt(math.prod(sizes) / matrices)


@functools.cache
def _dims(shape: str) -> tuple[int, ...]:
    """Dimensions of an array, of a tuple's first one."""
    match = re.search(r"\w+\[([\d,]*)\]", shape)
    return tuple(map(int, filter(None, match[1].split(",")))) if match else ()


def _elements(shape: str) -> int:
    return math.prod(_dims(shape))


def _plain(shape: str) -> str:
    """A type without comments, and of layouts with nothing but the host's memory space."""
    return re.sub(r"\{[^}]*\}|/\*[^/]*\*/", lambda match: IN_HOST if "S(5)" in match[0] else "", shape)
