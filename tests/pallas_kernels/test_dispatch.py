import jax
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from pallas_kernels import dispatch


@pytest.mark.parametrize(
    "device_kind, expected",
    [
        ("NVIDIA H200", (9, 0)),
        ("NVIDIA H100 80GB HBM3", (9, 0)),
        ("NVIDIA GH200 480GB", (9, 0)),
        ("NVIDIA A100-SXM4-80GB", (8, 0)),
        ("NVIDIA A10G", (8, 6)),
        ("NVIDIA A100 80GB PCIe", (8, 0)),
        ("NVIDIA GeForce RTX 4090", (8, 9)),
        ("NVIDIA GeForce RTX 3090", (8, 6)),
        ("NVIDIA L40S", (8, 9)),
        ("NVIDIA L4", (8, 9)),
        ("NVIDIA RTX 6000 Ada Generation", (8, 9)),
        ("NVIDIA B200", (10, 0)),
        ("NVIDIA GB200", (10, 0)),
        ("NVIDIA GB10", (12, 1)),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", (12, 0)),
        ("Tesla T4", (7, 5)),
        ("cpu", None),
        ("NVIDIA Z999", None),
    ],
)
def test_compute_capability_of_products(device_kind, expected):
    assert dispatch.compute_capability_of(device_kind) == expected


def test_target_without_an_abstract_device_is_the_backend():
    target = dispatch.target()
    assert target.platform == ("cuda" if jax.default_backend() == "gpu" else jax.default_backend())


class CardDevice:
    """A card as jax.Device describes it, on a machine that has none."""

    platform, device_kind, compute_capability, core_count = "gpu", "NVIDIA H200", "9.0", 132


def test_target_is_the_default_device_when_one_is_set():
    """So that a program computes on the CPU beside a card: its kernels would not run there."""
    with jax.default_device(CardDevice()):
        assert dispatch.target() == dispatch.Target("cuda", "NVIDIA H200", (9, 0), 132)
        with jax.default_device("cpu"):
            assert dispatch.target().platform == "cpu"
        with jax.default_device(jax.devices("cpu")[-1]):
            assert dispatch.target().platform == "cpu"


def test_target_is_the_abstract_device_when_one_is_set():
    device = AbstractDevice(device_kind="NVIDIA B200", num_cores=148, platform="cuda")
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        target = dispatch.target()
    assert target == dispatch.Target("cuda", "NVIDIA B200", (10, 0), 148)
    assert str(target) == "NVIDIA B200 (cuda, compute capability 10.0)"


def test_an_unknown_abstract_gpu_has_no_capability():
    device = AbstractDevice(device_kind="NVIDIA Z999", num_cores=None, platform="cuda")
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        assert dispatch.target().compute_capability is None


CANDIDATES = [("mosaic", "needs compute capability 9.0"), ("triton", None), ("xla", None)]


def test_select_takes_the_first_that_can_serve():
    assert dispatch.select("op", None, CANDIDATES) == "triton"
    assert dispatch.select("op", "xla", CANDIDATES) == "xla"


def test_select_never_downgrades_a_forced_implementation():
    with pytest.raises(NotImplementedError, match="op: implementation 'mosaic'.*needs compute capability 9.0"):
        dispatch.select("op", "mosaic", CANDIDATES)


def test_select_lists_the_names_for_an_unknown_one():
    with pytest.raises(ValueError, match="one of 'mosaic', 'triton', 'xla', got 'cudnn'"):
        dispatch.select("op", "cudnn", CANDIDATES)


def test_select_says_why_nothing_serves():
    with pytest.raises(NotImplementedError, match="mosaic: needs compute capability 9.0"):
        dispatch.select("op", None, CANDIDATES[:1])
