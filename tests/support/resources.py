"""ptxas's report on Pallas kernels that `aot` compiles: registers, spills, stack.

A Mosaic kernel's report is dumped on request. A Triton kernel's PTX is dumped by XLA, which can also refuse a kernel
that spills (with an error from `compile`); its registers need a ptxas on this machine.
"""

import hashlib
import pathlib
import re
import shutil
import subprocess
import types
from typing import NamedTuple

import jax
import pytest
from jax.experimental.mosaic.gpu import core as mosaic

from tests.support import hazards
from tests.support.aot import AOT

_PTXAS = shutil.which("ptxas") or shutil.which("ptxas", path="/usr/local/cuda/bin")


class Resources(NamedTuple):
    """Resources of one thread."""

    registers: int
    spill_bytes: int
    stack_bytes: int


def _parse(report: str) -> Resources:
    stack, stores, loads = re.search(
        r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", report
    ).groups()
    return Resources(int(re.search(r"Used (\d+) registers", report)[1]), int(stores) + int(loads), int(stack))


def of_mosaic(aot: AOT, function, *specs, folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Resources:
    """Compile a function with Mosaic kernels; returns the maximum over them.

    An error if ptxas serialised a kernel's matrix products.
    """
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(folder))
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    # A process caches an assembled kernel under its hash, and does not report it again.
    own = str(folder).encode()
    monkeypatch.setattr(mosaic, "hashlib", types.SimpleNamespace(sha256=lambda text: hashlib.sha256(text + own)))
    jax.clear_caches()
    aot.compile(function, *specs)
    reports = [file.read_text() for file in folder.glob("*.ptxas")]
    serialized = [line for report in reports for line in report.splitlines() if "are serialized" in line]
    assert not serialized, serialized
    return Resources(*(max(column) for column in zip(*map(_parse, reports), strict=True)))


def of_triton(aot: AOT, function, *specs, folder: pathlib.Path) -> Resources | None:
    """Compile a function with Triton kernels; returns the maximum over them.

    An error if one spills, or fetches a tile into a buffer that a matrix product may still be reading; None without a
    ptxas.
    """
    options = {
        "xla_gpu_fail_ptx_compilation_on_register_spilling": True,
        "xla_gpu_enable_triton_gemm": False,  # XLA's own, which a step does not have either
        "xla_dump_to": str(folder),
        "xla_dump_emitter_re": "ptx",
    }
    aot.compile(function, *specs, options=options)
    kernels = [file for file in folder.glob("*.ptx") if ".entry" in file.read_text()]
    for kernel in kernels:
        hazards.check(kernel.read_text())
    if _PTXAS is None:
        return None
    return Resources(*(max(column) for column in zip(*map(_assemble, kernels), strict=True)))


def _assemble(ptx: pathlib.Path) -> Resources:
    arch = re.search(r"^\.target (\w+)", ptx.read_text(), re.MULTILINE)[1]
    command = [_PTXAS, "-v", f"-arch={arch}", str(ptx), "-o", str(ptx.with_suffix(".cubin"))]
    return _parse(subprocess.run(command, capture_output=True, text=True, check=True).stderr)
