"""New tokens: their ids, their rows, what trains them, and what is refused."""

import jax
import numpy as np
import pytest
from tokenizers import AddedToken

from convert.checkpoint import open_checkpoint
from fastjax.data.batches import Batch
from fastjax.data.tokenizer import add_tokens, load_tokenizer, own_tokenizer, vocabulary_size
from fastjax.errors import ConfigError
from fastjax.language_model import FastLanguageModel
from fastjax.lora.export import export_adapters
from tests.support import steps, tiny

NEW = ["<|tool|>", "<|end|>"]
OLD = tiny.CONFIG["vocab_size"]


def grown(tied, **options):
    config = tiny.config(tie_word_embeddings=tied)
    return tiny.model(tiny.shared_folder(tie_word_embeddings=tied), config, new_tokens=NEW, **options)


def rows_batch(model, tokens=None):
    """One row with the new tokens in it, as a batch."""
    documents = [np.asarray([5, OLD, 7, OLD + 1, 9, OLD, 11, 3], np.int32), np.arange(20, 30, dtype=np.int32)]
    return Batch(*(array[None] for array in tiny.rows([documents], 20)))


def test_tokens_are_found_in_text_and_are_special_only_if_asked_for():
    tokenizer = load_tokenizer(tiny.shared_folder())
    ids = add_tokens(tokenizer, [NEW[0], AddedToken(NEW[1], special=True)])
    assert ids == [OLD, OLD + 1] and vocabulary_size(tokenizer) == OLD + 2
    encoded = tokenizer("w5<|tool|>w7<|end|>", add_special_tokens=False)["input_ids"]
    assert encoded == [5, OLD, 7, OLD + 1]
    shown = tokenizer.decode(encoded, skip_special_tokens=True)
    assert NEW[0] in shown and NEW[1] not in shown


@pytest.mark.parametrize("tied", [True, False])
def test_rows_of_new_tokens_start_as_the_mean_of_the_others(tied):
    model = grown(tied)
    config = tiny.config(tie_word_embeddings=tied)
    assert model.config.vocab_size == model.hf_config["vocab_size"] == OLD + 2 and model.new_token_ids == (OLD, OLD + 1)
    tables = {"embed_tokens": "model.embed_tokens.weight"} | ({} if tied else {"lm_head": "lm_head.weight"})
    for name, stored in tables.items():
        original = tiny.arrays(config)[stored]
        table = np.asarray(model.frozen[name]["weight"])
        assert np.array_equal(table[:OLD], original)
        np.testing.assert_allclose(table[OLD:], np.stack([original.mean(0)] * 2), rtol=0, atol=1e-6)  # float32 sums
    assert tied == ("weight" not in model.frozen.get("lm_head", {}))


def test_a_padded_embedding_keeps_its_size(tmp_path):
    """The tokenizer has 90 tokens, the table 101 rows: rows 90 and 91 become the mean of the first 90."""
    tiny.write_folder(tmp_path, tiny.CONFIG, tiny.arrays(tiny.CONFIG))
    tiny.write_tokenizer(tmp_path, {"vocab_size": 90})
    model = tiny.model(tmp_path, tiny.CONFIG, new_tokens=NEW)
    original = tiny.arrays(tiny.CONFIG)["model.embed_tokens.weight"]
    table = np.asarray(model.frozen["embed_tokens"]["weight"])
    assert model.new_token_ids == (90, 91) and table.shape == original.shape and model.config.vocab_size == OLD
    np.testing.assert_allclose(table[90:92], np.stack([original[:90].mean(0)] * 2), rtol=0, atol=1e-6)
    assert np.array_equal(np.delete(table, [90, 91], 0), np.delete(original, [90, 91], 0))


@pytest.mark.parametrize("tied", [True, False])
def test_an_adapter_trains_the_new_rows_by_itself_and_only_these(tied):
    model = FastLanguageModel.get_peft_model(grown(tied), r=4)
    ids = [OLD, OLD + 1]
    assert model.lora.trainable_token_indices == (ids if tied else {"embed_tokens": ids, "lm_head": ids})
    found = {name: a for name, a in export_adapters(model.trainable, model.plan, False).items() if "layers" not in name}
    names = {"embed_tokens.trainable_tokens_delta"} | (set() if tied else {"lm_head.trainable_tokens_delta"})
    assert set(found) == names and all(array.shape == (2, 48) for array in found.values())


@pytest.mark.exhaustive("True")  # of two tables, and by plain LoRA: lora/test_models.py, "rows of tokens beside"
@pytest.mark.parametrize("tied", [True, False])
def test_rows_have_the_gradient_that_the_whole_table_would_have(tied):
    """The trained table's gradient, its rows of these tokens; the order of sums differs."""
    base, lora = grown(tied), {"r": 4, "target_modules": ["q_proj"]}
    both = {"modules_to_save": ["embed_tokens", "lm_head"], "ensure_weight_tying": tied}
    whole = FastLanguageModel.get_peft_model(base, **lora, **both)
    rows = FastLanguageModel.get_peft_model(base, **lora, trainable_token_indices=[9, 5] if tied else None)
    batch = rows_batch(base)
    (before, all_grads), (after, own_grads) = (steps.gradients(model, batch) for model in (whole, rows))
    np.testing.assert_allclose(before["loss"], after["loss"], rtol=1e-6)
    ids = [9, 5, OLD, OLD + 1] if tied else [OLD, OLD + 1]
    expected = export_adapters(all_grads, whole.plan, tied)
    found = export_adapters(own_grads, rows.plan, False)
    for table in ("embed_tokens",) if tied else ("embed_tokens", "lm_head"):
        want = expected[f"{table}.modules_to_save.weight"][ids]
        assert np.abs(want).max(axis=1).min() > 0
        np.testing.assert_allclose(
            found[f"{table}.trainable_tokens_delta"], want, rtol=0, atol=2e-6 * np.abs(want).max()
        )


@pytest.mark.parametrize(
    ("tied", "options", "expected"),
    [
        (True, {"trainable_token_indices": [3]}, [3, OLD, OLD + 1]),
        (False, {"trainable_token_indices": [3]}, {"embed_tokens": [3, OLD, OLD + 1], "lm_head": [OLD, OLD + 1]}),
        (False, {"modules_to_save": ["lm_head"]}, [OLD, OLD + 1]),
        (False, {"modules_to_save": ["embed_tokens"]}, {"lm_head": [OLD, OLD + 1]}),
        (True, {"modules_to_save": ["embed_tokens"]}, {"lm_head": [OLD, OLD + 1]}),
        (True, {"modules_to_save": ["embed_tokens", "lm_head"]}, None),
        (True, {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}, None),
    ],
)
def test_new_rows_are_trained_in_every_table_that_is_not_trained_whole(tied, options, expected):
    model = FastLanguageModel.get_peft_model(grown(tied), r=4, **options)
    assert model.lora.trainable_token_indices == expected


def test_a_saved_adapter_brings_its_tokenizer_and_its_rows(tmp_path):
    """A base that was loaded without the new tokens grows by them, for generation and for further training."""
    trained = FastLanguageModel.get_peft_model(grown(True), r=4)
    trained = trained.replace(trainable=jax.tree.map(lambda leaf: leaf + 0.01, trained.trainable))
    trained.save_pretrained(tmp_path / "adapter")
    base = tiny.model(tiny.shared_folder(tie_word_embeddings=True), tiny.CONFIG)
    again = FastLanguageModel.load_adapter(base, tmp_path / "adapter", lora_dropout=0.25)
    assert again.tokenizer.convert_tokens_to_ids(NEW) == [OLD, OLD + 1] and again.config.vocab_size == OLD + 2
    assert again.lora.lora_dropout == 0.25 and trained.lora.lora_dropout == 0.0
    batch = rows_batch(trained)
    tokens, segments, positions = batch.tokens[0], batch.segment_ids[0], batch.positions[0]
    ours, theirs = (tiny.logits(model, tokens, positions, segments) for model in (trained, again))
    assert np.array_equal(ours, theirs)
    assert vocabulary_size(own_tokenizer(tmp_path / "adapter")) == OLD + 2
    other = tiny.model(base.folder, tiny.CONFIG, new_tokens=[*NEW, "<|third|>"])
    with pytest.raises(ConfigError, match=r"does not train the rows of the new tokens with the ids \[103\]"):
        FastLanguageModel.load_adapter(other, tmp_path / "adapter")


def test_full_fine_tuning_saves_the_grown_model(tmp_path):
    model = grown(False, full_finetuning=True)
    model.save_pretrained(tmp_path / "saved")
    assert open_checkpoint(tmp_path / "saved").config["vocab_size"] == OLD + 2
    again, tokenizer = FastLanguageModel.from_pretrained(tmp_path / "saved", full_finetuning=True, load_in_4bit=False)
    assert tokenizer.convert_tokens_to_ids(NEW) == [OLD, OLD + 1]
    steps.assert_same(again.trainable, model.trainable)


def test_a_tokenizer_larger_than_the_embedding(tmp_path):
    tiny.write_folder(tmp_path, tiny.CONFIG, tiny.arrays(tiny.CONFIG))
    tiny.write_tokenizer(tmp_path, {"vocab_size": OLD + 2})
    message = rf"ids up to {OLD + 1}, but the embedding has {OLD} rows: no row for 'w101', 'w102'; name these in"
    with pytest.raises(ConfigError, match=message):
        tiny.model(tmp_path, tiny.CONFIG)
    model = tiny.model(tmp_path, tiny.CONFIG, new_tokens=["w101", "w102", "more"])
    assert model.new_token_ids == (101, 102, 103) and model.config.vocab_size == 104


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (["w5", "new"], r"new_tokens: expected tokens that the tokenizer .*, got 'w5' \(id 5\); leave them out"),
        (["new", "new"], "new_tokens: expected different texts"),
        ([""], "new_tokens: expected different texts that are not empty"),
    ],
)
def test_tokens_that_are_refused(tokens, message):
    with pytest.raises(ConfigError, match=message):
        tiny.model(tiny.shared_folder(tie_word_embeddings=True), tiny.CONFIG, new_tokens=tokens)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"trainable_token_indices": [OLD]}, rf"expected different ids from 0 to {OLD - 1}, got \[{OLD}\]"),
        ({"trainable_token_indices": [3, 3]}, r"expected different ids .* got \[3, 3\]"),
        ({"trainable_token_indices": {"norm": [3]}}, "expected rows of embed_tokens or lm_head, got rows of norm"),
        ({"trainable_token_indices": [3], "modules_to_save": ["lm_head"]}, "embed_tokens is trained already"),
        ({"trainable_token_indices": [3], "target_modules": ["embed_tokens"]}, "embed_tokens is trained already"),
        (
            {"trainable_token_indices": {"embed_tokens": [3], "lm_head": [4]}, "ensure_weight_tying": True},
            "ensure_weight_tying needs equal ids",
        ),
        ({"trainable_token_indices": [-3]}, "trainable_token_indices: expected a list of token ids"),
    ],
)
def test_rows_that_are_refused(options, message):
    base = tiny.model(tiny.shared_folder(tie_word_embeddings=True), tiny.CONFIG)
    with pytest.raises(ConfigError, match=message):
        FastLanguageModel.get_peft_model(base, **{"r": 4, **options})


def test_tables_with_adapters_cannot_have_new_rows():
    with pytest.raises(
        ConfigError, match=r"target_modules: \['lm_head'\] cannot have an adapter beside the rows of new"
    ):
        FastLanguageModel.get_peft_model(grown(False), r=4, target_modules=["q_proj", "lm_head"])


def test_a_head_alone_cannot_be_saved_beside_new_rows_of_tied_embeddings():
    with pytest.raises(ConfigError, match="lm_head alone unties the embeddings"):
        FastLanguageModel.get_peft_model(grown(True), r=4, modules_to_save=["lm_head"])
