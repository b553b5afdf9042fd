"""The limit of pinned memory from the environment."""

import pytest

from fastjax.planning.device import pinned_limit, pinned_setting

GIB = 2**30


@pytest.mark.parametrize(("given", "limit"), [(None, 64), ("100", 100), ("much", 64)])
def test_xla_pins_so_much_of_the_hosts_memory(given, limit, monkeypatch):
    name = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
    monkeypatch.delenv(name, raising=False)
    if given is not None:
        monkeypatch.setenv(name, given)
    assert pinned_limit() == limit * GIB
    said, _, number = pinned_setting(75e9).partition("=")
    assert said == name and 75e9 < int(number) * GIB < 1.2 * 75e9, "not much more than a step needs"
