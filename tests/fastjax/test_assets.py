"""The embedded model and data sets: whole, small, made by the scripts, and fit for each other."""

import json
import random
from pathlib import Path

import pytest

import fastjax
from fastjax.data import Encoder, load_tokenizer, prepare, read_jsonl
from tests.support.data import uncached

ASSETS = Path(fastjax.__file__).parent / "assets"
SCRIPTS = Path(fastjax.__file__).parents[1] / "scripts"
TRAIN, TEST = (ASSETS / "tiny-chat" / name for name in ("train.jsonl", "test.jsonl"))


@pytest.fixture
def script(monkeypatch):
    """scripts/make_tiny_llama.py as a module."""
    if not SCRIPTS.is_dir():
        pytest.skip("an installed package has no scripts folder")
    monkeypatch.syspath_prepend(SCRIPTS)
    import make_tiny_llama

    return make_tiny_llama


def conversations(path):
    return [record.messages for record in read_jsonl(path)]


def test_the_model_folder_is_small_and_complete():
    files = {file.name: file.stat().st_size for file in (ASSETS / "tiny-llama").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= set(files)
    assert sum(files.values()) <= 4_000_000


def test_weights_fill_whole_nf4_blocks_and_the_tokenizer_fills_the_vocabulary():
    config = json.loads((ASSETS / "tiny-llama" / "config.json").read_text())
    assert config["hidden_size"] % 64 == config["intermediate_size"] % 64 == 0
    tokenizer = load_tokenizer(ASSETS / "tiny-llama")
    assert len(tokenizer) == config["vocab_size"]
    assert set(Encoder(tokenizer).stop_tokens()) <= set(config["eos_token_id"])


def test_held_out_prompts_are_not_in_the_training_data():
    train, test = ({chat[0]["content"] for chat in conversations(path)} for path in (TRAIN, TEST))
    assert len(test) == 100 and not train & test


def test_every_answer_is_the_record_that_its_prompt_states():
    for chat in conversations(TRAIN) + conversations(TEST):
        prompt, answer = (message["content"] for message in chat)
        record = json.loads(answer)
        assert list(record) == ["who", "item", "color", "count", "price"]
        assert all(f" {value} " in prompt.translate(str.maketrans(".,:", "   ")) for value in record.values())


def test_every_row_fits_and_only_answers_are_learnt():
    tokenizer = load_tokenizer(ASSETS / "tiny-llama")
    dataset = prepare(TRAIN, tokenizer, 256)
    assert dataset.statistics.truncated == dataset.statistics.no_targets == 0
    assert dataset.statistics.tokens > 0.8 * dataset.statistics.slots
    first = next(Encoder(tokenizer).encode(read_jsonl(TRAIN)))[0]
    answer = conversations(TRAIN)[0][-1]["content"]
    assert tokenizer.decode(first.tokens[first.learn]) == answer + "<|eot_id|>"


def test_the_data_sets_are_what_the_script_writes(script, tmp_path):
    script.tiny_world.write_data_sets(tmp_path)
    written = sorted(file.relative_to(tmp_path) for file in tmp_path.rglob("*.jsonl"))
    assert written == sorted(file.relative_to(ASSETS) for file in ASSETS.rglob("*.jsonl"))
    for file in written:
        assert (tmp_path / file).read_bytes() == (ASSETS / file).read_bytes(), file


def test_the_small_data_sets_fit_their_recipes():
    tokenizer = load_tokenizer(ASSETS / "tiny-llama")
    for name in ("tiny-text", "tiny-answers", "tiny-pairs"):
        assert sum(file.stat().st_size for file in (ASSETS / name).iterdir()) < 110_000
    text = prepare(ASSETS / "tiny-text" / "train.jsonl", tokenizer, 256, uncached(too_long="split"))
    assert text.statistics.split > 0  # some are longer than a row
    answers = prepare(
        ASSETS / "tiny-answers" / "train.jsonl", tokenizer, 256, uncached(loss_on="last_response", too_long="drop")
    )
    assert answers.statistics.dropped == 0
    assert answers.statistics.target_tokens == 2 * answers.statistics.examples  # a colour and the end of the turn


def test_the_tokenizer_is_what_the_script_makes(script):
    rng = random.Random(0)
    documents = [script.tiny_world.base_document(rng) for _ in range(20_000)]
    learnt = [{"messages": chat} for chat in conversations(TRAIN)[:200]]
    made = script.make_tokenizer([script.text_of(document) for document in documents + learnt])
    kept = load_tokenizer(ASSETS / "tiny-llama")
    assert made.get_vocab() == kept.get_vocab()
    assert made.chat_template == kept.chat_template
