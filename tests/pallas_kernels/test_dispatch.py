import jax
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from pallas_kernels import dispatch
from pallas_kernels.attention.implementations import REGISTRY as attention
from pallas_kernels.cross_entropy.implementations import REGISTRY as cross_entropy
from pallas_kernels.glu.lora import REGISTRY as glu_lora
from pallas_kernels.nf4.implementations import DEQUANTIZE, MATMUL


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


def registry(**reasons):
    """An operation on numbers whose implementations refuse cases below a number."""
    implementations = {
        name: dispatch.Implementation(lambda case, least=least: f"needs {least}" if case < least else None, abs)
        for name, least in reasons.items()
    }
    return dispatch.Registry("op", implementations, lambda case: sorted(reasons, reverse=case > 5))


def test_a_registry_asks_each_implementation_in_order_of_preference():
    found = registry(a=3, b=0)
    assert list(found.reasons(2).items()) == [("a", "needs 3"), ("b", None)]
    assert list(found.reasons(6).items()) == [("b", None), ("a", None)]
    assert [found.choose(case, None) for case in (2, 4, 6)] == ["b", "a", "b"]
    assert found.choose(6, "a") == "a" and found["a"].forward is abs


def test_a_registry_never_downgrades_and_names_the_pass():
    with pytest.raises(NotImplementedError, match=r"op \(backward\): implementation 'a' cannot serve .* needs 3"):
        registry(a=3, b=0).choose(2, "a", direction="backward")
    with pytest.raises(NotImplementedError, match="has no backward pass of its own"):
        registry(a=0)["a"].backward(1)


@pytest.mark.parametrize("found", [attention, cross_entropy, DEQUANTIZE, MATMUL, glu_lora], ids=lambda found: found.op)
def test_every_registry_has_a_choice_and_an_implementation_for_every_target(found):
    assert len(found.implementations) > 1 and "xla" in found.implementations
