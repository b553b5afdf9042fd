"""Tables, kinds of kernels, and the libraries beside this one."""

import dataclasses
import io

import pytest
from rich.console import Console

from fastjax.bench.generate import kernels, peers
from fastjax.bench.generate.kernels import kind_of, kinds_of
from fastjax.bench.generate.settings import GenerateSettings
from fastjax.bench.generate.table import print_results, with_slowdown
from fastjax.bench.trace import Kernel

SETTINGS = GenerateSettings("tiny", rows=(2,), r=(0, 4))
ROW = {
    **{"by": "fastjax", "case": "decode", "device": "NVIDIA H200", "jax": "0.11.2", "rows": 32, "r": 0},
    **{
        "layer_loop": "unroll",
        "cache_dtype": None,
        "tokens_per_second": 5000.0,
        "milliseconds": 6.4,
        "context": 1024.5,
    },
    **{"compile_seconds": 28.1, "peak_bytes": 12 * 2**30, "reason": None},
}


def test_the_table_has_what_adapters_cost():
    with_adapters = ROW | {"r": 16, "tokens_per_second": 4000.0, "milliseconds": 8.0}
    other = ROW | {
        "by": "Unsloth 1.2",
        "r": 16,
        "layer_loop": None,
        "tokens_per_second": 600.0,
        "compile_seconds": None,
    }
    lost = {name: ROW[name] for name in ("by", "case", "device", "jax", "rows", "layer_loop", "cache_dtype")}
    lost |= {"r": 64, "reason": "out of memory"}
    rows = with_slowdown([ROW, with_adapters, other, lost])
    assert [row["slower"] for row in rows] == [None, pytest.approx(0.2), None, None]
    console = Console(file=io.StringIO(), width=80)
    print_results(console, SETTINGS, rows)
    text = console.file.getvalue()
    lines = [line.split() for line in text.splitlines()]
    assert "steady decoding · tiny, NF4 · NVIDIA H200 · jax 0.11.2" in " ".join(text.split())
    assert ["fastjax", "16", "unroll", "32", "4,000", "8.00", "1,024", "20.0%", "28.1", "12.00"] in lines
    assert ["Unsloth", "16", "32", "600", "6.40", "1,024", "12.00"] in lines
    assert "fastjax 64 unroll: out of memory" in text and "…" not in text


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("loop_dynamic_update_slice_fusion_12", "loop_dynamic_update_slice_fusion"),
        ("gemm_fusion_dot.3_0", "gemm_fusion_dot"),
        ("MemcpyD2D", "MemcpyD2D"),
        ("void cutlass::Kernel2<cutlass_80_tensorop>(Params)", "cutlass::Kernel2"),
        ("nvjet_hsh_128x64_64x9_2x1_v_bz_TNN", "nvjet_hsh_v_bz_TNN"),
        ("nf4_product_4", "nf4_product"),
    ],
)
def test_kernels_of_one_kind(name, kind):
    assert kind_of(name) == kind


def test_kernels_of_a_token(monkeypatch, tmp_path):
    """Two tokens: three kernels, of which two run at once."""
    runs = [("nf4_1", 0, 4000), ("nf4_2", 4000, 8000), ("copy", 6000, 10_000)]
    found = [Kernel("/device:GPU:0", name, "jit_decode", start, end) for name, start, end in runs]
    monkeypatch.setattr(kernels, "read_kernels", lambda folder: found)
    kinds = kinds_of(tmp_path, 2)
    assert kinds is not None and kinds.kernels == 1.5 and kinds.busy == pytest.approx(5e-6)
    assert [(row["kind"], row["kernels"], row["microseconds"]) for row in kinds.kinds] == [
        ("nf4", 1.0, 4.0), ("copy", 0.5, 2.0),
    ]  # fmt: skip
    assert kinds.kinds[0]["share"] == pytest.approx(2 / 3)
    monkeypatch.setattr(kernels, "read_kernels", lambda folder: [])
    assert kinds_of(tmp_path, 2) is None


@pytest.mark.parametrize(
    ("changes", "reasons"),
    [
        ({}, (None, None)),
        ({"r": (0,)}, (None, "measured with adapters alone")),
        ({"preset": "qwen3-30b-a3b"}, ("mixtures of experts are not in NF4 there",) * 2),
        ({"dtype": "float16"}, ("measured in bfloat16 alone, not in float16",) * 2),
    ],
)
def test_libraries_that_are_not_measured(changes, reasons, monkeypatch):
    settings = dataclasses.replace(SETTINGS, **changes)
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    absent = ("not installed (transformers, bitsandbytes, torch)", "not installed (unsloth)")
    assert tuple(peers.why_not(peer, settings) for peer in peers.PEERS) == absent
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: "there")
    assert tuple(peers.why_not(peer, settings) for peer in peers.PEERS) == reasons
