"""A tiny random Llama with a byte tokenizer and a chat template, and conversations to learn."""

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.support import tiny
from tests.support.folders import write_checkpoint

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}U:{{ m.content }}\n"
    "{% else %}A:{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}{% if add_generation_prompt %}A:{% endif %}"
)


def write_model(folder: Path, config: Mapping[str, Any] | None = None) -> Path:
    """A model folder, by default of a Llama of two layers."""
    special = ["<pad>", "<s>", "</s>", "<unk>"]
    vocab = {token: index for index, token in enumerate(special + sorted(pre_tokenizers.ByteLevel.alphabet()))}
    config = config or tiny.config(num_hidden_layers=2, hidden_size=64, intermediate_size=64)
    config = {**config, "vocab_size": len(vocab), "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
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


def write_chats(file: Path) -> Path:
    """A file of forty conversations."""
    draw = random.Random(0)
    rows = []
    for _ in range(40):
        word = "".join(draw.choices("abcdef", k=draw.randint(2, 5)))
        rows.append({"messages": [{"role": "user", "content": word}, {"role": "assistant", "content": word[::-1]}]})
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file
