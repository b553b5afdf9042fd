"""The scripts are importable, and what they share works."""

import importlib
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from convert.checkpoint import open_checkpoint
from convert.families import family_for
from tests.support import tiny

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


@pytest.mark.parametrize("filled", [False, True])
def test_a_made_model_reads_back(script, tmp_path, filled):
    fill = np.arange(1, 65).astype(ml_dtypes.bfloat16) if filled else None
    size = script("model_folder").make_model(tmp_path / "model", tiny.CONFIG, shard_bytes=30_000, fill=fill)
    files = list((tmp_path / "model").glob("*.safetensors"))
    assert len(files) > 2 and size == sum(file.stat().st_size for file in files)
    checkpoint = open_checkpoint(tmp_path / "model")
    assert checkpoint.config == tiny.CONFIG
    specs = family_for(tiny.CONFIG).specs(tiny.CONFIG)
    assert set(checkpoint.names) == {row.name for row in specs}
    for row in specs:
        array = checkpoint.read(row.name)
        assert array.shape == row.shape and array.dtype == ml_dtypes.bfloat16
        assert np.all(array != 0) if filled else not np.any(array)


def test_a_config_has_about_the_size_that_is_asked_for(script):
    convert = script("measure_convert")
    config = convert.config_of(8e9)
    size = 2 * sum(int(np.prod(row.shape)) for row in family_for(config).specs(config))
    assert abs(size / 8e9 - 1) < 0.05
