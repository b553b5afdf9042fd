"""Merged folders, loaded by transformers, say what base and adapter say in torch with PEFT."""

import ml_dtypes
import numpy as np
import pytest

from convert.merge import merge
from tests.support import tiny

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
safetensors_torch = pytest.importorskip("safetensors.torch")
torch_llama = pytest.importorskip("tests.support.torch_llama")
pytestmark = [pytest.mark.torch, *torch_llama.NOTES_OF_PEFT]

#: float32, logits of a few units
TOLERANCE = 1e-4
SEVEN = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
BOTH = ["embed_tokens", "lm_head"]
OLD = tiny.CONFIG["vocab_size"]

#: (tied, options, new tokens)
CASES = {
    "plain": (False, {}, 0),
    "rsLoRA": (True, {"use_rslora": True}, 0),
    "DoRA": (False, {"use_dora": True}, 0),
    "patterns": (True, {"rank_pattern": {"up_proj": 6}, "alpha_pattern": {"k_proj": 3.5}}, 0),
    "embedding and head": (False, {"target_modules": ["v_proj", *BOTH]}, 0),
    "embedding and head, DoRA": (False, {"target_modules": BOTH, "use_dora": True}, 0),
    "embedding and head, tied": (True, {"target_modules": ["v_proj", *BOTH]}, 0),
    "embedding, tied": (True, {"target_modules": ["v_proj", "embed_tokens"]}, 0),
    "whole": (False, {"modules_to_save": BOTH}, 0),
    "whole blocks": (False, {"target_modules": ["q_proj", "up_proj"], "modules_to_save": ["mlp", "1.self_attn"]}, 0),
    "whole, tied": (True, {"modules_to_save": BOTH}, 0),
    "whole head, tied": (True, {"modules_to_save": ["lm_head"]}, 0),
    "whole, kept tied": (True, {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}, 0),
    "adapters, kept tied": (True, {"target_modules": ["v_proj", "embed_tokens"], "ensure_weight_tying": True}, 0),
    "tokens, tied": (True, {"trainable_token_indices": [7, 3, 90]}, 0),
    "tokens, untied": (False, {"trainable_token_indices": {"embed_tokens": [7, 3], "lm_head": [90, 3, 5]}}, 0),
    "tokens, tied, different": (True, {"trainable_token_indices": {"embed_tokens": [7, 3], "lm_head": [5]}}, 0),
    "new rows": (False, {"target_modules": ["q_proj", *BOTH]}, 2),
    "new rows, tied": (True, {"trainable_token_indices": [OLD, OLD + 1]}, 2),
    "new rows, whole": (False, {"modules_to_save": BOTH}, 2),
}


# The others have no mechanism that these have not.
@pytest.mark.exhaustive(
    *("rsLoRA", "patterns", "embedding and head, DoRA", "embedding and head, tied", "whole blocks", "whole head, tied"),
    *("adapters, kept tied", "tokens, tied, different", "new rows, whole"),
)
@pytest.mark.parametrize("name", CASES)
def test_merged_logits_are_base_plus_adapters(name, tmp_path):
    tied, options, new = CASES[name]
    config = tiny.config(tie_word_embeddings=tied)
    torch.manual_seed(3)
    reference = torch_llama.build(config, tiny.arrays(config))
    if new:
        reference.resize_token_embeddings(OLD + new, mean_resizing=False)
    settings = peft.LoraConfig(task_type="CAUSAL_LM", **{"target_modules": SEVEN, "r": 4, "lora_alpha": 9, **options})
    theirs = peft.get_peft_model(reference, settings)
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.requires_grad:
                parameter += 0.05 * torch.randn_like(parameter)
    theirs.save_pretrained(tmp_path / "adapter", save_embedding_layers=bool(new) or "auto")
    base = tiny.shared_folder(tie_word_embeddings=tied)
    merge(base, tmp_path / "adapter", tmp_path / "merged", max_shard_bytes=30_000)
    ours = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", attn_implementation="eager")
    assert ours.config.vocab_size == OLD + new
    tokens, _, segments, positions = tiny.rows(
        [tiny.documents({**tiny.CONFIG, "vocab_size": OLD + new + 1}, (40,))], 40
    )
    tokens[:, 2:5] = [[7, 3, 90]]
    expected = torch_llama.logits(theirs.eval(), tokens, positions, segments)
    found = torch_llama.logits(ours.eval(), tokens, positions, segments)
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)
    with theirs.disable_adapter():
        without = torch_llama.logits(theirs.eval(), tokens, positions, segments)
    assert np.abs(found - without).max() > 1000 * TOLERANCE or new, "the adapter does nothing"


def test_merged_weights_are_pefts_to_a_rounding(tmp_path):
    """In bfloat16, where PEFT merges in float32 too."""
    config = tiny.config(tie_word_embeddings=False)
    arrays = {name: torch.from_numpy(a).bfloat16().float().numpy() for name, a in tiny.arrays(config).items()}
    folder = tiny.write_folder(tmp_path / "base", config | {"dtype": "bfloat16"},
                               {name: a.astype(ml_dtypes.bfloat16) for name, a in arrays.items()})  # fmt: skip
    torch.manual_seed(3)
    theirs = peft.get_peft_model(
        torch_llama.build(config, arrays), peft.LoraConfig(task_type="CAUSAL_LM", target_modules=SEVEN, r=4)
    )
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.requires_grad:
                parameter += 0.05 * torch.randn_like(parameter)
    theirs.save_pretrained(tmp_path / "adapter")
    merge(folder, tmp_path / "adapter", tmp_path / "merged")
    expected = theirs.merge_and_unload().state_dict()
    found = safetensors_torch.load_file(tmp_path / "merged" / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert tensor.dtype == torch.bfloat16
        torch.testing.assert_close(tensor.float(), expected[name], rtol=2**-8, atol=1e-6)
