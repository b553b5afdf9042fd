"""Strict numerics for every test: explicit promotion, eight fake CPU devices, no hub.

On a CPU programs are compiled for the test and not for speed: they run for milliseconds and would compile for seconds.
XLA's optimisations are off, its older emitter (a third of the newer one's compile time) makes the code where jaxlib
still has it, a program's code stays in one piece (a tenth), and all workers share one cache of compiled programs beside
the environments. A test marked `optimized` or `aot` has XLA's defaults for its optimisations. Fusions stay: without
them jaxlib 0.11 compiles in half the time, to programs with wrong results.
"""

import collections
import ctypes
import gc
import os
import sys
import zlib
from importlib.metadata import version
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if os.environ["JAX_PLATFORMS"] == "cuda":  # a reference in float32 is computed beside the card
    os.environ["JAX_PLATFORMS"] = "cuda,cpu"
if "PYTEST_XDIST_WORKER" in os.environ:  # several processes share one card
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
if "cpu" in os.environ["JAX_PLATFORMS"]:
    _FLAGS = ["--xla_cpu_parallel_codegen_split_count=1"]
    if version("jaxlib").startswith("0.10."):
        _FLAGS.append("--xla_cpu_use_fusion_emitters=false")
    if os.environ["JAX_PLATFORMS"] == "cpu":
        _FLAGS.append("--xla_force_host_platform_device_count=8")
        # A collective holds its thread until all devices have come to it, and those that do not depend on each other
        # are begun in any order: with a thread a device, XLA's default on few cores, devices wait for each other for
        # ever.
        os.environ.setdefault("PJRT_NPROC", "32")
    os.environ["XLA_FLAGS"] = " ".join(dict.fromkeys([*os.environ.get("XLA_FLAGS", "").split(), *_FLAGS]))

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from pallas_kernels.compat import JAX_VERSION

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


@pytest.fixture(scope="module", autouse=True)
def bounded_memory():
    """A worker that holds more than 1.5 GiB after a module forgets its compiled programs; the cache still has them."""
    yield
    if not sys.platform.startswith("linux"):
        return
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    if pages * os.sysconf("SC_PAGE_SIZE") > 1.5 * 2**30:
        jax.clear_caches()
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)


def pytest_collection_finish(session):
    """Modules and tests live to the end: looking through them for garbage again and again takes a tenth of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)


def pytest_addoption(parser):
    """How long tests look that are never done."""
    parser.addoption("--mutations", type=int, default=25, metavar="N", help="mutations of a checkpoint's files")
    parser.addoption("--fuzz", type=int, default=1000, metavar="N", help="hostile inputs of each kind, in tests/fuzz")
    parser.addoption("--every-mesh", action="store_true", help="all meshes of eight devices, in test_every_mesh.py")
    parser.addoption("--gpu-tests-anywhere", action="store_true", help="run tests marked gpu on whatever there is")


@pytest.fixture(scope="session", autouse=True)
def home(tmp_path_factory):
    """What a test keeps for the next run, as prepared data, it keeps for no one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        patch.delenv("XDG_CACHE_HOME", raising=False)
        yield


#: The mark of what only the older world runs, which has torch, and of what only the newer one does.
WORLDS = "one_world", "newer_world"
#: Files, texts and tables, and runs that other tests make in both worlds: modules and folders.
ONE_WORLD = (
    "convert",
    "fastjax/bench",
    "fastjax/cli/test_bench.py",
    "fastjax/cli/test_broken_runs.py",
    "fastjax/cli/test_compare.py",
    "fastjax/cli/test_convert.py",
    "fastjax/cli/test_cookbook.py",
    "fastjax/cli/test_documentation.py",
    "fastjax/cli/test_hub_names.py",
    "fastjax/cli/test_import_config.py",
    "fastjax/cli/test_import_preferences.py",
    "fastjax/cli/test_mixture.py",
    "fastjax/cli/test_preview.py",
    "fastjax/cli/test_quantization_aware.py",
    "fastjax/cli/test_quickstart.py",
    "fastjax/cli/test_resume.py",
    "fastjax/cli/test_run_import.py",
    "fastjax/cli/test_train.py",
    "fastjax/data",
    "fastjax/evaluation",
    "fastjax/lora/test_experts.py",
    "fastjax/lora/test_models.py",
    "fastjax/lora/test_quantized.py",
    "fastjax/models/test_families.py",
    "fastjax/models/test_load.py",
    "fastjax/models/test_mixture_formats.py",
    "fastjax/models/test_precision.py",
    "fastjax/models/test_quantized.py",
    "fastjax/models/test_vocabulary.py",
    "fastjax/parity",
    "fastjax/quantization/test_fake.py",
    "fastjax/quantization/test_served_weights.py",
    "fastjax/runs/test_sft.py",
    "fastjax/runs/test_trainer.py",
    "fastjax/test_merged.py",
    "fastjax/test_notebooks.py",
    "fastjax/training/preferences",
    "fastjax/training/test_accumulation.py",
    "fastjax/training/test_device_steps.py",
    "fastjax/training/test_loss.py",
    "fastjax/training/test_packed_data.py",
    "fastjax/training/test_progress.py",
    "fastjax/training/test_report.py",
    "fuzz",
    "scripts",
    "test_architecture.py",
)
#: Modules and folders that take more than ten seconds of a core.
SLOW = (
    "fastjax/bench/step/test_check.py",
    "fastjax/bench/step/test_run.py",
    "fastjax/cli/test_bench.py",
    "fastjax/cli/test_broken_runs.py",
    "fastjax/cli/test_cookbook.py",
    "fastjax/cli/test_hub_names.py",
    "fastjax/cli/test_launch.py",
    "fastjax/cli/test_mixture.py",
    "fastjax/cli/test_quickstart.py",
    "fastjax/cli/test_resume.py",
    "fastjax/cli/test_run_import.py",
    "fastjax/cli/test_train.py",
    "fastjax/lora",
    "fastjax/models",
    "fastjax/parallel",
    "fastjax/parity",
    "fastjax/quantization",
    "fastjax/runs/test_trainer.py",
    "fastjax/training/test_accumulation.py",
    "fastjax/training/test_every_mesh.py",
    "fastjax/training/test_packed_data.py",
    "fastjax/training/test_step.py",
    "fastjax/test_notebooks.py",
    "fastjax/training/test_step_on_mesh.py",
    "pallas_kernels/attention",
    "pallas_kernels/glu",
    "pallas_kernels/grouped_matmul",
    "pallas_kernels/nf4",
    "pallas_kernels/split_rope",
)


def pytest_ignore_collect(collection_path, config):
    """A module that `-m "not slow"` or `-m "not one_world"` leaves out is not imported either."""
    left_out = {"not slow": SLOW, "not one_world": ONE_WORLD}.get(config.option.markexpr, ())
    return True if str(collection_path.relative_to(Path(__file__).parent)) in left_out else None


def _mark_newer(item):
    """What needs JAX 0.11 is left to the world that has it, and skipped where that is the only one without."""
    if (mark := item.get_closest_marker("newer_jax")) is not None:
        item.add_marker("newer_world")
        if JAX_VERSION < (0, 11):
            item.add_marker(pytest.mark.skip(reason=mark.args[0]))


def _share_out(items):
    """Of a test's cases that nothing is said of both worlds run the first, and one of them, by its name, each other.

    Nothing is left to neither: that is an error.
    """
    said = {*WORLDS, "both_worlds"}
    tests = collections.defaultdict(list)
    for item in items:
        if hasattr(item, "callspec") and not said & {mark.name for mark in item.iter_markers()}:
            tests[item.nodeid.partition("[")[0]].append(item)
    for _, *others in tests.values():
        for item in others:
            item.add_marker(WORLDS[zlib.crc32(item.callspec.id.encode()) % 2])
    if neither := [item.nodeid for item in items if all(item.get_closest_marker(world) for world in WORLDS)]:
        raise pytest.UsageError(f"marked both one_world and newer_world, so that no world runs it: {neither}")


def _mark_cases(item):
    """The cases of a test that `both_worlds` does not name are left to one world."""
    for mark in item.iter_markers("both_worlds"):
        if item.callspec.id not in mark.args:
            item.add_marker(mark.kwargs.get("others", "one_world"))


def _check_names(items):
    """A name that no case has would silently leave a case to one world."""
    named, found = collections.defaultdict(set), collections.defaultdict(set)
    for item in items:
        for mark in item.iter_markers("both_worlds"):
            test = item.nodeid.partition("[")[0]
            named[test] |= set(mark.args)
            found[test].add(item.callspec.id)
    if wrong := {test: names - found[test] for test, names in named.items() if names - found[test]}:
        raise pytest.UsageError(f"both_worlds names cases that do not exist: {wrong}")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Marks by folder; tests marked gpu run only where there is one, elsewhere they are skipped with the reason."""
    if not any("::" in argument for argument in config.args):
        _check_names(items)
    here = Path(__file__).parent
    anywhere = jax.default_backend() == "gpu" or config.getoption("gpu_tests_anywhere")
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU: run with JAX_PLATFORMS=cuda pytest -m gpu")
    for item in items:
        module = item.path.relative_to(here)
        parents = {str(path) for path in (module, *module.parents)}
        if parents & set(ONE_WORLD):
            item.add_marker("one_world")
        if parents & set(SLOW):
            item.add_marker("slow")
        if "gpu" in item.keywords and not anywhere:
            item.add_marker(skip)
        if "torch" in item.keywords:
            item.add_marker("one_world")
        _mark_newer(item)
        _mark_cases(item)
    _share_out(items)
