"""A loaded tokenizer's batches, as notebooks use them: arrays without PyTorch, tensors with it."""

import copy
import importlib.util
import json
import pickle
from pathlib import Path

import numpy as np
import pytest

import fastjax
from fastjax.data import load_tokenizer
from fastjax.data.token_batches import HostTensor, TokenBatch
from fastjax.errors import ConfigError

ASSET = Path(fastjax.__file__).parent / "assets" / "tiny-llama"
CHAT = [{"role": "user", "content": "Add one."}]


@pytest.fixture
def tokenizer():
    return load_tokenizer(ASSET)


def test_a_batch_is_its_ids_and_moves_nowhere(tokenizer):
    batch = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_tensors="pt").to("cuda")
    ids = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    assert isinstance(batch, TokenBatch) and batch.shape == (1, len(ids)) and {**batch}.keys() >= {"input_ids"}
    assert batch[0].tolist() == batch["input_ids"][0].tolist() == batch.input_ids[0].tolist() == ids
    assert tokenizer.decode(batch[0]) == tokenizer.decode(ids) and batch[:, 2:].shape == (1, len(ids) - 2)
    if importlib.util.find_spec("torch") is None:
        assert isinstance(batch.input_ids, HostTensor) and batch.input_ids.to("cuda") is batch.input_ids
        assert type(batch.input_ids.numpy()) is np.ndarray and tokenizer.encode("a", return_tensors="pt").shape[0] == 1
    else:
        assert batch.input_ids.device.type == "cpu"


def test_padding_without_a_pad_token(tokenizer):
    tokenizer.pad_token = None
    batch = tokenizer(["a", "a b c d e"], return_tensors="np", padding=True)
    assert batch.attention_mask.sum() < batch.input_ids.size and tokenizer.pad_token is None
    assert set(batch.input_ids[batch.attention_mask == 0]) == {tokenizer.eos_token_id}


def test_contents_in_parts_of_text(tokenizer):
    parts = [{"role": "user", "content": [{"type": "text", "text": "Add "}, {"type": "text", "text": "one."}]}]
    texts = [tokenizer.apply_chat_template(chat, tokenize=False) for chat in (CHAT, parts)]
    assert texts[0] == texts[1] == tokenizer.apply_chat_template([parts, CHAT], tokenize=False)[0]
    with pytest.raises(ConfigError, match="content: expected texts, or parts of type text, got .*image"):
        tokenizer.apply_chat_template([{"role": "user", "content": [{"type": "image"}]}])
    assert tokenizer("a", images=None)["input_ids"] == tokenizer("a")["input_ids"]
    with pytest.raises(ConfigError, match="images: expected none, got some"):
        tokenizer("a", images=["b"])
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match=r"has no chat template; get_chat_template\(tokenizer, …\) sets one"):
        tokenizer.apply_chat_template(CHAT)


def test_copies_and_files(tokenizer, tmp_path):
    for other in (copy.deepcopy(tokenizer), pickle.loads(pickle.dumps(tokenizer))):
        assert type(other) is type(tokenizer) and other("a")["input_ids"] == tokenizer("a")["input_ids"]
    tokenizer.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["tokenizer_class"] == "PreTrainedTokenizerFast"
