"""Measured block sizes: those of the table for its card and case, else the kernel's guess."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from pallas_kernels.attention import block_sizes
from pallas_kernels.attention.block_sizes import entries, measured
from pallas_kernels.attention.mosaic_sm90 import config as mosaic
from pallas_kernels.attention.options import Options
from pallas_kernels.attention.triton import config as triton

OPTIONS = Options(128**-0.5)
CASE = "bfloat16 D=128 Dv=128 causal documents grouped"


def on(card):
    return use_abstract_mesh(AbstractMesh((), (), abstract_device=AbstractDevice(card, 132, platform="cuda")))


def guess(name, size, value_size, options, flags):
    """The block sizes that a kernel would have on Hopper."""
    implementation, kernel = name.split(".")
    if implementation == "triton":
        return getattr(triton.triton_config(size, value_size, options, (9, 0)), kernel)
    about = {"documents": "documents" in flags, "grouped": "grouped" in flags}
    if kernel == "dkv":
        return mosaic.dkv_config(size, value_size, options)
    make = mosaic.forward_config if kernel == "forward" else mosaic.dq_config
    return make(size, value_size, options, **about)


def test_every_entry_is_of_its_kernel():
    assert len(entries()) > 5
    for key, fields in entries().items():
        card, name, case = key.split(" | ")
        _, size, value_size, *flags = case.split()
        size, value_size = int(size.removeprefix("D=")), int(value_size.removeprefix("Dv="))
        options = Options(
            1.0,
            causal="causal" in flags,
            sliding_window=1 if "window" in flags else None,
            logits_soft_cap=1.0 if "cap" in flags else None,
            dropout_rate=0.5 if "dropout" in flags else 0.0,
        )
        name = name.removeprefix("attention.")
        own = guess(name, size, value_size, options, flags)
        with on(card):
            found = measured(name, case, own)
        assert type(found) is type(own) and dataclasses.asdict(found) == fields, key
        with on("NVIDIA A100-SXM4-80GB"):
            assert measured(name, case, own) == own


@pytest.mark.parametrize("name", ["forward", "dkv", "dq"])
def test_the_kernels_ask_for_the_block_sizes_of_their_own_call(name, monkeypatch):
    own = triton.triton_config(128, 128, OPTIONS, (9, 0))
    other = dataclasses.replace(getattr(own, name), num_stages=7)
    found = {f"NVIDIA H200 | attention.triton.{name} | {CASE}": dataclasses.asdict(other)}
    monkeypatch.setattr(block_sizes, "entries", lambda: found)
    q, k = (jax.ShapeDtypeStruct((1, 64, heads, 128), jnp.bfloat16) for heads in (8, 2))
    with on("NVIDIA H200"):
        chosen = triton.chosen_config(q, k, k, OPTIONS, documents=True)
        assert chosen == dataclasses.replace(own, **{name: other})
        assert triton.chosen_config(q, k, k, OPTIONS, documents=False) == own
        assert triton.chosen_config(q, q, q, OPTIONS, documents=True) == own
