"""The recipes of docs/cookbook.md are read, and run, each after the page's beginning alone; their assertions hold."""

import re
from pathlib import Path

import jax
import pytest

from tests.support.shown_code import Reader

ROOT = Path(__file__).parents[3]
#: Heading -> code, of each section that has any.
RECIPES = dict(
    re.findall(
        r"^## ([^\n]+)\n(?:(?!^## ).)*?^```python\n(.*?)^```",
        (ROOT / "docs" / "cookbook.md").read_text(encoding="utf-8"),
        re.MULTILINE | re.DOTALL,
    )
)
BEGINNING = RECIPES.pop("The beginning")


@pytest.fixture(scope="module")
def beginning():
    """Names that the beginning defines."""
    names: dict = {}
    assert BEGINNING.count('"fastjax/assets/') == 2
    exec(BEGINNING.replace('"fastjax/assets/', f'"{ROOT}/fastjax/assets/'), names)
    return names


@pytest.fixture
def needed(name):
    """Skips a recipe whose library is not installed; the extra `test` has it."""
    if "import grain" in RECIPES[name]:
        pytest.importorskip("grain")


@pytest.mark.usefixtures("needed")
@pytest.mark.parametrize("name", RECIPES)
def test_its_names_and_arguments_are_there(name):
    assert Reader().read(BEGINNING).read(RECIPES[name]).calls > 4


@pytest.mark.exhaustive("The kernels over a pytree of your own", by="test_its_names_and_arguments_are_there")
@pytest.mark.usefixtures("needed")
@pytest.mark.parametrize("name", RECIPES)
def test_recipe(name, beginning, tmp_path, monkeypatch, capsys):
    """A program that prints its figures, and ends well."""
    monkeypatch.chdir(tmp_path)
    code = RECIPES[name].replace('"fastjax/assets/', f'"{ROOT}/fastjax/assets/')
    assert "assert" in code
    with jax.numpy_dtype_promotion("standard"):  # optax mixes Python floats with its integer counters
        exec(code, dict(beginning))
    assert re.search(r"\d", capsys.readouterr().out)
