"""`fastjax bench moe` on tiny sizes: every part runs, and the block's gradients are finite."""

import json

import jax
import pytest
from rich.console import Console

from fastjax.bench import moe, tables, timing
from pallas_kernels.grouped_matmul.shapes import Shape

TINY = Shape(experts=4, tokens=32, experts_per_token=2, out=128, into=64)


class Program:
    def __call__(self, *arguments):
        pass

    def memory_analysis(self):
        pass


@pytest.fixture(autouse=True)
def instant(monkeypatch):
    """Programs are traced and not run: what they compute is tested where they come from."""

    def program(number, case):
        try:
            assert all(jax.tree.leaves(jax.eval_shape(case.function, *case.arguments)))
        except NotImplementedError as error:
            return error
        return Program()

    monkeypatch.setattr(timing, "_compile", program)
    monkeypatch.setattr(timing, "_run", lambda ready, rounds: dict.fromkeys(ready, [1e-3, 1e-3, 2e-3]))
    monkeypatch.setattr(moe, "SHAPES", dict.fromkeys(moe.SHAPES, (TINY,)))


def test_every_part_has_its_lines(tmp_path, capsys):
    settings = moe.MoeSettings(ranks=(0, 4), dtype="float32", rounds=1)
    rows = tables.run(moe.BENCH, settings, tmp_path / "moe.json", Console(width=100))
    results = [row for row in rows if row["reason"] is None]
    assert [(line["operation"], line["implementation"]) for line in results] == [
        ("even groups", "vendor"),
        *[(name, "") for name in ("16 bits", "NF4", "MXFP4")],
        ("block", "frozen"),
        ("block", "r=4"),
    ]
    product, block = results[0], results[-1]
    assert product["teraflops_per_second"] == pytest.approx(2 * 64 * 128 * 64 / 1e-3 / 1e12)
    assert block["teraflops_per_second"] == pytest.approx(3 * product["teraflops_per_second"])
    out = capsys.readouterr().out
    assert all(f"Mixtures: {part}" in out for part in ("products", "formats", "block"))
    assert len(json.loads((tmp_path / "moe.json").read_text())["results"]) == len(rows)
