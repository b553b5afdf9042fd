import json
import subprocess
import sys

import numpy as np
import pytest

from fastjax.data import Batches, load_tokenizer, prepare
from fastjax.errors import ConfigError, DataError


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def chat(question, *answer):
    return {"messages": [{"role": "user", "content": question}, *({"role": "assistant", "content": a} for a in answer)]}


def test_from_a_file_to_batches(tmp_path, make_tokenizer):
    tokenizer = make_tokenizer("llama3", adds_bos=True)
    rows = [chat("what is the answer", "the answer"), {"text": "the user"}, chat("nothing"), chat("a" * 99, "b")]
    dataset = prepare(write(tmp_path / "rows.jsonl", rows), tokenizer, 32)
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


def test_nothing_to_train_on_is_an_error(tmp_path, make_tokenizer):
    tokenizer = make_tokenizer("llama3")
    empty = write(tmp_path / "empty.jsonl", [])
    with pytest.raises(DataError, match="empty.jsonl: no examples"):
        prepare(empty, tokenizer, 32)
    unanswered = write(tmp_path / "unanswered.jsonl", [chat("a"), chat("b")])
    with pytest.raises(DataError, match="unanswered.jsonl: none of the 2 examples has a token to learn"):
        prepare(unanswered, tokenizer, 32)


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


def test_preparing_data_imports_neither_jax_nor_torch(tmp_path, make_tokenizer):
    make_tokenizer("chatml").save_pretrained(tmp_path)
    path = write(tmp_path / "rows.jsonl", [chat("a", "b")])
    code = (
        "import sys; from fastjax.data import load_tokenizer, prepare;"
        f"prepare({str(path)!r}, load_tokenizer({str(tmp_path)!r}), 32);"
        "print(sorted({'jax', 'torch'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (run.stdout, run.stderr) == ("[]\n", "")
