"""`model.generate` over token ids gives transformers' tensors, number for number."""

import json

import pytest

from fastjax.language_model import FastLanguageModel
from tests.support import chat, tiny

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.torch

TEXTS = ["a rather long beginning", "b", "and one"]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A folder with random weights of one scale, large, as ours and as transformers'."""
    config = tiny.config(num_hidden_layers=2, hidden_size=64, tie_word_embeddings=False, initializer_range=0.3)
    folder = chat.write_model(tmp_path_factory.mktemp("face") / "model", config)
    settings = {"eos_token_id": [2, 150], "pad_token_id": 0, "repetition_penalty": 1.2}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    ours, tokenizer = FastLanguageModel.from_pretrained(
        str(folder), max_seq_length=128, dtype="float32", load_in_4bit=False
    )
    theirs = transformers.AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32)
    return ours, theirs, tokenizer


@pytest.mark.parametrize(
    "settings",
    [
        {"max_new_tokens": 30},
        {"max_length": 50, "repetition_penalty": 1.7, "eos_token_id": 40},
        {"max_new_tokens": 12, "do_sample": True, "top_k": 1, "num_return_sequences": 2, "pad_token_id": 3},
        {"max_new_tokens": 40, "stop_strings": ["e", "\u00e9"]},
    ],
)
def test_the_tensors_are_transformers(models, settings):
    ours, theirs, tokenizer = models
    tokenizer.padding_side = "left"
    inputs = tokenizer(TEXTS, return_tensors="pt", padding=True)
    inputs.pop("token_type_ids", None)
    with torch.no_grad():
        expected = theirs.generate(**inputs, tokenizer=tokenizer, **settings)
    found = ours.generate(**inputs, **settings)
    assert found.dtype == expected.dtype and found.tolist() == expected.tolist()
    assert len({tuple(row) for row in found.tolist()}) == len(TEXTS)
    [_, short, _] = [row[row != 0].tolist() for row in inputs["input_ids"]]
    assert len(short) == 1
    alone = ours.generate([short], **settings).tolist()[0]
    row = found.tolist()[settings.get("num_return_sequences", 1)][inputs["input_ids"].shape[1] - 1 :]
    same = min(len(row), len(alone))
    assert row[:same] == alone[:same] and same > 10
