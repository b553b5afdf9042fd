"""Tiers of tests: --tier quick while writing, default before a commit, all before a release.

The default tier has each mechanism once, by its most telling case, and all that has ever failed silently. What else
there is carries the mark `exhaustive`, beside the test, with the name of a faster one that turns red first. The quick
tier is made of the default tier's fast modules, by the seconds in durations.json. Under both pairs of Python and JAX
the newer one runs the tests; the older one, which has torch, those marked `torch` or `older_jax`.
"""

import collections
import json
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
TIERS = "quick", "default", "all"
DURATIONS = TESTS / "durations.json"
#: The quick tier has the modules that take less, in seconds of a core.
QUICK_SECONDS = 2.0
#: Marks of the older pair's share.
OLDER = "torch", "older_jax"


def add_options(parser):
    parser.addoption("--tier", choices=TIERS, default="default", help="which tests (tests/tiers.py)")
    parser.addoption(
        "--share", choices=("newer", "older"), help="only what this pair of Python and JAX runs by default"
    )


def run(config) -> str:
    """Which of a module's durations this run's tests have: "gpu" with -m gpu, else the tier."""
    if config.getoption("markexpr") == "gpu":
        return "gpu"
    return "all" if config.getoption("tier") == "all" else "default"


def durations() -> dict[str, dict[str, float]]:
    """Module → run ("default", "all", "gpu") → seconds of a core."""
    return json.loads(DURATIONS.read_text())


def is_left_out(path, config) -> bool:
    """Whether a module has no test for this run, as its seconds or its text say: it is not even imported."""
    if path.suffix != ".py" or path.name == "conftest.py":
        return False
    if run(config) == "gpu" and "mark.gpu" not in path.read_text():
        return True
    share = config.getoption("share")
    if share == "older" and not any(f"mark.{mark}" in path.read_text() for mark in OLDER):
        return True
    if share == "newer" and re.search(r'^(\w+ = )?pytest\.importorskip\("torch"', path.read_text(), re.MULTILINE):
        return True
    seconds = durations().get(path.relative_to(TESTS).as_posix(), {}).get("default", 0.0)
    return config.getoption("tier") == "quick" and seconds >= QUICK_SECONDS


def is_exhaustive(item) -> bool:
    """Whether a test, or this case of it, is left to --tier all."""
    for mark in item.iter_markers("exhaustive"):
        if not mark.args or item.callspec.id not in mark.args:
            return True
    return False


def select(config, items) -> None:
    """Deselect what the tier leaves out; a test named by its id (with ::) is run, and one for a card."""
    _check(items)
    named = [argument for argument in config.args if "::" in argument]
    share = config.getoption("share")

    def is_out(item) -> bool:
        if share and (share == "older") != any(mark in item.keywords for mark in OLDER):
            return True
        if config.getoption("tier") == "all" or "gpu" in item.keywords:
            return False
        return is_exhaustive(item) and not any(_names(text, item) for text in named)

    left_out = {item for item in items if is_out(item)}
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    known, kept = durations(), [item for item in items if item not in left_out]
    counts = collections.Counter(item.path for item in kept)

    def seconds(item) -> float:
        whole = known.get(item.path.relative_to(TESTS).as_posix(), {}).get(run(config), 0.0)
        return whole / counts[item.path] if run(config) == "gpu" else whole

    # The slowest modules first, on a card those with the slowest tests, which come one by one: at the end no worker
    # waits for another's.
    items[:] = sorted(kept, key=seconds, reverse=True)


def _names(argument: str, item) -> bool:
    path, _, test = argument.partition("::")
    name = item.nodeid.partition("::")[2]
    return item.path == Path(path).resolve() and (name == test or name.startswith(f"{test}["))


def _check(items) -> None:
    """Refuse marks that name a case or a faster test which does not exist, or is itself left to --tier all."""
    cases: dict[str, set[str]] = {}
    left_out: dict[str, bool] = {}
    for item in items:
        test = item.nodeid.partition("[")[0]
        cases.setdefault(test, set()).add(item.callspec.id if hasattr(item, "callspec") else "")
        left_out[test] = left_out.get(test, True) and is_exhaustive(item)
    wrong = set()
    for item in items:
        test, module = item.nodeid.partition("[")[0], item.nodeid.partition("::")[0]
        for mark in item.iter_markers("exhaustive"):
            if mark.args and len(cases[test]) > 1 and (unknown := set(mark.args) - cases[test]):
                wrong.add(f"{test} has no case {sorted(unknown)}")
            by = mark.kwargs.get("by", "")
            if not mark.args and not by:
                wrong.add(f"{test}: exhaustive(by=...) names the faster test that turns red first")
            for name in filter(None, by.split(", ")):
                other = (name if "::" in name else f"{module}::{name}").partition("[")[0]
                if left_out.get(other) or not _exists(other):
                    wrong.add(f"{test}: {name} is no test of the default tier")
    if wrong:
        raise pytest.UsageError("\n".join(["marks `exhaustive`:", *sorted(wrong)]))


def _exists(test: str) -> bool:
    path, _, name = test.partition("::")
    file = TESTS.parent / path
    return file.is_file() and re.search(rf"^def {re.escape(name)}\(", file.read_text(), re.MULTILINE) is not None
