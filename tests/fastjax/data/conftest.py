"""A small byte-level tokenizer and chat templates of the well-known kinds."""

import json

import numpy as np
import pytest

from tests.support import tokenizers

TEMPLATES = {
    "chatml": (
        "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "llama3": (
        "{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n"
        "{{ message.content | trim }}<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
    ),
    # No generation prompt, a space before the answer, EOS after it.
    "llama2": (
        "{{ bos_token }}{% for message in messages %}{% if message.role == 'assistant' %} {{ message.content }}"
        "{{ eos_token }}{% elif message.role == 'user' %}[INST] {{ message.content }} [/INST]"
        "{% else %}{{ raise_exception('only user and assistant') }}{% endif %}{% endfor %}"
    ),
    # No special token anywhere.
    "plain": (
        "{% for message in messages %}### {{ message.role }}:\n{{ message.content }}\n\n{% endfor %}"
        "{% if add_generation_prompt %}### assistant:\n{% endif %}"
    ),
    # Earlier answers are rewritten once others follow.
    "forgetful": (
        "{% for message in messages %}<|im_start|>{{ message.role }}\n"
        "{{ message.content if loop.last or message.role != 'assistant' else message.content.split('|')[-1] }}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
}


@pytest.fixture(scope="session")
def make_tokenizer():
    """`make_tokenizer(template name or None, adds_bos=False, **special tokens)`."""
    from tokenizers import Tokenizer, processors
    from transformers import PreTrainedTokenizerFast

    state = tokenizers.byte_level(emoji=False).backend_tokenizer.to_str()

    def make(template=None, adds_bos=False, **special):
        copy = Tokenizer.from_str(state)
        if adds_bos:
            copy.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
        special = {"bos_token": "<s>", "eos_token": "</s>"} | special
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=copy, **special)
        tokenizer.chat_template = TEMPLATES.get(template, template)
        return tokenizer

    return make


@pytest.fixture
def templates():
    """The templates by name."""
    return TEMPLATES


@pytest.fixture
def write_rows(tmp_path):
    """`write_rows(file name, rows)`: a file of JSON lines."""

    def write(name, rows):
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    return write


@pytest.fixture(scope="session")
def make_examples():
    """`make_examples([(token ids, which are learnt), …])`."""
    from fastjax.data.documents import Examples

    def make(examples):
        tokens = np.array([token for tokens, _ in examples for token in tokens], np.int32)
        learn = np.array([flag for _, flags in examples for flag in flags], bool)
        offsets = np.cumsum([0, *(len(tokens) for tokens, _ in examples)])
        return Examples(tokens, learn, offsets, {}, np.arange(len(examples)))

    return make
