"""llama.cpp itself computes transformers' logits from the GGUF files; needs `pip install llama-cpp-python`."""

import numpy as np
import pytest
from tokenizers import Tokenizer

from convert.gguf import export_gguf
from tests.support.gguf_models import config_of, stored, write_model

pytest.importorskip("torch")
pytest.importorskip("gguf")
pytest.importorskip("llama_cpp", reason="needs llama-cpp-python, which takes ten minutes to compile")

import llama_cpp  # pyright: ignore[reportMissingImports]

from tests.fastjax.parity.test_gguf import CASES
from tests.support import torch_family

pytestmark = pytest.mark.torch

#: llama.cpp chooses Phi-3's factors by the length of its context, a multiple of 256, and not of the text.
SHORT = {"phi3": {"original_max_position_embeddings": 300, "max_position_embeddings": 900}}
#: It looks GELU up in a table of float16; all else is float32.
TOLERANCES = dict.fromkeys(("gemma", "gemma2", "gemma3_text"), 5e-3)


def logits(file, tokens):
    """[S, V], with keys and values in float32 and no flash attention, which rounds them."""
    float32 = llama_cpp.GGML_TYPE_F32
    model = llama_cpp.Llama(
        str(file), n_ctx=256, logits_all=True, verbose=False, type_k=float32, type_v=float32, flash_attn=False
    )
    model.eval(tokens.tolist())
    return np.array(model.scores[: len(tokens)])


def pair(case, folder, type):
    """llama.cpp's logits and transformers'."""
    kind, changes, length = CASES[case]
    config = config_of(kind, **changes, **SHORT.get(case, {}))
    arrays = write_model(folder / "model", config)
    export_gguf(folder / "model", folder / "m.gguf", type=type)
    named = {name: array.astype(np.float32) for name, array in stored(config, arrays).items()}
    tokens = np.random.default_rng(3).integers(0, config["vocab_size"], length)
    return logits(folder / "m.gguf", tokens), torch_family.logits(torch_family.build(config, named), tokens)


@pytest.mark.parametrize("case", CASES)
def test_float32(case, tmp_path):
    ours, theirs = pair(case, tmp_path, "f32")
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=TOLERANCES.get(case, 2e-5) * np.abs(theirs).max())


@pytest.mark.parametrize(("type", "tolerance"), [("f16", 2e-3), ("bf16", 2e-2), ("q8_0", 5e-2)])
def test_other_formats(type, tolerance, tmp_path):
    """Relative error in the norm: what the format loses, of weights and of what they are multiplied with."""
    ours, theirs = pair("llama", tmp_path, type)
    assert np.linalg.norm(ours - theirs) <= tolerance * np.linalg.norm(theirs)


def test_text_is_cut_up_as_the_tokenizer_does(tmp_path):
    config = config_of("llama")
    write_model(tmp_path / "model", config)
    export_gguf(tmp_path / "model", tmp_path / "m.gguf", type="f32")
    model = llama_cpp.Llama(str(tmp_path / "m.gguf"), vocab_only=True, verbose=False)
    tokenizer = Tokenizer.from_file(str(tmp_path / "model" / "tokenizer.json"))
    for text in ("abc ab a", "Zürich,\n\n  12345 <tool>x</s>", "don't"):
        assert model.tokenize(text.encode(), add_bos=True, special=True) == tokenizer.encode(text).ids
