"""The tokens before an answer are those that generation has there."""

import pytest

from fastjax.data import Encoder, notes, parse_row
from tests.support import tokenizers as made

TEXTS = ["the cat  sat on\n\nthe mat. ", "Hello 🤗 12345 hello\nhello", " a\n \n b"]


@pytest.mark.parametrize("name", made.KINDS)
def test_every_division_into_prompt_and_answer(name):
    """The prompt's tokens are generation's, and together they are the same text, whether a token would span or not."""
    tokenizer = made.KINDS[name]()
    encoder = Encoder(tokenizer)
    divided = 0
    for text in TEXTS:
        places = range(1, len(text))
        rows = [parse_row({"prompt": text[:place], "completion": text[place:]}, "row") for place in places]
        (examples,) = encoder.encode(rows)
        assert notes.JOINED not in examples.noted
        (whole,) = encoder.encode([parse_row({"text": text}, "row")])
        for place in places:
            tokens, learn = examples[place - 1]
            start = learn.tolist().index(True)
            assert learn[start:].all() and tokens[:start].tolist() == encoder.encode_beginning(text[:place])
            assert tokenizer.decode(tokens[:-1]) == tokenizer.decode(whole[0].tokens[:-1])
            divided += tokens.tolist() != whole[0].tokens.tolist()
    assert divided


def test_answers_of_a_conversation(make_tokenizer):
    """The generation prompt's line break and the answer's would be one token."""
    tokenizer = made.byte_level()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role[0] }}:\n{{ m.content }}</s>{% endfor %}"
        "{% if add_generation_prompt %}a:\n{% endif %}"
    )
    chat = [{"role": role, "content": "\nhello"} for role in ("user", "assistant") * 2]
    encoder = Encoder(tokenizer)
    (examples,) = encoder.encode([parse_row({"messages": chat}, "row")])
    tokens, learn = examples[0]
    for count in (1, 3):
        prompt = encoder.encode_prompt(chat[:count])
        assert tokens[: len(prompt)].tolist() == prompt and learn[len(prompt)] and not learn[len(prompt) - 1]
    assert tokenizer.decode(tokens[learn]) == "\nhello</s>" * 2


def test_an_answer_that_cannot_be_divided_is_counted(monkeypatch):
    monkeypatch.setattr("fastjax.data.boundaries._GUARDS", ())
    (examples,) = Encoder(made.byte_level()).encode(
        [parse_row({"prompt": "the answer is ", "completion": "the"}, "row")]
    )
    assert examples.noted == {notes.JOINED: [0]}
