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
    pytest.mark.filterwarnings("ignore:Could not find a config file:UserWarning"),
]

#: float32, logits of a few units
TOLERANCE = 1e-4
SEVEN = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
BOTH = ["embed_tokens", "lm_head"]

OLD, NEW = tiny.CONFIG["vocab_size"], ["<|tool|>", "<|end|>"]

#: (tied, options); of names with "new" the vocabulary has new tokens, whose ids are beyond the old one.
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
    "rows, tied": (True, {"trainable_token_indices": [7, 3, 90]}),
    "rows, untied": (False, {"trainable_token_indices": [7, 3, 90]}),
    "rows of both": (False, {"trainable_token_indices": {"embed_tokens": [7, 3], "lm_head": [90, 3, 5]}}),
    "rows of both, tied, the same": (True, {"trainable_token_indices": {"embed_tokens": [7, 3], "lm_head": [7, 3]}}),
    "rows of both, tied, different": (True, {"trainable_token_indices": {"embed_tokens": [7, 3], "lm_head": [5]}}),
    "rows beside whole embeddings": (False, {"trainable_token_indices": {"lm_head": [5]}, "modules_to_save": BOTH[:1]}),
    "new, tied": (True, {"trainable_token_indices": [OLD, OLD + 1]}),
    "new, untied": (
        False,
        {"trainable_token_indices": {"embed_tokens": [4, OLD, OLD + 1], "lm_head": [OLD, OLD + 1]}},
    ),
    "new, whole tables": (False, {"modules_to_save": BOTH}),
    "new, whole tables, kept tied": (True, {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}),
    "new, head beside whole embeddings, tied": (
        True,
        {"trainable_token_indices": {"lm_head": [OLD, OLD + 1]}, "modules_to_save": BOTH[:1]},
    ),
}
#: What only PEFT writes: rows that nobody trained, which it keeps with the adapter, and adapters on a grown table.
ONLY_PEFT = {
    "new, not trained": (False, {}),
    "new, not trained, tied": (True, {}),
    "new, adapters on the tables": (False, {"target_modules": ["q_proj", *BOTH]}),
}


def case(name):
    tied, options = (CASES | ONLY_PEFT)[name]
    config = tiny.config(tie_word_embeddings=tied)
    return config, {"target_modules": SEVEN, "r": 4, "lora_alpha": 9, **options}, name.startswith("new")


def base_of(config, new=False):
    folder = tiny.shared_folder(tie_word_embeddings=config["tie_word_embeddings"])
    return tiny.model(folder, config, new_tokens=NEW if new else None)


def reference_of(config, new):
    """transformers' model, with the vocabulary resized by its own means (random rows) for new tokens."""
    model = torch_llama.build(config, tiny.arrays(config))
    if new:
        model.resize_token_embeddings(OLD + len(NEW), mean_resizing=False)
    return model


def compare(ours, theirs, config, new):
    """The logits, and the function of another model that gives its own."""
    sample = tiny.documents({**config, "vocab_size": config["vocab_size"] + 2 * new + 1}, (38, 13, 22))
    tokens, _, segments, positions = tiny.rows([sample[:1], sample[1:]], 40)
    tokens[:, 2:5] = [[7, 3, 90]]
    if new:
        tokens[:, 6:8] = [[OLD, OLD + 1]]
    expected = torch_llama.logits(theirs.eval(), tokens, positions, segments)
    found = tiny.logits(ours, tokens, positions, segments)
    np.testing.assert_allclose(found[segments > 0], expected[segments > 0], rtol=0, atol=TOLERANCE)
    return lambda base: np.abs(found - tiny.logits(base, tokens, positions, segments))[segments > 0].max()


TELLING = (
    *("rsLoRA", "patterns", "embeddings and head as targets with DoRA", "embeddings and head as targets, tied"),
    *("modules_to_save head, untied by it", "modules_to_save, kept tied"),
    *("rows, untied", "rows of both, tied, different", "rows beside whole embeddings"),
    *("new, whole tables, kept tied", "new, head beside whole embeddings, tied"),
)
"""Cases that hold the mechanisms of the others."""


@pytest.mark.exhaustive(*TELLING)
@pytest.mark.parametrize("name", CASES)
def test_peft_loads_what_we_write(name, tmp_path):
    config, options, new = case(name)
    base = base_of(config, new)
    ours = tiny.adapted(base, **options)
    ours.save_pretrained(tmp_path / "adapter")
    theirs = peft.PeftModel.from_pretrained(reference_of(config, new), tmp_path / "adapter")
    assert compare(ours, theirs, config, new)(base) > 1000 * TOLERANCE, "the adapter does nothing"


@pytest.mark.exhaustive(*TELLING, "new, not trained, tied", "new, adapters on the tables")
@pytest.mark.parametrize("name", [*CASES, *ONLY_PEFT])
def test_we_load_what_peft_writes(name, tmp_path):
    config, options, new = case(name)
    torch.manual_seed(3)
    theirs = peft.get_peft_model(reference_of(config, new), peft.LoraConfig(task_type="CAUSAL_LM", **options))
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.requires_grad:
                parameter += 0.05 * torch.randn_like(parameter)
    theirs.save_pretrained(tmp_path / "adapter", save_embedding_layers=new or "auto")
    base = base_of(config)
    ours = FastLanguageModel.load_adapter(base, tmp_path / "adapter")
    difference = compare(ours, theirs, config, new)
    if new:
        return
    assert difference(base) > 1000 * TOLERANCE, "the adapter does nothing"
    ours.save_pretrained(tmp_path / "again")
    again = FastLanguageModel.load_adapter(base, tmp_path / "again")
    tied = options.get("ensure_weight_tying", False)
    first, second = (export_adapters(model.trainable, model.plan, tied) for model in (ours, again))
    assert first.keys() == second.keys()
    assert all(np.array_equal(first[path], second[path]) for path in first)


@pytest.mark.parametrize("tied", [True, False])
def test_auto_peft_needs_only_the_two_folders(tied, tmp_path):
    """The tokenizer in the adapter's folder tells PEFT how many rows there are."""
    config = tiny.config(tie_word_embeddings=tied)
    ours = tiny.adapted(base_of(config, new=True), target_modules=["q_proj"])
    ours.save_pretrained(tmp_path / "adapter")
    theirs = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter", attn_implementation="eager")
    compare(ours, theirs, config, True)


def test_a_grown_model_that_was_trained_whole_is_transformers_own(tmp_path):
    from transformers import AutoModelForCausalLM

    config = tiny.config(tie_word_embeddings=False)
    ours = tiny.model(tiny.shared_folder(tie_word_embeddings=False), config, new_tokens=NEW, full_finetuning=True)
    ours.save_pretrained(tmp_path / "model")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "model", attn_implementation="eager")
    assert theirs.config.vocab_size == OLD + 2
    compare(ours, theirs, config, True)


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
