"""Folders of quantisation-aware training: transformers with compressed-tensors has the trained model's logits."""

import numpy as np
import pytest

from convert.checkpoint import open_checkpoint
from fastjax.language_model.variants import with_fake_quantization
from tests.support import tiny

torch = pytest.importorskip("torch")
pytest.importorskip("compressed_tensors")
transformers = pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]

SIZES = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "num_hidden_layers": 1}
CONFIG = tiny.config(**SIZES, tie_word_embeddings=False, dtype="float32")
TOKENS = np.stack(tiny.documents(CONFIG, (40, 40)))


@pytest.fixture(scope="module")
def adapted():
    folder = tiny.shared_folder(**SIZES, tie_word_embeddings=False, dtype="float32")
    return tiny.adapted(tiny.model(folder, CONFIG), target_modules=["q_proj", "v_proj", "down_proj"])


@pytest.mark.exhaustive("int4-32-None", "int8-int8", "fp8-row-fp8", "fp8-block-fp8-128")
@pytest.mark.parametrize(
    ("weights", "activations"),
    [
        *(("int4-32", None), ("int4-32", "int8"), ("int8", None), ("int8", "int8"), ("fp8-row", None)),
        *(("fp8-row", "fp8"), ("fp8-block", "fp8-128")),
    ],
)
def test_logits_are_those_of_the_trained_model(adapted, tmp_path, weights, activations):
    aware = with_fake_quantization(adapted, weights, activations)
    folder = aware.save_pretrained_merged(tmp_path / "served", dtype=weights)
    said = open_checkpoint(folder).config["quantization_config"]["config_groups"]["group_0"]["input_activations"]
    assert (said is None) == (activations is None)
    torch.set_num_threads(1)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        expected = theirs(torch.as_tensor(TOKENS)).logits.numpy()
    equal = same_tokens(aware, expected)
    # Of inputs in 8 bits those that lie within float32's rounding of a tie may have the other code.
    assert equal == 1 if activations is None else equal > 0.95
    assert same_tokens(adapted, expected) == 0
    if activations is not None:
        assert same_tokens(with_fake_quantization(adapted, weights), expected) < 0.1


def same_tokens(model, expected):
    """The share of tokens whose logits, of a few units, are equal but for float32's rounding."""
    return (np.abs(tiny.logits(model, TOKENS) - expected).max(-1) < 1e-4).mean()
