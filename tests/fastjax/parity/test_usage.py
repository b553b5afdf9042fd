"""What a run prints at its end and puts into its report works: PEFT gets the model that was trained."""

import dataclasses
import json

import ml_dtypes  # noqa: F401  (numpy knows bfloat16 by its name)
import numpy as np
import pytest

from fastjax.language_model import FastLanguageModel
from fastjax.training.config import DataSection, ModelSection, OutputSection, TrainConfig
from fastjax.training.report import usage_of_run
from tests.support import chat, tiny
from tests.support.folders import write_checkpoint

torch = pytest.importorskip("torch")
pytest.importorskip("peft")
torch_llama = pytest.importorskip("tests.support.torch_llama")
pytestmark = [
    pytest.mark.torch,
    *torch_llama.NOTES_OF_PEFT,
    pytest.mark.filterwarnings("ignore:Could not find a config file:UserWarning"),
]

SCALING = {"rope_type": "yarn", "factor": 4.0}


@pytest.mark.parametrize(
    ("stored", "changes"),
    [
        ("float32", {"load_in_4bit": False, "rope_scaling": SCALING, "new_tokens": ["<a>", "<b>"]}),
        ("float32", {"new_tokens": ["<a>", "<b>"], "float32_modules": ["layers.0.mlp"]}),
        ("bfloat16", {}),
    ],
    ids=["16 bits, longer, new tokens", "4 bits but one module, new tokens", "4 bits over bfloat16"],
)
def test_the_printed_lines_load_what_was_trained(tmp_path, stored, changes):
    base = chat.write_model(tmp_path / "base")
    config = json.loads((base / "config.json").read_text()) | {"dtype": stored}
    arrays = {name: array.astype(stored) for name, array in tiny.arrays(config).items()}
    write_checkpoint(base, arrays.items(), config)
    section = ModelSection(str(base), max_seq_length=64, dtype="float32", **changes)
    if section.load_in_4bit:
        pytest.importorskip("bitsandbytes")
    model, _ = FastLanguageModel.from_pretrained(**dataclasses.asdict(section))
    model = FastLanguageModel.get_peft_model(model, r=4, init_lora_weights=False)
    folder = model.save_pretrained(tmp_path / "adapter")
    command, python, _ = usage_of_run(
        TrainConfig(section, DataSection("d"), OutputSection("o")), folder, model.hf_config, "float32"
    )
    assert (f"--rope_scaling '{json.dumps(SCALING)}'" in command) == ("rope_scaling" in changes)
    names: dict = {}
    exec(python, names)
    for module in names["model"].modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):  # where it may, it multiplies in bfloat16
            module.support_avx512bf16_for_cpu = False
    tokens = np.arange(1, 65, dtype=np.int32)[None] * 11 % model.config.vocab_size
    tokens[0, ::9] = model.config.vocab_size - 1
    ours, theirs = tiny.logits(model, tokens), torch_llama.logits(names["model"], tokens)
    assert ours.shape == theirs.shape
    assert np.abs(ours - theirs).max() < 1e-5 * np.abs(ours).max()  # float32
    assert names["tokenizer"].get_vocab() == model.tokenizer.get_vocab()
