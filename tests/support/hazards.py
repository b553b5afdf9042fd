"""Whether a Triton kernel's PTX fetches a tile into a buffer that a product of Hopper's tensor cores may still read.

A loop that reads its tiles ahead has some buffers for each, which it counts through: tile i lies in buffer i modulo
their number. At the end of a round tiles are fetched for the round `distance` later. Where a product (wgmma) is not
waited for before that, its operands must have more buffers than that distance.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping

_INSTRUCTION = re.compile(r"^\s*(?:@!?%p\d+\s+)?([a-z][\w.:]*)\s*([^;]*);", re.MULTILINE)
_REGISTER = re.compile(r"%[a-z]+\d+")


def check(ptx: str) -> None:
    """An error if one of the kernels does.

    Args:
        ptx: a module's.
    """
    for entry in re.split(r"\.visible \.entry ", ptx)[1:]:
        name, sources = entry.split("(")[0], _sources(entry)
        for body, before in _loops(entry):
            if not (rounds := body.count("cp.async.commit_group")) or not _in_flight(body):
                continue
            distance = before.count("cp.async.commit_group") // rounds
            operands = re.findall(r"wgmma\.mma_async[^;]*;", body)
            buffers = {number for operand in operands for number in _buffers(operand, entry, sources)}
            assert min(buffers, default=distance + 1) > distance, (
                f"{name} fetches tiles {distance} rounds ahead, while a product reads one of {min(buffers)} buffers"
            )


def _loops(entry: str) -> Iterator[tuple[str, str]]:
    """The body of each innermost loop, and what lies between it and the loop before it."""
    end = 0
    for label in re.finditer(r"^(\$L\w+):", entry, re.MULTILINE):
        rest = entry[label.end() :]
        back = re.search(rf"\bbra(?:\.uni)?\s+{re.escape(label[1])};", rest)
        if back and not re.search(r"^\$L\w+:", rest[: back.start()], re.MULTILINE):
            yield rest[: back.start()], entry[end : label.start()]
            end = label.end() + back.end()


def _in_flight(body: str) -> bool:
    """Whether products may be at work where tiles are fetched, in a round that follows another."""
    flying, found = 0, False
    for _ in range(2):
        for event in re.finditer(r"wgmma\.(commit)_group|wgmma\.wait_group\S*\s+(\d+)|cp\.async\.c[ag]", body):
            if event[1]:
                flying += 1
            elif event[2]:
                flying = min(flying, int(event[2]))
            else:
                found |= flying > 0
    return found


def _sources(entry: str) -> Mapping[str, list[tuple[str, list[str]]]]:
    """By register, what defines it: the instruction, and the registers that it reads."""
    found = defaultdict(list)
    for operation, operands in _INSTRUCTION.findall(entry):
        first, _, others = operands.partition(",")
        if operation.startswith(("st.", "cp.", "wgmma", "bar", "bra", "setp")):
            continue
        for register in _REGISTER.findall(first):
            found[register].append((f"{operation} {operands}", _REGISTER.findall(others)))
    return found


def _buffers(product: str, entry: str, sources: Mapping[str, list[tuple[str, list[str]]]]) -> set[int]:
    """How many buffers the operands of a product have that lie in shared memory: what their addresses count through."""
    waiting, seen, found = re.findall(r"%rd\d+", product), set(), set()
    while waiting:
        register = waiting.pop()
        if register in seen:
            continue
        seen.add(register)
        for instruction, read in sources[register]:
            wrap = re.match(r"selp\S* (%r\d+), 0, (%r\d+), (%p\d+)$", instruction)
            limit = wrap and re.search(rf"setp\.gt\.s32\s+{wrap[3]}, {wrap[2]}, (\d+);", entry)
            if limit:
                found.add(int(limit[1]) + 1)
            else:
                waiting += read
    return found
