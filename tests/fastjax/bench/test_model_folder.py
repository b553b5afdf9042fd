"""A made model folder is one."""

import ml_dtypes
import numpy as np
import pytest

from convert.checkpoint import open_checkpoint
from convert.families import family_for
from fastjax.bench.model_folder import make_model
from tests.support import tiny


@pytest.mark.parametrize("filled", [False, True])
def test_a_made_model_reads_back(tmp_path, filled):
    fill = np.arange(1, 65).astype(ml_dtypes.bfloat16) if filled else None
    size = make_model(tmp_path / "model", tiny.CONFIG, shard_bytes=30_000, fill=fill)
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
