"""A tiny random Llama with a byte tokenizer and a chat template, and conversations to learn."""

import json
import random

import jax
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from convert.checkpoint import write_checkpoint
from tests.support import tiny

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}U:{{ m.content }}\n"
    "{% else %}A:{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}{% if add_generation_prompt %}A:{% endif %}"
)


@pytest.fixture(scope="session", autouse=True)
def compiled_once(tmp_path_factory):
    """Runs of the same shapes take their programs from a cache: most of a short run is compilation."""
    options = {
        "jax_compilation_cache_dir": str(tmp_path_factory.mktemp("compiled")),
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in options}
    for name, value in options.items():
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.fixture(scope="session")
def chat_folder(tmp_path_factory):
    """The folder of the model."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    special = ["<pad>", "<s>", "</s>", "<unk>"]
    vocab = {token: index for index, token in enumerate(special + sorted(pre_tokenizers.ByteLevel.alphabet()))}
    config = tiny.config(
        vocab_size=len(vocab), num_hidden_layers=2, hidden_size=64, intermediate_size=64, bos_token_id=1, eos_token_id=2
    )
    write_checkpoint(folder, tiny.arrays(config).items(), config)
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(str(folder))
    return folder


@pytest.fixture(scope="session")
def chats(tmp_path_factory):
    """A file of forty conversations."""
    draw = random.Random(0)
    rows = []
    for _ in range(40):
        word = "".join(draw.choices("abcdef", k=draw.randint(2, 5)))
        rows.append({"messages": [{"role": "user", "content": word}, {"role": "assistant", "content": word[::-1]}]})
    file = tmp_path_factory.mktemp("data") / "chats.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file
