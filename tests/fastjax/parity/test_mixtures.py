"""Adapters on experts cross over: PEFT loads ours with our logits, and transformers the merged folder."""

import numpy as np
import pytest

from tests.support import tiny
from tests.support.families import MIXTURES

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
torch_family = pytest.importorskip("tests.support.torch_family")
torch_llama = pytest.importorskip("tests.support.torch_llama")
pytestmark = [
    pytest.mark.torch,
    *torch_llama.NOTES_OF_PEFT,
    pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not match"),  # it counts modules
]

#: float32, logits of a few units
TOLERANCE = 1e-4
#: family -> settings besides r and the experts' names
CASES = {
    "qwen3_moe": {"target_modules": ["q_proj"], "rank_pattern": {"experts.down_proj": 2}},
    "qwen2_moe": {"target_modules": "all-linear", "alpha_pattern": {"experts.gate_up_proj": 3.5}},
    "gpt_oss": {"target_modules": ["v_proj"], "use_rslora": True},
    "glm4_moe": {"target_modules": ["o_proj"], "target_parameters": ["gate.weight", "mlp.experts.down_proj"]},
    "mixtral": {"target_modules": ["k_proj"], "target_parameters": ["gate_up_proj"]},
}


@pytest.mark.parametrize("family", CASES)
def test_peft_loads_what_we_write_and_transformers_what_is_merged(family, tmp_path):
    config = MIXTURES[family]
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    base = tiny.model(tmp_path / "base", config)
    ours = tiny.adapted(base, **{"r": 4, "lora_alpha": 9, "target_parameters": experts, **CASES[family]})
    tokens = tiny.documents(config, (40,))[0]
    found, before = (tiny.logits(model, tokens[None])[0] for model in (ours, base))
    assert np.abs(found - before).max() > 1000 * TOLERANCE, "the adapter does nothing"

    ours.save_pretrained(tmp_path / "adapter")
    reference = torch_family.build(config, tiny.arrays(config))
    theirs = peft.PeftModel.from_pretrained(reference, tmp_path / "adapter").eval()
    np.testing.assert_allclose(torch_family.logits(theirs, tokens), found, rtol=0, atol=TOLERANCE)

    ours.save_pretrained_merged(tmp_path / "merged")
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", attn_implementation="eager")
    np.testing.assert_allclose(torch_family.logits(merged.eval(), tokens), found, rtol=0, atol=TOLERANCE)
    again = tiny.logits(tiny.model(tmp_path / "merged", None), tokens[None])[0]
    np.testing.assert_allclose(again, found, rtol=0, atol=TOLERANCE)
