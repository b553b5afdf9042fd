"""The scripts are importable, and what they share works."""

import importlib
from pathlib import Path

import numpy as np
import pytest

from convert.families import family_for

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def script(monkeypatch):
    """Import a script by its name, as its neighbours do."""
    monkeypatch.syspath_prepend(SCRIPTS)
    return importlib.import_module


@pytest.mark.parametrize("name", sorted(path.stem for path in SCRIPTS.glob("*.py")))
def test_a_script_does_nothing_when_it_is_imported(script, name, capfd):
    script(name)
    assert capfd.readouterr().out == ""


def test_the_predicted_table_is_the_formulas(script):
    predict = script("predict_scaling")
    assert predict.table(predict.Links()) in (SCRIPTS.parent / "docs" / "parallel.md").read_text(encoding="utf-8")
    free = predict.Links(host=1e30, host_parts=1e30, network=1e30, hop_seconds=(0.0, 0.0))
    for _, steps in predict.predictions(free):
        assert [share for step in steps for share in step.shares] == pytest.approx([1.0] * 6)
    assert predict.adapter_parameters(predict.config_of("llama3-8b")) == 41_943_040, "as PEFT counts them"
    alone = predict.Links(gpus=1)
    assert alone.all_reduce(1e9, 1) == alone.all_gather(1e9, 1) == alone.all_to_all(1e9, 1) == 0
    assert alone.all_reduce(1e9, 2) == pytest.approx(1e9 / alone.network + 2 * 8e-6), "each sends half, twice"


def test_a_config_has_about_the_size_that_is_asked_for(script):
    convert = script("measure_convert")
    config = convert.config_of(8e9)
    size = 2 * sum(int(np.prod(row.shape)) for row in family_for(config).specs(config))
    assert abs(size / 8e9 - 1) < 0.05
