"""Strict numerics for every test: explicit promotion, eight fake CPU devices, no hub."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
if os.environ["JAX_PLATFORMS"] == "cpu":
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(scope="session", autouse=True)
def home(tmp_path_factory):
    """What a test keeps for the next run, as prepared data, it keeps for no one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        patch.delenv("XDG_CACHE_HOME", raising=False)
        patch.delenv("FASTJAX_CACHE", raising=False)
        yield


def pytest_collection_modifyitems(config, items):
    """Tests marked gpu run only where there is one; elsewhere they are skipped with the reason."""
    if jax.default_backend() == "gpu":
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU: run with JAX_PLATFORMS=cuda pytest -m gpu")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
