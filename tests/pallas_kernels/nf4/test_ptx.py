"""The assembly against JAX: the few instructions that it is made of, carried out one by one."""

import re

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pallas_kernels.nf4 import ptx

CASES = 64


def floats(words):
    return words.view(np.float32)


def prmt(a, b, selector):
    both = np.stack([a, b]).astype("<u4").view(np.uint8).reshape(2, -1, 4).transpose(1, 0, 2).reshape(-1, 8)
    picked = [np.take_along_axis(both, ((selector >> (4 * n)) & 7)[:, None].astype(int), 1)[:, 0] for n in range(4)]
    return np.stack(picked, axis=1).astype(np.uint8).reshape(-1).view("<u4")


def to_float8(high, low):
    first, second = (
        np.clip(floats(x), -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8).astype(np.uint32)
        for x in (low, high)
    )
    return first | second << 8


def run(text, operands):
    """The registers after the text; `operands` are those of "$n" that it reads, uint32 [CASES]."""
    registers = {f"${number}": value for number, value in operands.items()}

    def value(name):
        if name.startswith("0f"):
            return np.full(CASES, int(name[2:], 16), np.uint32)
        if name not in registers:
            return np.full(CASES, int(name, 0), np.uint32)
        return registers[name]

    instructions = {
        "mov": lambda a: a,
        "and": lambda a, b: a & b,
        "shr": lambda a, b: a >> b,
        "lop3": lambda a, b, c, table: (a & b) | c,
        "prmt": prmt,
        "mul": lambda a, b: (floats(a) * floats(b)).view(np.uint32),
        "cvt": to_float8,
    }
    text = re.sub(r"\.reg [^;]*;", "", text.replace("{h0, h1}", "h0h1")).replace("{", "").replace("}", "")
    for line in filter(None, map(str.strip, text.split(";"))):
        found = re.fullmatch(r"([a-z0-9]+)\.\S+ (\S+), (.*)", line)
        assert found is not None, line
        name, result, read = found[1], found[2], found[3].split(", ")
        assert name != "lop3" or read[-1] == "0xea"
        if read == ["h0h1"]:
            registers[result] = registers["h0"] | registers["h1"] << 16
        else:
            registers[result] = instructions[name](*map(value, read))
    return registers


def test_columns_of_four_rows():
    """Tables, look-ups in them and columns of what is found."""
    rng = np.random.default_rng(0)
    words = rng.integers(0, 2**32, (4, CASES), dtype=np.uint32)
    absmax = (448 * 2.0 ** rng.integers(-14, 1, (4, CASES)) * rng.uniform(0.5, 1, (4, CASES))).astype(np.float32)
    tables = [[run(ptx.table(part), {1: row.view(np.uint32)})["$0"] for part in range(4)] for row in absmax]
    found = []
    for half in ptx.HALVES:
        rows = []
        for word, table in zip(words, tables, strict=True):
            rows.append(run(ptx.lookup_in_table(half), {1: word} | dict(enumerate(table, 2)))["$0"])
        found += [run(ptx.column(byte), dict(enumerate(rows, 1)))["$0"] for byte in range(4)]
    expected = ptx.columns_in_jax([jnp.asarray(w.view(np.int32)) for w in words], [jnp.asarray(a) for a in absmax])
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours, np.asarray(theirs).view(np.uint32))
    assert len(np.unique(found)) > 4 * CASES
    operands = [*words, *(part for table in tables for part in table)]
    together = run(ptx.columns(), dict(enumerate(operands, 8)))
    np.testing.assert_array_equal([together[f"${number}"] for number in range(8)], found)
