"""The house keeps its shape: floors, one parser of paths, no lists of names, no branches on a family."""

import ast
import functools
import re
from pathlib import Path

import pytest

from convert.families import FAMILIES

ROOT = Path(__file__).parents[1]
PACKAGES = ("convert", "pallas_kernels", "fastjax")
#: The floors of fastjax, top down: a module imports from its own floor and from those below it.
FLOORS = (
    ("cli", "__main__", "commands", "bench", "chat_templates"),
    ("serving", "chat"),
    ("runs", "preview", "config_import", "trainer"),
    ("language_model",),
    ("evaluation",),
    ("generation",),
    ("planning",),
    ("training",),
    ("execution",),
    ("models",),
    ("lora",),
    ("quantization",),
    ("data", "parallel"),
    ("errors", "limits", "strict_yaml", "options", "residuals", "buffers", "host_memory", "assets"),
)
#: Modules that take dotted names apart which are no paths of the tree -> what the names are.
OTHER_NAMES = {
    "convert/model/paths.py": "the parser itself",
    "pallas_kernels/compat.py": "versions",
    "fastjax/commands/settings.py": "keys of the settings, section.key",
    "fastjax/commands/hints.py": "keys of the settings, section.key",
    "fastjax/config_import/job.py": "keys of the settings, section.key",
    "fastjax/runs/opening.py": "keys of the settings, section.key",
    "fastjax/runs/settings_changes.py": "keys of the settings, section.key",
}


@functools.cache
def modules():
    """Module name -> its syntax tree."""
    files = [file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py"))]
    return {name_of(file): ast.parse(file.read_text("utf-8"), str(file)) for file in files}


def name_of(file):
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def path_of(module):
    file = ROOT / Path(*module.split("."))
    return str((file / "__init__.py" if file.is_dir() else file.with_suffix(".py")).relative_to(ROOT))


def imports(tree):
    """Names that a module imports: as it is loaded, in functions, and for types alone."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module is not None, "imports are absolute"
            inside = [f"{node.module}.{alias.name}" for alias in node.names]
            found += [name if name in modules() else node.module for name in inside]
    return found


def own(names):
    """The names that are modules of the project."""
    return {name for name in names if name in modules()}


def floor_of(module):
    part = module.split(".")[1] if "." in module else None
    for number, floor in enumerate(FLOORS):
        if part in floor:
            return number
    assert part is None, f"{module} is on no floor"
    return -1


#: What models and adapters may know of several devices: islands for kernels, a row's number for its dropout, and the
#: name that a logical axis has as an input.
ISLANDS = {"BATCH", "ROWS", "SHARES", "local", "batch_part", "as_input"}
#: Modules that know more -> why.
KNOW_MORE = {
    "fastjax.lora.experts": "tokens go to their experts' devices inside the unit that has one derivative",
    "fastjax.lora.export": "arrays of several processes are fetched",
}


def test_what_is_computed_asks_for_no_mesh_and_no_memory():
    """How a model is executed is told in execution/ alone: where arrays lie, how tokens and weights are split."""
    asked = [
        f"{module}: {node.module}.{alias.name}"
        for module, tree in modules().items()
        if module.startswith(("fastjax.models", "fastjax.lora")) and module not in KNOW_MORE
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
        if node.module == "fastjax.host_memory"
        or (node.module.startswith("fastjax.parallel") and alias.name not in ISLANDS)
    ]
    assert not asked


def test_nothing_imports_upward():
    wrong = []
    for module, tree in modules().items():
        package = module.partition(".")[0]
        for other in own(imports(tree)):
            target = other.partition(".")[0]
            if package != "fastjax" and target != package:
                wrong.append(f"{module} -> {other}")
            elif package == target == "fastjax" and module != "fastjax" and other != "fastjax":
                if floor_of(other) < floor_of(module):
                    wrong.append(f"{module} -> {other}")
    assert not wrong


def loads(module, tree):
    """The project's modules that a module imports, and the packages that Python loads before them, less its own."""
    found = own(imports(tree))
    parts = {".".join(name.split(".")[:count]) for name in found for count in range(1, name.count(".") + 1)}
    return {name for name in found | parts if not f"{module}.".startswith(f"{name}.")}


def test_no_import_circle():
    graph = {module: loads(module, tree) for module, tree in modules().items()}
    done, path = set(), []

    def visit(module):
        if module in path:
            pytest.fail("import circle: " + " -> ".join([*path[path.index(module) :], module]))
        if module not in done:
            path.append(module)
            for other in sorted(graph[module]):
                visit(other)
            done.add(path.pop())

    for module in graph:
        visit(module)


@pytest.mark.parametrize(
    "code",
    [
        "import fastjax.models",
        "def f():\n    from fastjax import models",
        "if TYPE_CHECKING:\n    from fastjax.models import x",
    ],
)
def test_every_import_counts(code):
    assert loads("fastjax.training.step", ast.parse(code)) == {"fastjax.models"}
    assert loads("fastjax.models.layer", ast.parse(code)) == set()


def test_convert_needs_no_jax():
    wrong = {"jax", "jaxlib", "flax", "optax", "orbax"}
    for module, tree in modules().items():
        if module.startswith("convert"):
            assert not {name.partition(".")[0] for name in imports(tree)} & wrong, module


def test_one_parser_of_paths():
    """No other module splits at dots."""
    splits = ("split", "rsplit", "partition", "rpartition")
    found = set()
    for module, tree in modules().items():
        for node in ast.walk(tree):
            call = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in splits
            if call and node.args and isinstance(node.args[0], ast.Constant) and node.args[0].value == ".":
                found.add(path_of(module))
    assert found - set(OTHER_NAMES) == set()


def test_no_list_of_vectors_names():
    """`WeightSpec.kind` and `fastjax.models.leaves` say what a vector is; a setting's default names the kinds."""
    allowed = {"convert/model/spec.py", "fastjax/training/config/optimizer.py"}
    found = set()
    for module, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Tuple | ast.List | ast.Set):
                words = {item.value for item in node.elts if isinstance(item, ast.Constant)}
                if {"norm", "bias"} <= words:
                    found.add(path_of(module))
    assert found <= allowed


def test_no_branch_on_a_family():
    found = []
    for module, tree in modules().items():
        if module.startswith("convert.families"):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Compare):
                sides = [node.left, *node.comparators]
                names = {item.value for side in sides for item in ast.walk(side) if isinstance(item, ast.Constant)}
                if names & set(FAMILIES):
                    found.append(f"{path_of(module)}:{node.lineno}")
    assert found == []


def test_the_page_names_files_that_exist():
    page = (ROOT / "docs/architecture.md").read_text("utf-8")
    whole = re.findall(r"\b(?:fastjax|convert|pallas_kernels|tests|scripts)/[\w/]+(?:\.py)?", page)
    inside = [f"fastjax/{name}" for name in re.findall(r"`((?:runs|training|models|execution|data|lora)/\w+)`", page)]
    places = [ROOT / name for name in (*whole, *inside)]
    assert len(places) > 50
    assert not [str(place) for place in places if not place.exists() and not place.with_suffix(".py").exists()]
