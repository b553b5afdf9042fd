"""The scripts are importable."""

import importlib
from pathlib import Path

import pytest

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
