"""The notebooks run from top to bottom on the embedded model, and are kept without outputs.

All run in one kernel, one after the other, each with a namespace and a folder of its own: the imports, a third of the
time, are made once. Before that each is read: names, arguments and settings that are not there show without a run.
"""

import json
import re
from pathlib import Path

import pytest

from tests.support.runs import ROOT, environment
from tests.support.shown_code import Reader

#: Notebook -> what its outputs show, besides no error and nothing on standard error.
SHOWN = {
    "alpaca_sft": r'### Response:\n\{"who": .*step 12/12: loss [01]\.\d.*\{"who": ".*adapter_model\.safetensors',
    "chat_responses": r"learnt: 'Karl\.<\|eot_id\|>49\.<\|eot_id\|>blue<\|eot_id\|>'\n.* seconds, loss \d.*'grad_norm'",
    "continued_pretraining": r"769 tokens, the new ones: \(768,\)",
    "dpo": r"step 16/16: .*margin \S+  accuracy \d+%.*accuracy of preference (0\.[89]\d|1\.00), margin \d",
    "orpo": r'step 24/24: .*log odds ratio \d.*\{"who": "',
    "reloading": r"LanguageModel\(llama.*r=16.*NF4.*without the adapter: ",
    "saving": r"model\.safetensors.*gguf-q8_0\.gguf.*the same likeliest token at (9\d|100)% of the places",
}
FOLDER = ROOT / "notebooks"


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    """The one kernel's client."""
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    client = nbclient.NotebookClient(nbformat.v4.new_notebook(), timeout=300, kernel_name="python3")
    kernel = {"env": environment(ROOT / ".venv-test-programs"), "cwd": str(tmp_path_factory.mktemp("notebooks"))}
    with client.setup_kernel(**kernel):
        yield client


def text_of(cells) -> str:
    """What the cells have put out, in their order, plain texts alone."""
    found = []
    for output in (output for cell in cells if cell.cell_type == "code" for output in cell.outputs):
        assert output.output_type != "error" and output.get("name") != "stderr", output
        found.append(output.text if output.output_type == "stream" else output.data.get("text/plain", ""))
    return "\n".join(found)


@pytest.mark.exhaustive("alpaca_sft", by="test_its_names_and_settings_are_there")
@pytest.mark.parametrize("name", SHOWN)
def test_it_runs(name, client, tmp_path):
    """The cells as a reader runs them; the outputs are those of a model that has learnt something."""
    nbformat = pytest.importorskip("nbformat")
    book = client.nb = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    fresh = f"%reset -f\nimport os, sys\nos.chdir({str(tmp_path)!r})\nsys.path.insert(0, {str(ROOT)!r})"
    book.cells.insert(0, nbformat.v4.new_code_cell(fresh))
    for number, cell in enumerate(book.cells):
        client.execute_cell(cell, number)
    assert re.search(SHOWN[name], text_of(book.cells), re.DOTALL), text_of(book.cells)
    outputs = [output.get("data", {}) for cell in book.cells if cell.cell_type == "code" for output in cell.outputs]
    bars = [data["text/html"] for data in outputs if "<progress" in data.get("text/html", "")]
    for bar in bars:  # replaced in place, up to the end of the run
        done, steps = re.search(r'<progress value="(\d+)" max="(\d+)"', bar).groups()
        assert done == steps and f"finished after step {steps}" in bar and "<svg" in bar
    assert len(bars) == sum(".train(" in "".join(cell.source) for cell in book.cells if cell.cell_type == "code")


@pytest.mark.parametrize("name", SHOWN)
def test_its_names_and_settings_are_there(name):
    book, reader = json.loads((FOLDER / f"{name}.ipynb").read_text(encoding="utf-8")), Reader()
    for cell in book["cells"]:
        if cell["cell_type"] == "code":
            reader.read("".join(cell["source"]))
    assert reader.calls > 5


def test_each_is_run():
    assert sorted(SHOWN) == sorted(file.stem for file in FOLDER.glob("*.ipynb"))


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.ipynb")), ids=lambda file: file.stem)
def test_it_is_kept_without_outputs(file):
    """One form of the file, so that changes are readable: no outputs, one cell to change, marked as papermill's are."""
    book = json.loads(file.read_text(encoding="utf-8"))
    assert file.read_text(encoding="utf-8") == json.dumps(book, indent=1, ensure_ascii=False) + "\n"
    for cell in book["cells"]:
        assert cell["cell_type"] == "markdown" or (cell["outputs"], cell["execution_count"]) == ([], None)
    tagged = [cell for cell in book["cells"] if "parameters" in cell["metadata"].get("tags", [])]
    assert len(tagged) == 1 and tagged[0] is book["cells"][1] and tagged[0]["source"][0].startswith("# YOUR ")
    prose = "".join("".join(cell["source"]) for cell in book["cells"] if cell["cell_type"] == "markdown")
    for link in re.findall(r"\]\((?!https?:)([^)#]+)", prose):
        assert (Path(file).parent / link).exists(), link
