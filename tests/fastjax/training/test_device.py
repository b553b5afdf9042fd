"""A run says which devices it uses, and that others are idle."""

from typing import NamedTuple

import pytest

from fastjax.parallel import MeshShape
from fastjax.training.device import device_use


class Device(NamedTuple):
    id: int
    platform: str = "gpu"
    device_kind: str = "NVIDIA H200"


@pytest.mark.parametrize(
    ("shape", "count", "used", "idle"),
    [
        (MeshShape(), 1, "NVIDIA H200", None),
        (MeshShape(), 2, "NVIDIA H200 (device 0, 1 of 2)", "device 1 of 2, since the settings (parallel) take 1"),
        (MeshShape(2, 4), 8, "8 × NVIDIA H200 (data 2 × fsdp 4)", None),
        (MeshShape(6), 8, "6 × NVIDIA H200 (data 6)", "devices 6 to 7 of 8, since the settings (parallel) take 6"),
    ],
)
def test_used_and_idle(shape, count, used, idle):
    choice = ", and CUDA_VISIBLE_DEVICES chooses which"
    assert device_use(shape, [Device(i) for i in range(count)]) == (used, idle and idle + choice)
