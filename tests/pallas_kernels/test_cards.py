"""NVIDIA's cards: capabilities by product name, and peak rates."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.cards import CARDS, PEAK_FLOPS, compute_capability_of, peak_flops


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
    assert compute_capability_of(device_kind) == expected


def test_peak_flops():
    assert peak_flops("NVIDIA H200", jnp.bfloat16) == peak_flops("NVIDIA H200", "float16") == 989.4e12
    assert peak_flops("NVIDIA H200", np.dtype("float32")) == 66.9e12
    assert peak_flops("NVIDIA H200", "tf32") == 494.7e12
    assert peak_flops("Tesla T4", jnp.bfloat16) is None
    assert peak_flops("Tesla T4", jnp.float16) == 65e12
    for unknown in ("cpu", "NVIDIA H200 MIG 1g.18gb", "NVIDIA GeForce RTX 4090 Laptop GPU"):
        assert peak_flops(unknown, jnp.bfloat16) is None
    assert peak_flops("NVIDIA H200", "int8") is None
    for peak in PEAK_FLOPS.values():  # dense figures: TF32 is half of 16 bit; 2%: NVIDIA prints three digits
        assert peak.tf32 is None or peak.half / peak.tf32 == pytest.approx(2, rel=0.02)
        assert peak.half > peak.float32


@pytest.mark.parametrize("name", CARDS)
def test_every_card_to_plan_for_has_its_rates(name):
    assert CARDS[name].device_kind in PEAK_FLOPS and CARDS[name].capability >= (7, 5)
