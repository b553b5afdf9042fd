"""Mutation testing: how many small faults, planted one at a time, a module's own tests find.

python scripts/measure_mutations.py --mutants 20 --seed 0
python scripts/measure_mutations.py packing nf4                        these modules alone

A mutant has one comparison, arithmetic or boolean operator, condition, number or return value changed. Each is tried on
the default tier of the module's tests, and one that survives on all of them. The work is done in a temporary copy of
the tree; the modules and their tests are the table below. Tests that fail without a mutant are left out and counted.
"""

import argparse
import ast
import copy
import importlib
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]


class Target(NamedTuple):
    """A module under test.

    Attributes:
        module: Its path.
        names: Its own tests, in the folder that mirrors its own.
        functions: Only these are mutated; empty: all.
    """

    module: str
    names: str
    functions: tuple[str, ...] = ()

    @property
    def tests(self) -> list[str]:
        """Paths of its own tests."""
        return [str(Path("tests", self.module).with_name(f"test_{name}.py")) for name in self.names.split()]


TARGETS = {
    "encoding": Target("fastjax/data/encoding.py", "encoding ends template"),
    "packing": Target("fastjax/data/packing.py", "packing batches"),
    "nf4": Target("convert/formats/nf4.py", "nf4"),
    "export": Target(
        "convert/adapters.py", "adapters merge", ("write_adapter", "_file_name", "_check", "_twins", "_whole")
    ),
    "template": Target("fastjax/data/responses.py", "template named_templates encoding"),
    "ranges": Target("pallas_kernels/attention/ranges.py", "ranges features"),
    "units": Target("fastjax/lora/linear.py", "linear"),
    "resume": Target("fastjax/runs/resume.py", "resume folder"),
}

#: Imported once, before the first test: each run is a fork.
SHARED = "jax flax.nnx optax tensorstore transformers tokenizers hypothesis safetensors.numpy".split()

_PAIRS: tuple[tuple[type[ast.AST], type[ast.AST]], ...] = (
    *((ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot), (ast.In, ast.NotIn)),
    *((ast.Add, ast.Sub), (ast.Mult, ast.FloorDiv), (ast.LShift, ast.RShift), (ast.BitAnd, ast.BitOr)),
    (ast.And, ast.Or),
)
SWAPS: dict[type[ast.AST], type[ast.AST]] = {one: other for pair in _PAIRS for one, other in (pair, pair[::-1])}
SWAPS |= {ast.Div: ast.Mult, ast.Mod: ast.FloorDiv}


def changes(node: ast.AST) -> Iterator[tuple[str, Callable[[ast.AST], None]]]:
    """Description and change, in place, of each mutation of one node."""

    def put(make: Callable[[Any], ast.AST], field: str, index: int | None):
        def change(copied: ast.AST) -> None:
            if index is None:
                setattr(copied, field, make(getattr(copied, field)))
            else:
                getattr(copied, field)[index] = make(getattr(copied, field)[index])

        return change

    def swap(field: str, operator: ast.AST, index: int | None = None):
        other = SWAPS[type(operator)]
        return f"{type(operator).__name__} → {other.__name__}", put(lambda _: other(), field, index)

    def negated(field: str, index: int | None = None):
        return "condition negated", put(lambda value: ast.UnaryOp(ast.Not(), value), field, index)

    if isinstance(node, ast.Compare):
        for index, operator in enumerate(node.ops):
            yield swap("ops", operator, index)
    elif isinstance(node, (ast.BinOp, ast.AugAssign, ast.BoolOp)) and type(node.op) in SWAPS:
        yield swap("op", node.op)
    elif isinstance(node, (ast.If, ast.IfExp, ast.While)) and not _is_true(node.test):
        yield negated("test")
    elif isinstance(node, ast.comprehension):
        for index in range(len(node.ifs)):
            yield negated("ifs", index)
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        value = node.value
        yield f"{value} → {not value}", lambda copied: setattr(copied, "value", not value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        number = node.value
        yield f"{number} → {number + 1}", lambda copied: setattr(copied, "value", number + 1)
    elif isinstance(node, ast.Return) and node.value is not None and not _is_none(node.value):
        yield "return → None", lambda copied: setattr(copied, "value", ast.Constant(None))


def _is_true(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is True


def _is_none(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def mutable(tree: ast.AST, functions: tuple[str, ...]) -> list[int]:
    """Positions in `ast.walk` of the mutable nodes, without annotations."""
    skipped: set[ast.AST] = set()
    for node in ast.walk(tree):
        for field in ("annotation", "returns"):
            if getattr(node, field, None) is not None:
                skipped |= set(ast.walk(getattr(node, field)))
    inside = set(ast.walk(tree))
    if functions:
        named = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name in functions]
        assert {node.name for node in named} == set(functions), "a function of the table is gone"
        inside = {node for function in named for part in function.body for node in ast.walk(part)}
    return [place for place, node in enumerate(ast.walk(tree)) if node in inside and node not in skipped]


def mutants(source: str, functions: tuple[str, ...]) -> list[tuple[str, str]]:
    """(description, source) of every mutant of a module."""
    tree, found = ast.parse(source), []
    nodes = list(ast.walk(tree))
    for place in mutable(tree, functions):
        for name, change in changes(nodes[place]):
            copied = copy.deepcopy(tree)
            node = list(ast.walk(copied))[place]
            change(node)
            mutated = nodes[place]
            located = mutated.target if isinstance(mutated, ast.comprehension) else mutated
            found.append(
                (f"line {getattr(located, 'lineno', None)}: {name}", ast.unparse(ast.fix_missing_locations(copied)))
            )
    return found


class Outcome(NamedTuple):
    """A test run's result: whether all passed, the failures' node ids, its seconds."""

    passed: bool
    failures: list[str]
    seconds: float


def run(
    folder: Path, target: Target, tier: str, *, deselected: Sequence[str] = (), stop: bool = True, limit: float = 900
) -> Outcome:
    """Run a tier of a target's tests in a copy of the tree; a run longer than `limit` seconds has failed.

    In a fork of this process, which has imported the slow libraries and nothing of the tree.
    """
    arguments = [*target.tests, f"--tier={tier}", "-q", "-p", "no:cacheprovider", "-rfE", "--hypothesis-seed=0"]
    arguments += ["-x"] * stop + [
        "-W",
        "ignore::pytest.PytestAssertRewriteWarning",
        *(f"--deselect={test}" for test in deselected),
    ]
    output, start = folder / "output.txt", time.monotonic()
    child = os.fork()
    if not child:
        try:
            os.setsid()
            with open(output, "w") as stream:
                os.dup2(stream.fileno(), 1)
                os.dup2(stream.fileno(), 2)
            os.chdir(folder)
            os.environ["PYTHONPATH"] = sys.path[0] = str(folder)
            os._exit(pytest.main(arguments))
        except BaseException:
            traceback.print_exc()
        os._exit(70)
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        if time.monotonic() - start > limit:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return Outcome(False, ["timeout"], limit)
        time.sleep(0.05)
    failures = re.findall(r"^(?:FAILED|ERROR) (\S+?::.+?|\S+)(?: - .*)?$", output.read_text(), re.MULTILINE)
    status = os.waitstatus_to_exitcode(ended[1])
    if status > 2:
        raise RuntimeError(f"pytest ended with {status}:\n{output.read_text()[-2000:]}")
    return Outcome(status == 0, failures, time.monotonic() - start)


def copy_tree(folder: Path) -> None:
    """Copy the packages and their tests."""
    for name in ("convert", "fastjax", "pallas_kernels", "scripts", "examples", "docs", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    if (ROOT / ".venv-test-programs").exists():
        (folder / ".venv-test-programs").symlink_to((ROOT / ".venv-test-programs").resolve())


def measure(name: str, count: int, seed: int) -> dict:
    """Plant one module's mutants; returns its counts and survivors."""
    target = TARGETS[name]
    with tempfile.TemporaryDirectory(prefix="mutants-") as temporary:
        folder = Path(temporary)
        copy_tree(folder)
        file = folder / target.module
        source = file.read_text()
        file.write_text(ast.unparse(ast.parse(source)))
        before = {tier: run(folder, target, tier, stop=False) for tier in ("default", "all")}
        seconds = {tier: round(outcome.seconds) for tier, outcome in before.items()}
        failing = before["all"].failures
        print(f"  {name}: seconds {seconds}; without a mutant fail {failing}", file=sys.stderr, flush=True)
        everything = mutants(source, target.functions)
        chosen = random.Random(f"{seed} {name}").sample(everything, min(count, len(everything)))
        killers: dict[str, list[tuple[str, str]]] = {tier: [] for tier in before}
        survivors = []
        for described, mutant in chosen:
            file.write_text(mutant)
            for tier, outcome in before.items():
                done = run(folder, target, tier, deselected=failing, limit=60 + 4 * outcome.seconds)
                if not done.passed:
                    killers[tier].append((described, done.failures[0] if done.failures else ""))
                    became = f"killed by {tier}"
                    break
            else:
                survivors.append(described)
                became = "SURVIVED"
            print(f"  {name}: {described}: {became}", file=sys.stderr, flush=True)
    return {
        "module": target.module,
        "possible": len(everything),
        "mutants": len(chosen),
        "seconds": seconds,
        "killed": {"default": len(killers["default"]), "all": len(chosen) - len(survivors)},
        "survivors": survivors,
        "killers": killers,
        "tests_left_out": failing,
    }


def main() -> None:
    """Print a line a module, and all as JSON with --json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", choices=[*TARGETS, []], metavar="module", help=", ".join(TARGETS))
    parser.add_argument("--mutants", type=int, default=20, help="sampled of each module")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    sys.dont_write_bytecode = True
    for module in SHARED:
        importlib.import_module(module)
    found = {}
    for name in options.modules or TARGETS:
        row = found[name] = measure(name, options.mutants, options.seed)
        killed = row["killed"]
        print(
            f"{name:10} of {row['mutants']:3} killed: default tier {killed['default']:3}, all {killed['all']:3}; "
            f"{len(row['tests_left_out'])} tests left out",
            flush=True,
        )
        for described, test in row["killers"]["all"]:
            print(f"           by --tier all alone: {row['module']} {described} ({test})")
        for survivor in row["survivors"]:
            print(f"           survived: {row['module']} {survivor}")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
