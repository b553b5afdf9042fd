"""A run says which device it uses, and that others are idle."""

from typing import NamedTuple

import pytest

from fastjax.training.device import device_use


class Device(NamedTuple):
    id: int
    platform: str = "gpu"
    device_kind: str = "NVIDIA H200"


@pytest.mark.parametrize(
    ("count", "used", "idle"),
    [
        (1, "NVIDIA H200", None),
        (2, "NVIDIA H200 (device 0, 1 of 2)", "device 1 of 2"),
        (8, "NVIDIA H200 (device 0, 1 of 8)", "devices 1 to 7 of 8"),
    ],
)
def test_one_of_many_is_used(count, used, idle):
    reason = ", since a run trains on one device (CUDA_VISIBLE_DEVICES chooses which one)"
    assert device_use([Device(i) for i in range(count)]) == (used, idle and idle + reason)  # pyright: ignore
