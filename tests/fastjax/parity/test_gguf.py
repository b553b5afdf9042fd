"""A GGUF file means to llama.cpp what the folder means to transformers: the same logits, family by family."""

import numpy as np
import pytest

from convert.gguf import export_gguf
from tests.support.gguf_models import FAMILY_CASES, TEXTS, config_of, stored, write_model

pytest.importorskip("torch")
pytest.importorskip("gguf")

from tests.support import llama_cpp, torch_family

pytestmark = pytest.mark.torch

YARN = {"rope_type": "yarn", "rope_theta": 300.0, "factor": 4.0, "original_max_position_embeddings": 48}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 6.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
#: What to call a case -> model_type, changes, tokens.
CASES = {
    **{kind: (kind, {}, 40) for kind in FAMILY_CASES if kind not in TEXTS},  # their text halves are others' models
    "llama, llama3": ("llama", {"rope_parameters": LLAMA3}, 40),
    "qwen3, yarn": ("qwen3", {"rope_parameters": YARN}, 60),
    "phi3, long": ("phi3", {}, 70),
    "smollm3, a layer without positions": ("smollm3", {"num_hidden_layers": 4}, 40),
    "cohere, norm of queries": ("cohere", {"use_qk_norm": True, "num_hidden_layers": 64}, 9),
}


@pytest.mark.parametrize("case", CASES)
def test_llama_cpp_computes_transformers_logits(case, tmp_path):
    kind, changes, length = CASES[case]
    config = config_of(kind, **changes)
    arrays = write_model(tmp_path / "model", config)
    export_gguf(tmp_path / "model", tmp_path / "m.gguf", type="f32")
    named = {name: array.astype(np.float32) for name, array in stored(config, arrays).items()}
    tokens = np.random.default_rng(3).integers(0, config["vocab_size"], length)
    theirs = torch_family.logits(torch_family.build(config, named), tokens)
    ours = llama_cpp.logits(tmp_path / "m.gguf", tokens)
    size = np.abs(theirs).max()
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-5 * size)  # float32 there, float64 here
    neighbours = llama_cpp.read(tmp_path / "m.gguf")[0] in llama_cpp.NEIGHBOURS
    other = llama_cpp.logits(tmp_path / "m.gguf", tokens, neighbours=not neighbours)
    assert np.abs(other - theirs).max() > 1e-2 * size  # the order of the rows matters
