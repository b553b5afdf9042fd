"""Strict numerics for every test: explicit promotion, eight fake CPU devices, no hub.

On a CPU programs are compiled for the test and not for speed: they run for milliseconds and would compile for seconds.
XLA's optimisations are off, its older emitter (a quarter of the newer one's compile time) makes the code, a program's
code stays in one piece (a tenth), and all workers share one cache of compiled programs beside the environments. A test
marked `optimized` or `aot` has XLA's defaults for its optimisations. Fusions stay: without them jaxlib 0.11 compiles
programs with wrong results.

On a card XLA takes the first of its GEMMs that serves, where a test does not ask for the tried one: trying them out
takes most of a compilation.
"""

import ctypes
import gc
import os
import sys
from importlib.metadata import version
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if os.environ["JAX_PLATFORMS"] == "cuda":  # a reference in float32 is computed beside the card
    os.environ["JAX_PLATFORMS"] = "cuda,cpu"
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # workers and a test's own process share it
if "PYTEST_XDIST_WORKER" in os.environ:  # and the cores
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# Beside the environments: a process with an empty home looks through all fonts first, for seconds.
os.environ.setdefault("MPLCONFIGDIR", str(Path(__file__).parents[1] / ".venv-test-matplotlib"))
if "cpu" in os.environ["JAX_PLATFORMS"]:
    _FLAGS = ["--xla_cpu_parallel_codegen_split_count=1"]
    if version("jaxlib").startswith("0.10."):
        _FLAGS.append("--xla_cpu_use_fusion_emitters=false")
    else:
        _FLAGS.append("--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters")
    if os.environ["JAX_PLATFORMS"] == "cpu":
        _FLAGS.append("--xla_force_host_platform_device_count=8")
        # A collective holds its thread until all devices have come to it, and those that do not depend on each other
        # are begun in any order: with a thread a device, XLA's default on few cores, devices wait for each other for
        # ever.
        os.environ.setdefault("PJRT_NPROC", "32")
    elif "xla_gpu_autotune_level" not in os.environ.get("XLA_FLAGS", ""):
        _FLAGS.append("--xla_gpu_autotune_level=0")
    os.environ["XLA_FLAGS"] = " ".join(dict.fromkeys([*os.environ.get("XLA_FLAGS", "").split(), *_FLAGS]))

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from pallas_kernels.compat import JAX_VERSION
from tests import progress, tiers

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_compilation_cache_dir", str(Path(__file__).parents[1] / ".venv-test-programs"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
ON_CPU = os.environ["JAX_PLATFORMS"] == "cpu"


@pytest.fixture(autouse=True)
def compilation(request):
    """Optimisations off on a CPU, but where a test's mark says otherwise; no cache for a card that is not there.

    A program for such a card can be stored, but not loaded again.
    """
    quick = ON_CPU and not {"aot", "optimized"} & set(request.keywords)
    jax.config.update("jax_disable_most_optimizations", quick)
    cached = "aot" not in request.keywords
    if jax.config.jax_enable_compilation_cache != cached:
        jax.config.update("jax_enable_compilation_cache", cached)
        compilation_cache.reset_cache()


def _bound_memory(gibibytes):
    """Forget the compiled programs of a process that holds more than so much memory; the cache still has them."""
    if not sys.platform.startswith("linux"):
        return
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    if pages * os.sysconf("SC_PAGE_SIZE") > gibibytes * 2**30:
        jax.clear_caches()
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)


@pytest.fixture(scope="module", autouse=True)
def bounded_memory():
    """After a module programs are of little use any more; a module of many programs may fill the memory by itself.

    Linux allows a process 65,530 maps of memory, which its programs use up at some 6 GiB: it dies of the next one.
    """
    yield
    _bound_memory(2)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown():
    """Within a module, as `bounded_memory` has it."""
    _bound_memory(4)


def pytest_collection_finish(session):
    """Modules and tests live to the end: looking through them for garbage again and again takes a tenth of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)


def pytest_addoption(parser):
    """The tier, and how long tests look that are never done."""
    tiers.add_options(parser)
    progress.add_options(parser)
    parser.addoption("--mutations", type=int, default=25, metavar="N", help="mutations of a checkpoint's files")
    parser.addoption(
        "--fuzz", type=int, metavar="N", help="hostile inputs of each kind, in tests/fuzz (400, all: 1000)"
    )
    parser.addoption("--every-mesh", action="store_true", help="all meshes of eight devices, in test_every_mesh.py")
    parser.addoption("--gpu-tests-anywhere", action="store_true", help="run tests marked gpu on whatever there is")


@pytest.fixture(scope="session", autouse=True)
def home(tmp_path_factory):
    """Files that a test keeps for the next run, such as prepared data, are its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        patch.delenv("XDG_CACHE_HOME", raising=False)
        yield


def pytest_configure(config):
    """Progress is told by the process that the workers report to."""
    if config.option.fuzz is None:
        config.option.fuzz = 1000 if config.option.tier == "all" else 400
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(progress.Progress(config))
        if tiers.run(config) == "gpu" and getattr(config.option, "maxschedchunk", 1) is None:
            config.option.maxschedchunk = 1  # few tests, of up to a hundred seconds: none waits behind another


def pytest_ignore_collect(collection_path, config):
    """A module without a test for this run is not imported either."""
    return True if tiers.is_left_out(collection_path, config) else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Leave out what another tier runs, and skip, with the reason, what this machine cannot."""
    tiers.select(config, items)
    anywhere = jax.default_backend() == "gpu" or config.getoption("gpu_tests_anywhere")
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU: run with JAX_PLATFORMS=cuda pytest -m gpu")
    for item in items:
        if "gpu" in item.keywords and not anywhere:
            item.add_marker(skip)
        if (mark := item.get_closest_marker("newer_jax")) is not None and JAX_VERSION < (0, 11):
            item.add_marker(pytest.mark.skip(reason=mark.args[0]))
