"""Files of a wheel and of a source distribution, as the build backend lists it."""

from pathlib import Path

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
