import pytest

from fastjax.data.template import ChatTemplate
from fastjax.errors import ConfigError, DataError

CHAT = [
    {"role": "user", "content": "  a <b> & 'c' "},
    {"role": "assistant", "content": "é\n"},
    {"role": "user", "content": ""},
    {"role": "assistant", "content": "d"},
]
EVERY_FEATURE = (
    "{%- set ns = namespace(count=0) -%}\n"
    "   {% for m in messages %}\n"
    "  {% if m.role == 'system' %}{% continue %}{% endif %}\n"
    "{% set ns.count = ns.count + 1 %}{{ ns.count }}{{ m | tojson(indent=1) }}{{ dict(a=1) | tojson }}\n"
    "{% generation %}{{ m.content }}{% endgeneration %}{{ eos_token }}{% endfor %}{{ strftime_now('%Y') }}"
)


@pytest.mark.parametrize("name", ["chatml", "llama3", "llama2", "plain", "every feature"])
@pytest.mark.parametrize("prompt", [False, True])
def test_renders_what_transformers_renders(make_tokenizer, templates, name, prompt):
    tokenizer = make_tokenizer(templates.get(name, EVERY_FEATURE))
    chat = CHAT[:3] if prompt else CHAT
    expected = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=prompt)
    assert ChatTemplate.from_tokenizer(tokenizer).render(chat, "x", add_generation_prompt=prompt) == expected


@pytest.mark.parametrize(
    ("name", "responses"),
    [
        ("chatml", ["é\n<|im_end|>\n", "d<|im_end|>\n"]),
        ("llama3", ["é<|eot_id|>", "d<|eot_id|>"]),
        ("llama2", [" é\n</s>", " d</s>"]),
        ("plain", ["é\n\n\n", "d\n\n"]),
    ],
)
def test_responses_are_where_the_template_puts_them(make_tokenizer, name, responses):
    rendered = ChatTemplate.from_tokenizer(make_tokenizer(name)).render_with_responses(CHAT, "x")
    assert [rendered.text[start:end] for start, end in rendered.responses] == responses


def test_a_response_that_also_stands_in_the_question_is_not_confused(make_tokenizer):
    chat = [
        {"role": "user", "content": "d<|im_end|>\n<|im_start|>assistant\nd"},
        {"role": "assistant", "content": "d"},
    ]
    rendered = ChatTemplate.from_tokenizer(make_tokenizer("chatml")).render_with_responses(chat, "x")
    assert rendered.responses == [(len(rendered.text) - len("d<|im_end|>\n"), len(rendered.text))]


def test_a_template_that_rewrites_the_past_is_refused(make_tokenizer):
    template = ChatTemplate.from_tokenizer(make_tokenizer("forgetful"))
    chat = [CHAT[0], {"role": "assistant", "content": "thought|answer"}, *CHAT[2:]]
    with pytest.raises(DataError, match=r"^rows\.jsonl:7: the chat template changes the text up to messages\[1\]"):
        template.render_with_responses(chat, "rows.jsonl:7")
    assert len(template.render_with_responses(chat[:2], "x").responses) == 1


def test_a_refusal_by_the_template_names_the_row(make_tokenizer):
    template = ChatTemplate.from_tokenizer(make_tokenizer("llama2"))
    with pytest.raises(DataError, match="rows.jsonl:7: the chat template refuses .*: only user and assistant"):
        template.render([{"role": "system", "content": "a"}], "rows.jsonl:7")


def test_a_tokenizer_without_template_is_a_configuration_error(make_tokenizer):
    with pytest.raises(ConfigError, match="has no chat template"):
        ChatTemplate.from_tokenizer(make_tokenizer(None))
    with pytest.raises(ConfigError, match="not valid Jinja"):
        ChatTemplate.from_tokenizer(make_tokenizer("{% if %}"))


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% set ns = namespace(__x__=1) %}",
        "{{ dict.__class__.__bases__ }}",
        "{{ ''.format.__globals__ }}",
    ],
)
def test_a_template_stays_in_its_sandbox(source):
    with pytest.raises(DataError, match="refuses"):
        assert ChatTemplate(source, {}).render([{"role": "user", "content": "a"}], "x") == ""
        raise DataError("refuses: nothing was rendered")
