"""Files of a wheel and of a source distribution, as the build backend lists it; a wheel in an empty environment."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder

ROOT = Path(__file__).parents[1]
PACKAGES = ("convert", "fastjax", "pallas_kernels")


def listed(builder) -> set[str]:
    return {file.distribution_path for file in builder.recurse_included_files()}


def test_a_wheel_holds_every_file_of_the_packages():
    """Assets, templates and tables too, and none of them because a pattern of .gitignore happens to fit it."""
    files = (path for name in PACKAGES for path in (ROOT / name).rglob("*") if path.is_file())
    expected = {str(path.relative_to(ROOT)) for path in files if "__pycache__" not in path.parts}
    assert {"fastjax/py.typed", "fastjax/assets/tiny-llama/model.safetensors"} <= expected
    assert listed(WheelBuilder(str(ROOT))) == expected


def test_an_editable_install_is_a_folder_on_the_path():
    """Editors follow a path; they do not run an import hook."""
    config = WheelBuilder(str(ROOT)).config
    assert config.dev_mode_dirs == ["."] and not config.dev_mode_exact and not config.sources


def test_a_source_distribution_holds_the_project_alone():
    """No environments, caches or runs, which lie beside it in a checkout; the backend adds what a build reads."""
    found = {name.partition("/")[0] for name in listed(SdistBuilder(str(ROOT)))}
    assert found == {
        *PACKAGES,
        "docs",
        "examples",
        "notebooks",
        "scripts",
        "tests",
        "CHANGELOG.md",
        "CONTRIBUTING.md",
        "mkdocs.yml",
    }


def test_messages_name_packages_that_can_be_installed():
    """No extra of this project, which is on no index, and no package that its extras do not name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    listed = [*project["dependencies"], *(one for extra in project["optional-dependencies"].values() for one in extra)]
    known = {re.split(r"[^\w.-]", one)[0].lower() for one in listed} | {"mpi4py"}
    texts = [file.read_text(encoding="utf-8") for name in PACKAGES for file in (ROOT / name).rglob("*.py")]
    found = {
        name
        for text in texts
        for names in re.findall(r"pip install ([a-z][\w\[\]\- ]*)", text)
        for name in names.split()
    }
    assert {"gguf", "starlette", "uvicorn", "lm-eval"} <= found <= known


_TRAIN = """
import dataclasses, sys
from pathlib import Path
import fastjax
from fastjax.commands.quickstart import quickstart_config
from fastjax.runs.fine_tune import fine_tune

assert Path(fastjax.__file__).is_relative_to(sys.prefix), fastjax.__file__
config = quickstart_config("run")
few = dataclasses.replace(config.training, max_steps=1, eval_steps=None, early_stopping_patience=None)
folder = fine_tune(dataclasses.replace(config, training=few)).folder
assert (folder / "README.md").exists() and (folder.parent / "report.html").stat().st_size > 10_000
"""


@pytest.mark.exhaustive(by="test_a_wheel_holds_every_file_of_the_packages")
@pytest.mark.timeout(1200)
def test_a_wheel_is_installed_and_runs_in_an_empty_environment(tmp_path):
    """It is built as `python -m build` does; then there are its dependencies alone, and no checkout."""
    pytest.importorskip("build")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "JAX", "XLA"))}
    clean |= {"JAX_PLATFORMS": "cpu", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}

    def run(*command):
        done = subprocess.run(command, cwd=tmp_path, env=clean, capture_output=True, text=True)
        assert done.returncode == 0, f"{command}:\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
        return done.stdout

    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(tmp_path / "dist"), str(ROOT))
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    run(sys.executable, "-m", "venv", "empty")
    place = tmp_path / "empty" / "bin"
    run(str(place / "python"), "-m", "pip", "install", "-q", "--no-compile", str(wheel))
    assert run(str(place / "fastjax"), "--version").startswith("fastjax ")
    assert "quickstart" in run(str(place / "fastjax"), "--help")
    run(str(place / "python"), "-c", _TRAIN)
