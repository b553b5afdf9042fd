"""Meshes that a model cannot be trained on."""

import pytest

from convert.model.config import ModelConfig
from fastjax.errors import ConfigError
from fastjax.parallel import MeshShape, check_mesh
from tests.support import tiny

CONFIG = ModelConfig.from_hf(tiny.config())


@pytest.mark.parametrize("axis", ["context", "tensor"])
def test_axes_that_split_no_model_are_refused_by_name(axis):
    check_mesh(CONFIG, MeshShape(data=8, fsdp=2))
    with pytest.raises(ConfigError, match=f"parallel.{axis}: expected 1, .*, got 2"):
        check_mesh(CONFIG, MeshShape()._replace(**{axis: 2}))
