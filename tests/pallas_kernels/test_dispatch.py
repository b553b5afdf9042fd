import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from pallas_kernels import compat, dispatch, low_rank
from pallas_kernels.attention.api import REGISTRY as attention
from pallas_kernels.cross_entropy.chunks import REGISTRY as cross_entropy
from pallas_kernels.float8.api import QUANTIZE as quantize
from pallas_kernels.gated_delta import REGISTRY as gated_delta
from pallas_kernels.gated_delta.token import REGISTRY as delta_token
from pallas_kernels.glu.lora import REGISTRY as glu_lora
from pallas_kernels.grouped_matmul.api import DW, DX, MATMUL
from pallas_kernels.grouped_matmul.nf4 import REGISTRY as grouped_nf4
from pallas_kernels.nf4.implementations import DEQUANTIZE, FLOAT8
from pallas_kernels.nf4.implementations import MATMUL as nf4_matmul
from pallas_kernels.rms_norm import REGISTRY as rms_norm
from pallas_kernels.rms_norm import lora as norm_lora
from pallas_kernels.shard_gather import REGISTRY as gather
from pallas_kernels.split_rope import REGISTRY as split_rope
from pallas_kernels.split_rope.lora import REGISTRY as turn_lora
from pallas_kernels.token_exchange import REGISTRY as exchange


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


def registry(**leasts):
    """An operation on numbers whose implementations refuse numbers below one."""
    implementations = {
        name: dispatch.Implementation(
            abs, why_not=lambda _, number, least=least: f"needs {least}" if number < least else None
        )
        for name, least in leasts.items()
    }
    return dispatch.Registry("op", implementations, lambda _, number: sorted(leasts, reverse=number > 5))


def test_a_registry_asks_each_implementation_in_order_of_preference():
    found = registry(a=3, b=0)
    assert list(found.reasons(number=2).items()) == [("a", "needs 3"), ("b", None)]
    assert list(found.reasons(number=6).items()) == [("b", None), ("a", None)]
    assert [found.choose(None, number=number) for number in (2, 4, 6)] == ["b", "a", "b"]
    assert found.choose("a", number=6) == "a" and found.chosen("a", number=6).forward is abs


def test_a_registry_never_downgrades_and_names_the_pass():
    with pytest.raises(NotImplementedError, match=r"op \(backward\): implementation 'a' cannot serve .* needs 3"):
        registry(a=3, b=0).choose("a", direction="backward", number=2)
    with pytest.raises(NotImplementedError, match="has no backward pass of its own"):
        registry(a=0)["a"].backward(1)


B200 = dispatch.Target("cuda", "NVIDIA B200", (10, 0), 148)
H200 = dispatch.Target("cuda", "NVIDIA H200", (9, 0), 132)
ADA = dispatch.Target("cuda", "NVIDIA L40S", (8, 9), 142)
A100 = dispatch.Target("cuda", "NVIDIA A100-SXM4-80GB", (8, 0), 108)
T4 = dispatch.Target("cuda", "Tesla T4", (7, 5), 40)
UNKNOWN = dispatch.Target("cuda", "NVIDIA Z999", None, None)

LOW_RANK = {"rows": 64, "parts": (128,), "dtype": jnp.bfloat16, "rank": 16}
GLU = {"shape": (8192, 256), "dtype": jnp.bfloat16, "ranks": (16, 64), "activation": "silu"}
TURN = {"rows": 64, "heads": (4, 2), "size": 128, "dtype": jnp.bfloat16, "rank": 16}
GROUPED = {"rows": 64, "shape": (4, 64, 128), "dtype": jnp.bfloat16}
DECODE = {"shape": (4096, 4096), "dtype": jnp.bfloat16, "through": None, "order": "split", "own_map": True}
TRANSPOSED = {"shape": (140, 320), "transposed": True}
SERVED = {
    low_rank.ADD: LOW_RANK,
    low_rank.INPUT: LOW_RANK,
    low_rank.OUTPUT: LOW_RANK,
    low_rank.ROUND: LOW_RANK | {"float8": True},
    glu_lora: GLU,
    norm_lora.REGISTRY: LOW_RANK,
    norm_lora.ROUND: LOW_RANK | {"parts": (32768,), "float8": True},
    rms_norm: {"rows": 64, "features": 4096, "dtype": jnp.float32},
    split_rope: {"dtype": jnp.bfloat16, "size": 128},
    turn_lora: TURN,
    cross_entropy: {"shape": (2, 64, 128_256), "dtype": jnp.float32},
    quantize: {"columns": 4096, "dtype": jnp.float32},
    MATMUL: GROUPED,
    DX: GROUPED,
    DW: GROUPED | {"result": jnp.float32},
    grouped_nf4: GROUPED,
    DEQUANTIZE: DECODE,
    FLOAT8: {"shape": (128, 192), "transposed": True},
    **dict.fromkeys((gated_delta, delta_token), {"dtype": jnp.bfloat16, "sizes": (128, 128), "states": 2**20}),
}
"""A call of each operation that Triton's kernels serve."""


@pytest.mark.parametrize("found", SERVED, ids=lambda found: found.op)
def test_triton_serves_a_call_from_some_card_on(found):
    least = found["triton"].capability
    devices = [(T4, (7, 5)), (A100, (8, 0)), (ADA, (8, 9)), (H200, (9, 0)), (B200, (10, 0))]
    for device, capability in devices:
        reason = found["triton"].reason(device, **SERVED[found])
        in_float8 = SERVED[found].get("float8") and capability < (8, 9)
        if capability < least or in_float8:
            wanted = "8.9" if in_float8 and capability >= least else f"{least[0]}.{least[1]}"
            assert f"needs an NVIDIA GPU of compute capability {wanted} or more, the target is {device}" in reason
        else:
            assert reason is None


@pytest.mark.parametrize(
    ("found", "name", "device", "change", "reason"),
    [
        (low_rank.ADD, "triton", H200, {"rank": 128}, None),
        (low_rank.ADD, "triton", H200, {"dtype": jnp.float32}, "it takes bfloat16 or float16, not float32"),
        (low_rank.INPUT, "triton", H200, {"rank": 48}, "not 48"),
        (low_rank.ADD, "triton", H200, {"parts": (128, 96)}, r"not 64 tokens by \[128, 96\]"),
        (low_rank.ROUND, "triton", H200, {"parts": (128, 64), "rank": 128}, None),
        (low_rank.ROUND, "triton", H200, {"rank": 48}, "not 48"),
        (low_rank.OUTPUT, "triton", H200, {"rank": 64}, "second pass over dy"),
        (low_rank.OUTPUT, "triton", A100, {"float8": True}, "float8 needs .* compute capability 8.9"),
        (norm_lora.ROUND, "triton", H200, {"parts": (65536,)}, "rows of up to 32768 columns, these have 65536"),
        (norm_lora.ROUND, "triton", H200, {"rank": 48}, "not 48"),
        (glu_lora, "triton", H200, {"dtype": jnp.float32}, "float32"),
        (glu_lora, "triton", H200, {"activation": "gelu"}, "no gelu"),
        (glu_lora, "triton", H200, {"ranks": (16, 130)}, "not 130"),
        (glu_lora, "triton", H200, {"shape": (64, 2 * 65536), "float8": True}, None),
        (glu_lora, "triton", H200, {"shape": (64, 2 * 65600), "float8": True}, "up to 65536 columns"),
        (glu_lora, "triton", H200, {"shape": (8190, 256)}, "whole tiles of 64"),
        (glu_lora, "triton", A100, {"float8": True}, "compute capability 8.9"),
        (glu_lora, "triton", A100, {"ranks": (128, 16)}, r"ranks .* up to 64 on NVIDIA A100"),
        (turn_lora, "triton", H200, {"size": 96}, "not 96"),
        (turn_lora, "triton", H200, {"rows": 60, "size": 64}, "not 60 tokens"),
        (split_rope, "triton", H200, {"dtype": jnp.float32}, "not float32"),
        (split_rope, "triton", H200, {"size": 72}, "multiple of 16 and at most 256, not 72"),
        (rms_norm, "triton", H200, {"features": 8200}, "at most 8192 features, not of 8200"),
        (rms_norm, "triton", H200, {"rows": 2**19}, "32 bits, and 524288 × 4096"),
        (cross_entropy, "triton", H200, {"shape": (2, 2**14, 2**16)}, "32 bits, and 2 × 16384 × 65536"),
        (quantize, "triton", H200, {"columns": 32769}, "up to 32768 columns, these have 32769"),
        (gated_delta, "triton", H200, {"sizes": (128, 96)}, "heads of 64 or 128, not of 128 and 96"),
        (gated_delta, "triton", H200, {"states": 2**31}, "32 bits, and its states have 2147483648"),
        (delta_token, "triton", H200, {"states": 2**31}, "32 bits, and its states have 2147483648"),
        (MATMUL, "mosaic", H200, {}, None),
        (MATMUL, "mosaic", B200, {}, "compute capability 9.0, the target"),
        (DX, "triton", A100, {"dtype": jnp.float32}, "not float32"),
        (DW, "triton", A100, {"result": jnp.float16}, "it writes bfloat16 or float32, not float16"),
        (DW, "triton", A100, {"rows": 0}, "no empty arrays"),
        (grouped_nf4, "triton", A100, {"shape": (256, 4096, 14336)}, "less than 2 GiB of codes"),
        (gather, "mosaic", H200, {"shape": (4, 30, 100), "dtype": jnp.uint8}, "2048 bytes or more, in sixteens"),
        (exchange, "mosaic", H200, {"part": 4096, "size": 4096, "dtype": jnp.float32}, "has 1048576 bytes or more"),
        (exchange, "mosaic", H200, {"part": 1000, "size": 1 << 20, "dtype": jnp.float32}, "in whole pieces of 2048"),
        (exchange, "mosaic", H200, {"part": 1 << 31, "size": 1 << 31, "dtype": jnp.float32}, "offsets are of 32 bits"),
        (exchange, "mosaic", H200, {"part": 1 << 21, "size": 1 << 21, "dtype": jnp.uint8}, "not uint8"),
        (DEQUANTIZE, "mosaic", H200, {}, None),
        (DEQUANTIZE, "mosaic", B200, {}, "compute capability 9.0"),
        (DEQUANTIZE, "triton", UNKNOWN, {}, "compute capability 8.0 or more"),
        (DEQUANTIZE, "mosaic", H200, {"order": "bitsandbytes"}, "split order"),
        (DEQUANTIZE, "triton", A100, {"shape": (7, 13)}, "partial"),
        (DEQUANTIZE, "mosaic", H200, {"own_map": False}, "quant_map"),
        (DEQUANTIZE, "mosaic", H200, {"shape": (1, 64)}, "at least 32 blocks"),
        (DEQUANTIZE, "triton", H200, {"shape": (1, 64)}, "at least 64 blocks"),
        (FLOAT8, "mosaic", H200, {"shape": (140, 320)}, None),
        (FLOAT8, "mosaic", H200, {"shape": (130, 256)}, "a multiple of 4 rows, 128×256 or more, this is 130×256"),
        (FLOAT8, "mosaic", H200, {"shape": (64, 256)}, "this is 64×256"),
        (FLOAT8, "mosaic", H200, {}, "this is 128×192"),
        (FLOAT8, "mosaic", ADA, {"shape": (140, 320)}, "compute capability 9.0"),
        (FLOAT8, "triton", ADA, {"shape": (140, 320)}, "whole tiles of 64 rows or more, this is 140×320"),
    ],
)
def test_what_kernels_leave_to_others_and_why(found, name, device, change, reason, monkeypatch):
    monkeypatch.setattr(compat, "JAX_VERSION", (0, 11, 2))
    said = found[name].reason(device, **SERVED.get(found, {}) | change)
    assert said is None if reason is None else re.search(reason, str(said))


@pytest.mark.parametrize("found", [attention, nf4_matmul, *SERVED], ids=lambda found: found.op)
def test_a_call_on_another_device_goes_to_xla_unless_a_kernel_is_forced(found):
    """Every operation has an implementation for every target."""
    last = list(found.implementations)[-1]
    assert len(found.implementations) > 1 and found[last].capability is None and not found[last].dtypes
    if found in SERVED and dispatch.target().platform == "cpu":
        assert found.choose(None, **SERVED[found]) == last
        with pytest.raises(NotImplementedError, match="'triton' cannot serve this call: .* the target is cpu"):
            found.choose("triton", **SERVED[found])
