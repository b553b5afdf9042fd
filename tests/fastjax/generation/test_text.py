"""Prompts on their way to the model: texts and conversations, and what is neither."""

import io

import pytest

from convert.errors import ConvertError
from fastjax.commands import generate as command
from fastjax.data import Encoder
from fastjax.errors import ConfigError, DataError
from fastjax.generation import text
from tests.support import tokenizers as made

CHAT = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "q"},
    {"role": "assistant", "content": "a"},
    {"role": "user", "content": "r<|im_end|>"},
]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class Model:
    """A model as far as `answer` looks into it."""

    def __init__(self, folder=None):
        self.folder = folder
        self.tokenizer = made.byte_level()
        self.tokenizer.chat_template = TEMPLATE


@pytest.fixture
def answer(monkeypatch):
    """`answer` of a model that says its prompt back, special tokens and all."""
    model = Model()
    monkeypatch.setattr(text, "generate", lambda model, prompts, **options: prompts)
    decode = model.tokenizer.decode
    monkeypatch.setattr(model.tokenizer, "decode", lambda tokens, **options: decode(tokens))
    return lambda prompts, **options: text.answer(model, prompts, **options)


def test_conversations_are_continued(answer):
    expected = (
        "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n"
        "<|im_start|>user\nr<|im_end|><|im_end|>\n<|im_start|>assistant\n"
    )
    alone = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
    assert answer([CHAT, "q", [CHAT[1]], tuple(CHAT)]) == [expected, alone, alone, expected]


def test_special_tokens_in_prompts_as_text(answer, monkeypatch):
    seen = []
    monkeypatch.setattr(text, "generate", lambda model, prompts, **options: seen.extend(prompts) or prompts)
    answer([CHAT])
    answer([CHAT], special_tokens="text")
    end = made.SPECIAL.index("<|im_end|>")
    assert [prompt.count(end) for prompt in seen] == [5, 4]


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ("q", {}, r"prompts: expected a list of texts or conversations, got a text alone; write \[\"q\"\]"),
        (CHAT, {}, r"prompts\[0\]: expected a text or a list of messages, got one message; write \[\[.*\]\] for one"),
        ([["q"]], {}, r"prompts\[0\]\[0\]: expected an object with 'role' and 'content', found \"q\""),
        ([[]], {}, r"prompts\[0\] must be a list that is not empty"),
        ([[{"role": "alien", "content": "q"}]], {}, r"prompts\[0\]\[0\]: unknown role 'alien'"),
        (["q", 3], {}, r"prompts\[1\]: expected a text or a list of messages, got 3"),
        ([CHAT], {"chat": False}, r"prompts\[0\]: expected a text, got a conversation; leave chat at True"),
    ],
)
def test_what_is_no_prompt_is_refused(answer, prompts, options, message):
    with pytest.raises(ConfigError, match=message):
        answer(prompts, **options)


def test_half_of_a_surrogate_pair(answer, monkeypatch):
    with pytest.raises(DataError, match=r"the prompt: .* \\udcff, half of a surrogate pair"):
        answer(["a\udcff"])
    with pytest.raises(ConfigError, match=r"^--prompt: .* \\udcff, half of a surrogate pair"):
        command.main(["--model", "nowhere", "--prompt", "q", "--prompt", "a\udcff"])
    monkeypatch.setattr("sys.stdin", io.StringIO("q\na\udcff\n"))
    with pytest.raises(DataError, match=r"^standard input: .* \\udcff, half of a surrogate pair"):
        command.main(["--model", "nowhere", "--file", "-"])


def test_a_conversation_is_encoded_as_in_training():
    encoder = Encoder(Model().tokenizer)
    assert encoder.encode_prompt(CHAT) == text.encode_prompts(encoder, [CHAT], chat=True)[0]


@pytest.mark.parametrize(
    ("given", "named"), [(None, []), ("{}", []), ('{"eos_token_id": 5}', [5]), ('{"eos_token_id": [5, 7, 5]}', [5, 7])]
)
def test_answers_end_where_the_folder_says_too(given, named, tmp_path, monkeypatch):
    model = Model(tmp_path)
    if given is not None:
        (tmp_path / "generation_config.json").write_text(given)
    seen = []
    monkeypatch.setattr(text, "generate", lambda model, prompts, **options: seen.append(options) or prompts)
    text.answer(model, ["q"])
    assert list(seen[0]["stop_tokens"]) == [*Encoder(model.tokenizer).stop_tokens(), *named]


@pytest.mark.parametrize("given", ['{"eos_token_id": "</s>"}', '{"eos_token_id": [-1]}', '{"eos_token_id": true}', "["])
def test_a_generation_config_that_says_something_else_is_named(given, tmp_path):
    (tmp_path / "generation_config.json").write_text(given)
    with pytest.raises(ConvertError, match=r"generation_config.json: (eos_token_id: expected a token id or|.*JSON)"):
        text.answer(Model(tmp_path), ["q"])
