"""Adapters cross over: what we write, PEFT loads with our logits; what PEFT writes, we load with PEFT's."""

import numpy as np
import pytest

from fastjax.language_model import FastLanguageModel
from fastjax.lora.export import export_adapters
from tests.support import tiny

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")
torch_llama = pytest.importorskip("tests.support.torch_llama")
pytestmark = [
    pytest.mark.torch,
    *torch_llama.NOTES_OF_PEFT,
]

#: float32, logits of a few units
TOLERANCE = 1e-4
SEVEN = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
BOTH = ["embed_tokens", "lm_head"]

#: (tied, options)
CASES = {
    "plain": (False, {}),
    "DoRA": (False, {"use_dora": True}),
    "rsLoRA": (True, {"use_rslora": True}),
    "patterns": (
        True,
        {
            "rank_pattern": {r"layers\.1\.self_attn\.q_proj": 2, "up_proj": 6},
            "alpha_pattern": {"k_proj": 3.5},
            "layers_to_transform": [1, 2],
        },
    ),
    "embeddings and head as targets": (False, {"target_modules": ["v_proj", *BOTH]}),
    "embeddings and head as targets with DoRA": (False, {"target_modules": BOTH, "use_dora": True}),
    "embeddings and head as targets, tied": (True, {"target_modules": ["v_proj", *BOTH]}),
    "modules_to_save": (False, {"modules_to_save": BOTH}),
    "modules_to_save, untied by it": (True, {"modules_to_save": BOTH}),
    "modules_to_save head, untied by it": (True, {"modules_to_save": ["lm_head"]}),
    "modules_to_save, kept tied": (True, {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}),
    "modules_to_save and dropout": (False, {"modules_to_save": ["lm_head"], "lora_dropout": 0.5, "use_dora": True}),
}


def options_of(name):
    tied, options = CASES[name]
    config = tiny.config(tie_word_embeddings=tied)
    return config, {"target_modules": SEVEN, "r": 4, "lora_alpha": 9, **options}


def compare(config, ours, theirs, base):
    tokens, _, segments, positions = tiny.rows([tiny.documents(config, (40,)), tiny.documents(config, (13, 22))], 40)
    expected = torch_llama.logits(theirs.eval(), tokens, positions, segments)
    found = tiny.logits(ours, tokens, positions, segments)
    np.testing.assert_allclose(found[segments > 0], expected[segments > 0], rtol=0, atol=TOLERANCE)
    without = tiny.logits(base, tokens, positions, segments)
    assert np.abs(found - without)[segments > 0].max() > 1000 * TOLERANCE, "the adapter does nothing"


TELLING = (
    *("rsLoRA", "patterns", "embeddings and head as targets with DoRA", "embeddings and head as targets, tied"),
    *("modules_to_save head, untied by it", "modules_to_save, kept tied"),
)
"""Cases that hold the mechanisms of the others."""


@pytest.mark.exhaustive(*TELLING)
@pytest.mark.parametrize("name", CASES)
def test_peft_loads_what_we_write(name, tmp_path):
    config, options = options_of(name)
    base = tiny.model(tiny.shared_folder(tie_word_embeddings=config["tie_word_embeddings"]), config)
    ours = tiny.adapted(base, **options)
    ours.save_pretrained(tmp_path / "adapter")
    reference = torch_llama.build(config, tiny.arrays(config))
    theirs = peft.PeftModel.from_pretrained(reference, tmp_path / "adapter")
    compare(config, ours, theirs, base)


@pytest.mark.exhaustive(*TELLING)
@pytest.mark.parametrize("name", CASES)
def test_we_load_what_peft_writes(name, tmp_path):
    config, options = options_of(name)
    torch.manual_seed(3)
    reference = torch_llama.build(config, tiny.arrays(config))
    theirs = peft.get_peft_model(reference, peft.LoraConfig(task_type="CAUSAL_LM", **options))
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.requires_grad:
                parameter += 0.05 * torch.randn_like(parameter)
    theirs.save_pretrained(tmp_path / "adapter")
    base = tiny.model(tiny.shared_folder(tie_word_embeddings=config["tie_word_embeddings"]), config)
    ours = FastLanguageModel.load_adapter(base, tmp_path / "adapter")
    compare(config, ours, theirs, base)
    ours.save_pretrained(tmp_path / "again")
    again = FastLanguageModel.load_adapter(base, tmp_path / "again")
    first, second = (
        export_adapters(model.trainable, model.plan, options.get("ensure_weight_tying", False))
        for model in (ours, again)
    )
    assert first.keys() == second.keys()
    assert all(np.array_equal(first[path], second[path]) for path in first)


@pytest.mark.parametrize("method", [True, False, "gaussian", "orthogonal"])
def test_our_start_is_distributed_as_pefts(method, tmp_path):
    """Two samples of one distribution: their empirical distributions differ by less than 1.95·√(2/n) in 99.9%."""
    config, modules = tiny.CONFIG, ["q_proj", "embed_tokens"]
    options = {"r": 32, "target_modules": modules, "init_lora_weights": method}
    torch.manual_seed(5)
    theirs = peft.get_peft_model(
        torch_llama.build(config, tiny.arrays(config)), peft.LoraConfig(task_type="CAUSAL_LM", **options)
    ).state_dict()
    base = tiny.model(tiny.shared_folder(tie_word_embeddings=True), config)
    model = FastLanguageModel.get_peft_model(base, **options)
    ours = export_adapters(model.trainable, model.plan, False)
    endings = {
        "lora_A": ".lora_A.default.weight",
        "lora_B": ".lora_B.default.weight",
        "lora_embedding_A": ".lora_embedding_A.default",
        "lora_embedding_B": ".lora_embedding_B.default",
    }
    for kind, ending in endings.items():
        mine = np.sort(np.concatenate([a.ravel() for name, a in ours.items() if name.endswith("." + kind)]))
        peft_side = [array.numpy().ravel() for name, array in theirs.items() if name.endswith(ending)]
        other = np.sort(np.concatenate(peft_side))
        assert mine.size == other.size > 1000
        grid = np.concatenate([mine, other])
        distance = (
            np.abs(np.searchsorted(mine, grid, "right") - np.searchsorted(other, grid, "right")).max() / mine.size
        )
        assert distance < 1.95 * np.sqrt(2 / mine.size), kind
