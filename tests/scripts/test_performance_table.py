"""Tables of measured steps, made of files as `fastjax bench step --output` writes them; the pages are up to date."""

import dataclasses
import importlib
import json
from pathlib import Path

import pytest
from PIL import Image

from fastjax.bench.step.case import StepCase
from fastjax.bench.step.measure import StepResult
from fastjax.bench.step.table import Line, rows_of
from fastjax.parallel import MeshShape

CASE = StepCase("llama3-8b", 4, 2048, "projections", "scan", lengths=(100, 200), compiler_options=("xla_a=1",))
FOUND = StepResult("Card", "0.11.2", "bfloat16", 0.5, 16384.0, 400.0, 10.0, 30 * 2**30, 31 * 2**30, [12.5, 11.1])


@pytest.fixture
def tables(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "scripts")
    return importlib.import_module("write_performance_table")


@pytest.fixture
def write(tmp_path):
    """Writes lines as a measurement does."""

    def write(name, *lines, day="2026-11-23"):
        rows = rows_of(lines, date=day, command="fastjax bench step")
        (tmp_path / name).write_text(json.dumps(rows), encoding="utf-8")
        return tmp_path

    return write


def cells(table):
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def test_the_pages_and_the_picture_are_up_to_date(tables):
    steps = tables.read()
    for name in tables.PAGES:
        written = (tables.ROOT / name).read_text(encoding="utf-8")
        assert written == tables.page(name, steps), "run scripts/write_performance_table.py"
    with Image.open(tables.PICTURE) as picture:
        assert picture.info["Description"] == tables.digest(steps), "run scripts/write_performance_table.py"
    assert len(cells(tables.every_step(steps))) > 20


def test_a_result_is_taken_as_it_is(tables, write, monkeypatch):
    two = Line(dataclasses.replace(CASE, mesh=MeshShape(data=2)), dataclasses.replace(FOUND, tokens_per_second=32000.0))
    failed = Line(dataclasses.replace(CASE, batch=9), StepResult("Card", "0.11.2", error="out of memory"))
    other = Line(dataclasses.replace(CASE, layer_loop=""), dataclasses.replace(FOUND, step_bytes=None), "Unsloth 1")
    steps = tables.read(write("a.json", Line(CASE, FOUND), two, failed, other))
    settings = ["llama3-8b", "QLoRA, NF4, r=16", "4×2,048 packed"]
    rest = ["30.0", "[2026-11-23](measurements/a.json)"]
    assert sorted(cells(tables.every_step(steps))) == [
        ["2× Card, data 2", *settings, "`projections`, scan, xla_a=1", "32,000", *rest],
        ["Card", *settings, "`projections`, scan, xla_a=1", "16,384", *rest],
        ["Card", *settings, "`projections`, xla_a=1, **Unsloth 1**", "16,384", *rest],
    ]
    assert cells(tables.plans(steps)) == [], "of another card"
    monkeypatch.setattr(tables, "CARD", "Card")
    assert [line[4:] for line in cells(tables.plans(steps))] == [["33.82", "32.21", "+5.0%"]], "of one of them"
    assert tables.draw(steps).startswith(b"\x89PNG")


def test_the_newest_day_counts_and_of_one_day_the_fastest(tables, write):
    def speed(number):
        return Line(CASE, dataclasses.replace(FOUND, tokens_per_second=number))

    write("a.json", speed(3.0), day="2026-11-22")
    write("b.json", speed(2.0), speed(1.0))
    steps = tables.newest(tables.read(write("c.json", speed(1.5))))
    assert [(step.file, step.speed) for step in steps] == [("b.json", 2.0)]


def test_other_files_are_refused(tables, tmp_path):
    (tmp_path / "a.json").write_text('{"device": "Card", "results": []}')
    with pytest.raises(SystemExit, match=r"a\.json: expected a list of cases"):
        tables.read(tmp_path)
    (tmp_path / "a.json").write_text(json.dumps([{"preset": "tiny", "batch": 1, "seq": 8, "checkpointing": "full"}]))
    with pytest.raises(SystemExit, match="row 0: expected date, command, device, layer_loop, got none"):
        tables.read(tmp_path)
