"""Hostile values and texts, changes to JSON values and damage to bytes, drawn from a seed."""

import copy
import json
import random
from collections.abc import Sequence
from typing import Any

NO_NUMBER_OF_A_MODEL = (*(float("nan"), float("inf"), float("-inf"), 1e308, -1e308, 1e-308, 5e-324, -1, -1.5, 1e30),)
LARGE = (2**31, 2**32, 2**62, 2**63, 2**64, 2**70, -(2**70), 10**18, 10**400, -(10**400))
TEXTS = (
    *("", "x", "1", "null", "nan", "a\0b", "\ud800", "x" * 10_000, "[" * 200, "{", "\u202e\ufdd0\U0010ffff", "../x"),
    *("é" * 300, "<|im_end|></s><s>[INST]", "(", "(.|..|...)+(?<!.)", "{{ 1/0 }}", "all-linear"),
)
NESTED = (
    *([], [1], [[]], [None] * 3, ["x"] * 4, [1e400] * 4, list(range(300)), ["x"] * 10_000, [2**70], [float("nan")]),
    *({}, {"x": {"x": 1}}, {"a": float("inf")}, {"": None}, {"rope_type": []}, {"rope_type": "yarn", "factor": "x"}),
    *({"full_attention": 3}, [{"path": "a"}], {"q_proj": 10**18}, ["a\0b"], {"\ud800": 1}),
)
#: Values that JSON can write.
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 0.0, 1, 2, 1.0, 3.5, *NO_NUMBER_OF_A_MODEL, *LARGE, *TEXTS, *NESTED),
)
#: An integer too long for Python to print.
UNWRITABLE = 10**5000

DAMAGE = ("bit", "bytes", "truncated", "zeros", "appended")
_SYNTAX = (*b'{}[]",:\\\0 \n\xff-eE.0', *b"nulltrue&*!|>#%@`?")


def text(draw: random.Random) -> str:
    """A text of characters of all planes, with lone surrogates, controls and parts of other texts."""
    planes = ((0, 0x1F), (0x20, 0x7E), (0x80, 0x2FF), (0x300, 0x36F), (0x200B, 0x202E), (0xD800, 0xDFFF))
    planes += ((0xFDD0, 0xFDEF), (0x4E00, 0x9FFF), (0x1F300, 0x1FAFF), (0x10FFF0, 0x10FFFF))
    pieces = [chr(draw.randint(*draw.choice(planes))) for _ in range(draw.randint(0, 12))]
    pieces += draw.choices(TEXTS, k=draw.randint(0, 2))
    draw.shuffle(pieces)
    return "".join(pieces)


def value(draw: random.Random) -> Any:
    """One of `VALUES`, or a text."""
    return text(draw) if draw.random() < 0.2 else draw.choice(VALUES)


def changed(draw: random.Random, base: Any, others: Sequence[Any] = ()) -> Any:
    """A JSON value with one to three of its parts replaced, removed, renamed, doubled or put elsewhere.

    Args:
        draw: Source of randomness.
        base: Left as it is.
        others: Values whose parts may be inserted.
    """
    tree = [copy.deepcopy(base)]
    for _ in range(draw.choice((1, 1, 2, 3))):
        places = list(_places(tree))
        parent, key = draw.choice(places[1:] if places[1:] and draw.random() < 0.95 else places)
        kind = draw.choice(("replaced",) * 4 + ("removed", "renamed", "wrapped", "doubled", "moved", "added"))
        if kind == "removed" and parent is not tree:
            del parent[key]
        elif kind == "renamed" and isinstance(parent, dict):
            name = text(draw) if draw.random() < 0.5 else draw.choice(list(parent))
            parent[name] = parent.pop(key)
        elif kind == "wrapped":
            parent[key] = draw.choice(([parent[key]], {"x": parent[key]}, json.dumps(parent[key])))
        elif kind == "doubled" and isinstance(parent[key], list | str):
            parent[key] = parent[key] * 2
        elif kind == "moved":
            source, name = draw.choice(list(_places([*tree, *others])))
            parent[key] = copy.deepcopy(source[name])
        elif kind == "replaced" and isinstance(parent[key], str) and draw.random() < 0.5:
            parent[key] = text(draw)
        elif kind == "added" and isinstance(parent[key], dict):
            parent[key][text(draw)] = copy.deepcopy(value(draw))
        else:
            parent[key] = copy.deepcopy(value(draw))
    return tree[0]


def _places(tree: Any) -> Any:
    """(container, key) of every part of the values in a list."""
    stack = [tree]
    while stack:
        container = stack.pop()
        for key, part in list(container.items() if isinstance(container, dict) else enumerate(container)):
            yield container, key
            if isinstance(part, dict | list) and len(part) < 300:
                stack.append(part)


def damaged(draw: random.Random, content: bytes, kind: str) -> bytes:
    """Bytes with damage of a kind in `DAMAGE`."""
    changed, place = bytearray(content), draw.randrange(max(1, len(content)))
    if kind == "truncated":
        return bytes(changed[:place])
    if kind == "appended" or not changed:
        return bytes(changed) + draw.randbytes(draw.randint(1, 5000))
    if kind == "bit":
        changed[place] ^= 1 << draw.randrange(8)
    elif kind == "bytes":
        changed[place : place + 8] = draw.randbytes(len(changed[place : place + 8]))
    else:
        end = draw.choice((len(changed), min(len(changed), place + draw.randint(1, 512))))
        start = draw.choice((0, place))
        changed[start:end] = bytes(end - start)
    return bytes(changed)


def damaged_text(draw: random.Random, content: bytes) -> bytes:
    """A file's text with damage, or with one to four marks of a syntax put in, replaced, removed or repeated."""
    if draw.random() < 0.3:
        return damaged(draw, content, draw.choice(DAMAGE))
    changed = bytearray(content)
    for _ in range(draw.randint(1, 4)):
        place = draw.randrange(len(changed) + 1)
        end = place + draw.choice((0, 0, 1, 1, draw.randint(0, 30)))
        mark = bytes([draw.choice(_SYNTAX)]) * draw.choice((1, 1, 1, 2, 150))
        changed[place:end] = draw.choice((mark, bytes(changed[place:end]) * 2, b""))
    return bytes(changed)
