"""Every token that holds a character of a response is learnt, and the end token: many tokenizers, any ending."""

from pathlib import Path

import numpy as np
import pytest

from fastjax.data import ChatRecord, Encoder, load_tokenizer, parse_row, set_chat_template
from tests.support import tokenizers as made

NEOX = Path(__file__).parents[4] / "shared" / "data" / "tokenizer_neox"
TINY = Path(__file__).parents[3] / "fastjax" / "assets" / "tiny-llama"
ENDINGS = 24

MARKED = (  # marks that hold the content alone
    "{% for m in messages %}{% if m.role == 'assistant' %}A:{% generation %}{{ m.content }}{% endgeneration %}END"
    "{% else %}U: {{ m.content }}\n{% endif %}{% endfor %}{% if add_generation_prompt %}A:{% endif %}"
)
UNMARKED = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}END{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def neox():
    if not NEOX.is_dir():
        pytest.skip(f"no tokenizer at {NEOX}")
    return made.wrapped(load_tokenizer(NEOX).backend_tokenizer)


TOKENIZERS = {
    "byte-level": made.byte_level,
    "byte-level, trimmed offsets": lambda: made.byte_level(trim_offsets=True),
    "byte-level, prefix": lambda: made.byte_level(trim_offsets=True, prefix=True),
    "byte-level, no emoji known": lambda: made.byte_level(emoji=False),
    "byte fallback": made.byte_fallback,
    "byte fallback, prepended": lambda: made.byte_fallback(prepend=True),
    "unigram, always": lambda: made.unigram("always"),
    "unigram, never": lambda: made.unigram("never"),
    "tiny-llama": lambda: made.wrapped(load_tokenizer(TINY).backend_tokenizer),
    "GPT-NeoX": neox,
}


@pytest.fixture(scope="module", params=TOKENIZERS)
def tokenizer(request):
    return TOKENIZERS[request.param]()


def check(tokenizer, record, before, learnt, after=""):
    """The record's text is the three as one, and tokens are learnt that hold a character of the second, and the end."""
    ((example,),) = Encoder(tokenizer).encode([record])
    text = before + learnt + after
    ids, learn = example.tokens.tolist(), example.learn.tolist()
    bos, eos = tokenizer.bos_token, tokenizer.eos_token
    if ids[0] == tokenizer.bos_token_id and not text.startswith(bos):
        ids, learn = ids[1:], learn[1:]
    if ids[-1] == tokenizer.eos_token_id and not text.endswith(eos):
        assert learn.pop(), "the end that was added is learnt"
        ids.pop()
    elif not text.endswith(eos):
        assert after or learnt.endswith(tuple(made.SPECIAL)), f"no end behind {text!r}"
    start, end = len(before.encode()), len((before + learnt).encode())
    expected = [first < end and last > start for first, last in made.token_ranges(tokenizer, ids, text)]
    expected[0] &= ids[0] != example.tokens[0]  # nothing predicts the first token
    assert learn == expected, (text, tokenizer.convert_ids_to_tokens(ids), np.flatnonzero(learn).tolist())


def test_texts(tokenizer):
    for text in made.endings(ENDINGS):
        check(tokenizer, parse_row({"text": text}, "x"), "", text)


def test_prompts_and_completions(tokenizer):
    for n, text in enumerate(made.endings(ENDINGS, seed=1)):
        cut = n % len(text)
        check(tokenizer, parse_row({"prompt": text[:cut], "completion": text[cut:]}, "x"), text[:cut], text[cut:])


@pytest.mark.parametrize("end", ["", "<|eot_id|>", "</s>"])
@pytest.mark.parametrize("template", [MARKED, UNMARKED])
def test_templates(tokenizer, template, end):
    tokenizer.chat_template = template.replace("END", end)
    for text in made.endings(ENDINGS // 2, seed=3):
        record = ChatRecord([{"role": "user", "content": "q 👍"}, {"role": "assistant", "content": text}], "x")
        before = "U: q 👍\nA:" if template == MARKED else f"user: q 👍{end}assistant: "
        check(tokenizer, record, before, text + end)


TURNS = {
    "chatml": ("<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n", "<|im_end|>", "\n"),
    "llama3": (
        "<s><|start_header_id|>user<|end_header_id|>\n\nq<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        "<|eot_id|>",
        "",
    ),
    "mistral": ("<s>[INST] q[/INST]", "</s>", ""),
    "gemma": ("<s><start_of_turn>user\nq<end_of_turn>\n<start_of_turn>model\n", "<end_of_turn>", "\n"),
    "alpaca": (
        "Below is an instruction that describes a task. Write a response that appropriately completes the request."
        "\n\n### Instruction:\nq\n\n### Response:\n",
        "</s>",
        "",
    ),
    "plain": ("User: q\n\nAssistant:", "</s>", "\n\n"),
}


@pytest.mark.parametrize("name", TURNS)
def test_named_templates(tokenizer, name):
    set_chat_template(tokenizer, name)
    before, end, after = TURNS[name]
    for text in made.endings(ENDINGS // 4, seed=4):
        said = {"mistral": f" {text.strip()}", "plain": f" {text}"}.get(name, text)
        said = said.strip() if name in ("llama3", "gemma") else said
        record = ChatRecord([{"role": "user", "content": "q"}, {"role": "assistant", "content": text}], "x")
        check(tokenizer, record, before, said + end, after)


def test_a_tokenizer_that_was_saved_with_truncation_and_padding_reads_all():
    plain, tokenizer = made.byte_level(), made.byte_level()
    tokenizer.backend_tokenizer.enable_truncation(4)
    tokenizer.backend_tokenizer.enable_padding(length=64)
    record = parse_row({"text": "the answer is what the user asked"}, "x")
    found, expected = (next(Encoder(one).encode([record]))[0] for one in (tokenizer, plain))
    assert found.tokens.tolist() == expected.tokens.tolist() and found.learn.tolist() == expected.learn.tolist()
