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


def test_a_config_has_about_the_size_that_is_asked_for(script):
    convert = script("measure_convert")
    config = convert.config_of(8e9)
    size = 2 * sum(int(np.prod(row.shape)) for row in family_for(config).specs(config))
    assert abs(size / 8e9 - 1) < 0.05
