"""What a run prints at its end and puts into its report works: PEFT gets the model that was trained."""

import dataclasses
import json

import numpy as np
import pytest

from fastjax.commands.quickstart import ASSETS
from fastjax.language_model import FastLanguageModel
from fastjax.training.config import DataSection, ModelSection, OutputSection, TrainConfig
from fastjax.training.report import usage
from tests.support import tiny

torch = pytest.importorskip("torch")
pytest.importorskip("peft")
torch_llama = pytest.importorskip("tests.support.torch_llama")
pytestmark = [
    pytest.mark.torch,
    pytest.mark.usefixtures("quick_compilation"),
    *torch_llama.NOTES_OF_PEFT,
    pytest.mark.filterwarnings("ignore:Could not find a config file:UserWarning"),
]

SCALING = {"rope_type": "yarn", "factor": 4.0}


@pytest.mark.parametrize("changes", [{}, {"rope_scaling": SCALING, "new_tokens": ["<a>", "<b>"]}], ids=["plain", "new"])
def test_the_printed_lines_load_what_was_trained(tmp_path, changes):
    section = ModelSection(str(ASSETS / "tiny-llama"), max_seq_length=256, load_in_4bit=False, **changes)
    model, _ = FastLanguageModel.from_pretrained(**dataclasses.asdict(section))
    model = FastLanguageModel.get_peft_model(model, r=4, init_lora_weights=False)
    folder = model.save_pretrained(tmp_path / "adapter")
    command, python = usage(TrainConfig(section, DataSection("d"), OutputSection("o")), folder)
    assert (f"--rope_scaling '{json.dumps(SCALING)}'" in command) == bool(changes)
    names: dict = {}
    exec(python, names)
    tokens = np.arange(1, 65, dtype=np.int32)[None] * 11
    tokens[0, ::9] = model.config.vocab_size - 1
    ours, theirs = tiny.logits(model, tokens), torch_llama.logits(names["model"].float(), tokens)
    assert ours.shape == theirs.shape
    assert np.abs(ours - theirs).max() < 1e-5 * np.abs(ours).max()  # float32
