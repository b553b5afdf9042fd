"""Trained rows of tokens cross over to PEFT and back, with the vocabulary as it was and with new tokens."""

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
OLD, NEW = tiny.CONFIG["vocab_size"], ["<|tool|>", "<|end|>"]
BOTH = ["embed_tokens", "lm_head"]

#: (tied, options); ids beyond the vocabulary are those of new tokens.
CASES = {
    "list, tied": (True, {"trainable_token_indices": [7, 3, 90]}),
    "list, untied": (False, {"trainable_token_indices": [7, 3, 90]}),
    "both tables": (False, {"trainable_token_indices": {"embed_tokens": [7, 3], "lm_head": [90, 3, 5]}}),
    "both tables, tied, the same": (True, {"trainable_token_indices": {"embed_tokens": [7, 3], "lm_head": [7, 3]}}),
    "both tables, tied, different": (True, {"trainable_token_indices": {"embed_tokens": [7, 3], "lm_head": [5]}}),
    "head beside whole embeddings": (False, {"trainable_token_indices": {"lm_head": [5]}, "modules_to_save": BOTH[:1]}),
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


def parts(name):
    tied, options = (CASES | ONLY_PEFT)[name]
    new = name.startswith("new")
    return tiny.config(tie_word_embeddings=tied), {"target_modules": ["q_proj", "up_proj"], "r": 4, **options}, new


def reference(config, new):
    """transformers' model, with the vocabulary resized by its own means (random rows) for new tokens."""
    model = torch_llama.build(config, tiny.arrays(config))
    if new:
        model.resize_token_embeddings(OLD + len(NEW), mean_resizing=False)
    return model


def compare(ours, theirs, config, new):
    sample = tiny.documents({**config, "vocab_size": config["vocab_size"] + 2 * new + 1}, (38, 13, 22))
    tokens, _, segments, positions = tiny.rows([sample[:1], sample[1:]], 40)
    tokens[:, 2:5] = [[7, 3, 90]]
    if new:
        tokens[:, 6:8] = [[OLD, OLD + 1]]
    expected = torch_llama.logits(theirs.eval(), tokens, positions, segments)
    found = tiny.logits(ours, tokens, positions, segments)
    np.testing.assert_allclose(found[segments > 0], expected[segments > 0], rtol=0, atol=TOLERANCE)
    return found, (tokens, positions, segments)


TELLING = (
    *("list, untied", "both tables, tied, different", "head beside whole embeddings"),
    *("new, whole tables, kept tied", "new, head beside whole embeddings, tied"),
)
"""Cases that hold the mechanisms of the others."""


@pytest.mark.exhaustive(*TELLING)
@pytest.mark.parametrize("name", CASES)
def test_peft_loads_what_we_write(name, tmp_path):
    config, options, new = parts(name)
    folder = tiny.shared_folder(tie_word_embeddings=config["tie_word_embeddings"])
    base = tiny.model(folder, config, new_tokens=NEW if new else None)
    ours = tiny.adapted(base, **options)
    ours.save_pretrained(tmp_path / "adapter")
    theirs = peft.PeftModel.from_pretrained(reference(config, new), tmp_path / "adapter")
    found, where = compare(ours, theirs, config, new)
    assert np.abs(found - tiny.logits(base, *where))[where[2] > 0].max() > 1000 * TOLERANCE, "the adapter does nothing"


@pytest.mark.exhaustive(*TELLING, "new, not trained, tied", "new, adapters on the tables")
@pytest.mark.parametrize("name", [*CASES, *ONLY_PEFT])
def test_we_load_what_peft_writes(name, tmp_path):
    config, options, new = parts(name)
    torch.manual_seed(3)
    settings = peft.LoraConfig(task_type="CAUSAL_LM", **options)
    theirs = peft.get_peft_model(reference(config, new), settings)
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.requires_grad:
                parameter += 0.05 * torch.randn_like(parameter)
    theirs.save_pretrained(tmp_path / "adapter", save_embedding_layers=new)
    base = tiny.model(tiny.shared_folder(tie_word_embeddings=config["tie_word_embeddings"]), config)
    ours = FastLanguageModel.load_adapter(base, tmp_path / "adapter")
    compare(ours, theirs, config, new)
    if not new:
        ours.save_pretrained(tmp_path / "again")
        again = FastLanguageModel.load_adapter(base, tmp_path / "again")
        first, second = (export_adapters(model.trainable, model.plan, False) for model in (ours, again))
        assert first.keys() == second.keys() and all(np.array_equal(first[path], second[path]) for path in first)


@pytest.mark.parametrize("tied", [True, False])
def test_auto_peft_needs_only_the_two_folders(tied, tmp_path):
    """The tokenizer in the adapter's folder tells PEFT how many rows there are."""
    config = tiny.config(tie_word_embeddings=tied)
    folder = tiny.shared_folder(tie_word_embeddings=tied)
    ours = tiny.adapted(tiny.model(folder, config, new_tokens=NEW), target_modules=["q_proj"])
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
