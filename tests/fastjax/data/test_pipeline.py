import subprocess
import sys

import numpy as np
import pytest

from fastjax.data import Batches, DataSource, StreamedBatches, load_tokenizer, prepare
from fastjax.errors import ConfigError, DataError
from tests.support.data import uncached

MIXED = (("many", 10), ("few", 4))


def chat(question, *answer):
    return {"messages": [{"role": "user", "content": question}, *({"role": "assistant", "content": a} for a in answer)]}


def test_from_a_file_to_batches(write_rows, make_tokenizer):
    tokenizer = make_tokenizer("llama3", adds_bos=True)
    rows = [chat("what is the answer", "the answer"), {"text": "the user"}, chat("nothing"), chat("a" * 99, "b")]
    dataset = prepare(write_rows("rows.jsonl", rows), tokenizer, 32)
    statistics = dataset.statistics
    assert (statistics.examples, statistics.documents, statistics.no_targets) == (4, 2, 2)
    assert statistics.slots == 32 * statistics.rows
    (batch,) = Batches(dataset.rows, batch_size=statistics.rows).epoch()
    assert (batch.segment_ids > 0).sum() == statistics.tokens
    assert (batch.targets != -100).sum() == statistics.target_tokens
    learnt = sorted(
        tokenizer.decode(batch.targets[(batch.segment_ids == segment) & (batch.targets != -100)])
        for segment in range(1, batch.segment_ids.max() + 1)
    )
    assert learnt == ["the answer<|eot_id|>", "the user</s>"]
    # Within a document a target is the token that goes in next.
    same = (batch.segment_ids[..., 1:] == batch.segment_ids[..., :-1]) & (batch.targets[..., :-1] != -100)
    np.testing.assert_array_equal(batch.targets[..., :-1][same], batch.tokens[..., 1:][same])


def test_rows_in_memory(write_rows, make_tokenizer):
    """As from their file: dicts, `datasets`' kinds, several sets, and a resumed stream of them."""
    datasets = pytest.importorskip("datasets")
    tokenizer = make_tokenizer(None)
    rows = [{"text": f"the user {n}" * (n + 1), "other": n or None} for n in range(6)]
    file, table = write_rows("rows.jsonl", rows), datasets.Dataset.from_list(rows)
    expected = prepare(file, tokenizer, 64).fingerprint
    for given in (rows, iter(rows), table, table.to_iterable_dataset(), [table], [table.select(range(2)), rows[2:]]):
        assert prepare(given, tokenizer, 64).fingerprint == expected
    made = [list(StreamedBatches(given, tokenizer, 64, 1).from_step(0, 9)) for given in (file, rows)]
    resumed = StreamedBatches(rows, tokenizer, 64, 1)
    position = {"taken": [3], "drawn": [3], "window": 0, "rows": 0, "dealt": 0}
    assert next(resumed.from_step(0, 1, position)).tokens.any()
    np.testing.assert_array_equal(*(np.stack([batch.tokens for batch in one]) for one in made))
    with pytest.raises(ConfigError, match=r"got a DatasetDict with the splits a, b; give one of them, as data\['a'\]"):
        prepare(datasets.DatasetDict(a=table, b=table), tokenizer, 64)
    with pytest.raises(ConfigError, match="data set 1: expected a data set, an iterable of dicts or a path, got int"):
        prepare([3], tokenizer, 64)


@pytest.mark.parametrize("preferences", [None, ("paired", None)])
def test_an_example_that_an_earlier_one_equals_is_left_out(write_rows, make_tokenizer, preferences):
    """In any data set, by what a row says and not by where it stands; token ids however many they are."""
    rows = [{"prompt": "the", "chosen": " user", "rejected": end} for end in (" a", " b", " a")]
    if preferences is None:
        rows = [{"text": "a"}, {"text": "b"}, {"text": "a"}, *({"input_ids": [*[5] * 1200, n]} for n in (6, 7, 6))]
    files = [write_rows(f"{name}.jsonl", rows) for name in ("one", "two")]
    said = []
    options = uncached(deduplicate=True)
    data = prepare(files, make_tokenizer(None), 2048, options, preferences=preferences, progress=said.append)
    assert data.statistics.examples == (4 if preferences is None else 2)
    assert "two.jsonl: 6 of 6 are duplicates" in " ".join(said) or preferences
    with pytest.raises(ConfigError, match="data.deduplicate: expected false for streamed data, got true"):
        StreamedBatches(files, make_tokenizer(None), 64, 1, options=options)


def test_nothing_to_train_on_is_an_error(write_rows, make_tokenizer):
    tokenizer = make_tokenizer("llama3")
    empty = write_rows("empty.jsonl", [])
    with pytest.raises(DataError, match="empty.jsonl: no examples"):
        prepare(empty, tokenizer, 32)
    unanswered = write_rows("unanswered.jsonl", [chat("a"), chat("b")])
    with pytest.raises(DataError, match="unanswered.jsonl: none of the 2 examples has a token to learn"):
        prepare(unanswered, tokenizer, 32)


def test_data_sets_are_mixed_by_weight_and_repeated(write_rows, make_tokenizer):
    tokenizer = make_tokenizer(None)
    files = [write_rows(f"{name}.jsonl", [{"text": f"{name} {n}"} for n in range(count)]) for name, count in MIXED]
    sources = [DataSource(str(file), weight=weight) for file, weight in zip(files, (1.0, 1.0), strict=True)]

    def texts(**options):
        said = []
        dataset = prepare(sources, tokenizer, 64, uncached(packing=False, **options), seed=1, progress=said.append)
        (batch,) = Batches(dataset.rows, batch_size=len(dataset.rows)).epoch()
        found = [tokenizer.decode(row[row >= 0]).removesuffix("</s>") for row in batch.targets[0]]
        assert dataset.statistics.examples == dataset.statistics.documents == len(found)
        assert dataset.statistics.target_tokens == (batch.targets != -100).sum()
        assert dataset.statistics.tokens == (batch.segment_ids > 0).sum()
        return [text.lstrip() for text in found], said

    found, said = texts(mixture_ends="first_exhausted")
    # The first token of a text is not predicted, so of "few 0" only " 0" is read back.
    assert len(found) == len(set(said)) * 8 == 8
    same = "; every epoch has the same ones, in another order"
    assert said == [f"{files[0]}: 4 of 10 examples; {files[1]}: 4 of 4 examples{same}"]
    found, said = texts(mixture_ends="all_exhausted")
    assert len(found) == 20 and said == [f"{files[0]}: 10 of 10 examples; {files[1]}: 10 of 4 examples{same}"]


def test_what_is_held_out_is_not_trained_on(write_rows, tmp_path, make_tokenizer):
    """Two parts of all examples, each cached by itself."""
    tokenizer = make_tokenizer("llama3")
    many = write_rows("many.jsonl", [chat("what is the answer", "a" * (n + 1)) for n in range(10)])
    few = write_rows("few.jsonl", [chat("what is the answer", "b" * (n + 1)) for n in range(2)])
    options = {"cache_dir": str(tmp_path / "cache"), "packing": False}
    whole, train, held_out, again = (
        prepare([many, few], tokenizer, 64, uncached(val_set_size=size, **options), held_out=apart)
        for size, apart in ((None, False), (0.25, False), (0.25, True), (0.25, True))
    )

    def found(dataset):
        (batch,) = Batches(dataset.rows, batch_size=len(dataset.rows), shuffle=False).epoch()
        return {tuple(row[row != -100].tolist()) for row in batch.targets[0]}

    assert found(train) | found(held_out) == found(whole) and not found(train) & found(held_out)
    assert (train.statistics.examples, held_out.statistics.examples) == (9, 3)
    assert again.from_cache and again.fingerprint == held_out.fingerprint != train.fingerprint


def test_the_largest_token_is_known_before_the_model_is(write_rows, make_tokenizer):
    tokenizer = make_tokenizer(None)
    tokenizer.add_tokens(["<|new|>"])
    assert prepare(write_rows("a.jsonl", [{"text": "a"}]), tokenizer, 8).max_token_id < len(tokenizer) - 1
    # As the last token of a text cut short it is only ever a target.
    rows = [{"text": "a b"}, {"text": "a<|new|>"}]
    assert prepare(write_rows("b.jsonl", rows), tokenizer, 8).max_token_id == len(tokenizer) - 1


def test_a_named_template_stays_with_the_tokenizer(write_rows, tmp_path, make_tokenizer):
    tokenizer = make_tokenizer(None)
    rows = [{"prompt": "what is the user", "completion": "the answer"}]
    as_text = prepare(write_rows("rows.jsonl", rows), tokenizer, 64)
    assert tokenizer.chat_template is None
    as_chat = prepare(tmp_path / "rows.jsonl", tokenizer, 64, uncached(chat_template="plain"))
    assert "Assistant:" in tokenizer.chat_template
    decoded = [tokenizer.decode(data.rows.documents.tokens) for data in (as_text, as_chat)]
    assert decoded == ["what is the userthe answer", "User: what is the user\n\nAssistant: the answer"]


def test_tokenizers_load_from_folders(tmp_path, make_tokenizer):
    make_tokenizer("chatml").save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert loaded.eos_token == "</s>" and "im_start" in loaded.chat_template
    with pytest.raises(ConfigError, match="there is no such folder"):
        load_tokenizer(tmp_path / "none")
    (tmp_path / "none").mkdir()
    with pytest.raises(ConfigError, match="expected tokenizer.json or tokenizer.model there"):
        load_tokenizer(tmp_path / "none")
    (tmp_path / "none" / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load_tokenizer(tmp_path / "none")


def test_preparing_data_imports_neither_jax_nor_torch(write_rows, tmp_path, make_tokenizer):
    make_tokenizer("chatml").save_pretrained(tmp_path)
    path = write_rows("rows.jsonl", [chat("a", "b")])
    code = (
        "import sys; from fastjax.data import load_tokenizer, prepare;"
        f"prepare({str(path)!r}, load_tokenizer({str(tmp_path)!r}), 32);"
        "print(sorted({'jax', 'torch'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (run.stdout, run.stderr) == ("[]\n", "")
