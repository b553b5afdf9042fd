"""Trainers that leave all fake devices but one alone, where they name none."""

import pytest

from fastjax.parallel import MeshShape
from fastjax.runs.mesh import suited_meshes


@pytest.fixture(autouse=True)
def one_device(monkeypatch):
    """A trainer whose settings name no devices takes one, whatever their number."""

    def meshes(config, *others):
        return suited_meshes(config, *others) if config.parallel.sizes else (MeshShape(),)

    monkeypatch.setattr("fastjax.runs.trainer.suited_meshes", meshes)
