"""Traffic between the devices of a compiled step, in bytes on the link: collectives, and reads of remote memory.

A ring moves what it must and no more (Patarasuk and Yuan, 10.1016/j.jpdc.2008.09.002): of n devices each sends
2 (n - 1) / n of an array to sum it, (n - 1) / n to gather it, to scatter a sum, or to exchange its parts.
"""

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

from fastjax.planning.hlo import Instruction, instructions, shared_reads, size
from fastjax.planning.speed import BANDWIDTH_SHARE
from pallas_kernels.cards import Card

#: Share of the link's bandwidth that an all-reduce of 1 GiB reaches: 281 of 450 GB/s of an H200's NVLink.
LINK_SHARE = 0.62
KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
#: The kind of what kernels read in other devices' memory, beside the collectives.
READ = "peer-read"
#: Share of the link's bandwidth that these reach: 357 of 450 GB/s, two H100s.
READ_SHARE = 0.79


class Collective(NamedTuple):
    """One kind of collective in one call of the program.

    Attributes:
        kind: its name in HLO, or `READ`.
        times: how often it runs.
        sent: bytes that a device sends, in all.
        moved: bytes to and from its memory by the same kernels meanwhile; of collectives 0.
    """

    kind: str
    times: int
    sent: float
    moved: float = 0.0


def collectives(text: str, devices: int) -> list[Collective]:
    """The collectives of a program, by kind; the kind that sends most first.

    Args:
        text: `compiled.as_text()`.
        devices: that run it.
    """
    by_kind: dict[str, Collective] = {}
    for instruction, times in instructions(text):
        kind, sent, moved = instruction.kind.removesuffix("-start"), None, 0
        if kind in KINDS:
            sent = _sent(kind, instruction, devices)
        elif reads := shared_reads(instruction):
            kind, sent, moved = READ, reads.sent, reads.moved
        if sent is not None:
            before = by_kind.get(kind, Collective(kind, 0, 0.0))
            sent, moved = before.sent + times * sent, before.moved + times * moved
            by_kind[kind] = Collective(kind, before.times + times, sent, moved)
    return sorted(by_kind.values(), key=lambda collective: -collective.sent)


def link_seconds(traffic: Sequence[Collective], card: Card) -> float:
    """Seconds that collectives take on the link of a host's cards, one after the other.

    What kernels read takes what is above their time by the roofline: decoding writes four times as much meanwhile.

    Args:
        traffic: of `collectives`.
        card: the card.
    """
    seconds = 0.0
    for collective in traffic:
        alone = collective.sent / ((READ_SHARE if collective.kind == READ else LINK_SHARE) * card.link_bandwidth)
        seconds += max(0.0, alone - collective.moved / (BANDWIDTH_SHARE * card.bandwidth))
    return seconds


def _sent(kind: str, one: Instruction, devices: int) -> float:
    """Bytes that a device sends for one collective."""
    group = _group(one.rest, devices)
    share = (group - 1) / group
    result = _result(kind, one)
    if kind == "all-reduce":
        return 2 * share * result
    if kind == "reduce-scatter":
        return (group - 1) * result
    return float(result) if kind == "collective-permute" else share * result


def _result(kind: str, one: Instruction) -> int:
    """Bytes of the result; one that only begins, of one array, has (operand, result, …)."""
    if one.kind.endswith("-start") and kind in ("all-gather", "collective-permute") and one.shape.startswith("("):
        arrays = re.findall(r"\w+\[[\d,]*\]", one.shape)
        count = len(one.operands)
        if len(arrays) >= 2 * count:
            return sum(size(array) for array in arrays[count : 2 * count])
    return size(one.shape)


def _group(rest: str, devices: int) -> int:
    """Devices that take part in one collective; without groups all.

    Groups are {{0,1},{2,3}}, [groups,devices]<=…, or a mesh's axes: mesh['data'=2,'fsdp'=4] {'fsdp'}.
    """
    if match := re.search(r"replica_groups=\{\{([\d,]+)\}", rest):
        return len(match[1].split(","))
    if match := re.search(r"replica_groups=\[\d+,(\d+)\]", rest):
        return int(match[1])
    if match := re.search(r"replica_groups=mesh\[([^\]]*)\] ?\{([^}]*)\}", rest):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", match[1]))
        parts = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", match[2])  # of a part of an axis the size follows
        return math.prod(int(part or sizes[axis]) for axis, part in parts)
    return devices
