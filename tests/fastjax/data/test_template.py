import pytest

from fastjax.data.responses import Conversation
from fastjax.data.template import REASONING, ChatTemplate
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

FILTERS = (
    "{% macro say(m, n=1) %}{{ n ~ m.role|upper ~ ': ' }}{{ caller() if caller }}{% endmacro %}"
    "{% for m in messages[::-1] %}{% call say(m, loop.index0 + 1) %}{{ 'x' * 2 }}{% endcall %}"
    "{{ m.content.strip().split('c')[-1].lstrip('\\n') + '-' + m.content | trim }}"
    "{{ m.content | replace('a', 'bb') }}{{ '%s/%5d' % (m.role, loop.index) }}{{ '{}:{:>4}'.format(m.role, 1) }}"
    "{{ '%s' | format(m.role) }}{% if 'a' in m.content and m.content is string %}{{ loop.length - 1 }}{% endif %}"
    "{{ 7 // 2 * 1.5 ** 2 % 4 }}{% endfor %}{{ messages | map(attribute='role') | unique | list | join(', ') }}"
    "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}{{ messages[0] | items | list }}"
    "{{ messages | groupby('role') | length }}{{ [1, [2]] | string }}{{ ['a'] + ['b'] }}{{ [1, 2] | sum }}"
    "{{ messages | tojson(indent=2, sort_keys=true) | indent(2) }}{{ [3, 1] | sort | first }}{{ nope | default('d') }}"
    "{{ (messages | last).content | e }}{{ 'a-b' | title | center(9) }}{{ [1, 2, 3] | batch(2, 0) | list }}"
    "{% set s %}{{ 1 ~ 2 }}{% endset %}{{ s }}{{ messages | rejectattr('content') | list | length }}"
    "{{ {'b': 1, 'a': 2} | dictsort }}{{ 'a b' | wordcount }}{{ 2.5 | round | int }}{% set a, b = 1, (2, 3) %}"
    "{{ a, b }}{% filter upper %}abc{% endfilter %}{% block b %}{{ messages | length }}{% endblock %}{{ self.b() }}"
    "{{ range(3) | list }}{{ cycler(1, 2).next() }}{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{% endfor %}"
)


@pytest.mark.parametrize("name", ["chatml", "llama3", "llama2", "plain", "every feature", "filters"])
@pytest.mark.parametrize("prompt", [False, True])
def test_renders_what_transformers_renders(make_tokenizer, templates, name, prompt):
    tokenizer = make_tokenizer({"every feature": EVERY_FEATURE, "filters": FILTERS}.get(name) or templates[name])
    chat = CHAT[:3] if prompt else CHAT
    expected = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=prompt)
    assert ChatTemplate.from_tokenizer(tokenizer).render(chat, "x", add_generation_prompt=prompt).text == expected


@pytest.mark.parametrize("given", [*REASONING, "two names", "none"])
@pytest.mark.parametrize("read", ["reasoning_content", "thinking"])
def test_reasoning_is_read_under_every_name(make_tokenizer, read, given):
    """As transformers gives it to templates, under two names; a response has it too."""
    source = "{% for m in messages %}{{ m.role }}{% if m.READ is defined %}<{{ m.READ }}>{% endif %}{{ m.content }}"
    tokenizer = make_tokenizer(source.replace("READ", read) + "\n{% endfor %}")
    fields = {"two names": {"reasoning": "a", "thinking": "b"}, "none": {}}.get(given, {given: "because"})
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", **fields}]
    template = ChatTemplate.from_tokenizer(tokenizer)
    text = template.render(chat, "x").text
    assert text == tokenizer.apply_chat_template(chat, tokenize=False)
    assert ("because" in text) == (given in REASONING)


def test_of_several_templates_the_one_for_tools_has_them(make_tokenizer):
    turns = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    turns += "{% if add_generation_prompt %}assistant: {% endif %}"
    sources = {"default": turns, "tool_use": "TOOLS {{ tools | tojson }}\n" + turns, "rag": "no"}
    tokenizer = make_tokenizer("plain")
    tokenizer.chat_template = sources
    template, tools = ChatTemplate.from_tokenizer(tokenizer), [{"type": "function", "function": {"name": "f"}}]
    for given in (tools, None):
        expected = tokenizer.apply_chat_template(CHAT, tools=given, tokenize=False)
        (rendered,) = Conversation(template, CHAT, "x", tools=given).learnt()
        assert rendered.text == expected and ("TOOLS" in expected) == bool(given)
        assert [rendered.text[start:end] for start, end in rendered.responses] == ["é\n\n", "d\n"]
    tokenizer.chat_template = {"tool_use": turns, "rag": "no"}
    with pytest.raises(ConfigError, match="chat templates named rag, tool_use: expected one named default; give"):
        ChatTemplate.from_tokenizer(tokenizer)


def test_a_response_that_also_stands_in_the_question_is_not_confused(make_tokenizer):
    chat = [
        {"role": "user", "content": "d<|im_end|>\n<|im_start|>assistant\nd"},
        {"role": "assistant", "content": "d"},
    ]
    (rendered,) = Conversation(ChatTemplate.from_tokenizer(make_tokenizer("chatml")), chat, "x").learnt()
    assert rendered.responses == [(len(rendered.text) - len("d<|im_end|>\n"), len(rendered.text))]


S, E = "<|im_start|>", "<|im_end|>"
TURN = "{% for m in messages %}<|im_start|>{{ m.role }}\n"
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
#: After the templates of supported models.
SHAPES = {
    # Qwen3: an empty thought before the last answer, and none before earlier ones.
    "a thought": TURN + "{% if m.role == 'assistant' and loop.last %}<think></think>{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}" + PROMPT,
    # Phi-3: EOS where there is no generation prompt.
    "closed": TURN + "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% else %}</s>{% endif %}",
    # gpt-oss: another token ends the last turn.
    "two ends": TURN
    + "{{ m.content }}{{ '</s>' if loop.last and m.role == 'assistant' else '<|im_end|>' }}{% endfor %}"
    + PROMPT,
    # R1-Distill: the generation prompt opens a thought, which the stored answer has not.
    "opened": TURN + "{{ m.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}",
    # gpt-oss: thoughts before a call stand until the answer does.
    "called": TURN
    + "{{ '<think>' ~ m.thinking ~ '</think>' if m.thinking and (loop.last or messages[-1].role == 'tool') "
    "}}{{ m.content }}<|im_end|>\n{% endfor %}" + PROMPT,
}
TWO = [{"role": role, "content": text} for role, text in (("user", "q"), ("assistant", "a"), ("user", "r"))]
TWO += [{"role": "assistant", "content": "b"}]


@pytest.mark.parametrize(
    ("shape", "learnt", "elsewhere"),
    [
        ("a thought", [["<think></think>a<|im_end|>\n"], ["<think></think>b<|im_end|>\n"]], 0),
        ("closed", [["a<|im_end|>", "b<|im_end|>"]], 0),
        ("two ends", [["a<|im_end|>", "b</s>"]], 0),
        ("opened", [["a<|im_end|>\n", "b<|im_end|>\n"]], 2),
    ],
)
def test_answers_are_learnt_as_generation_sees_them(make_tokenizer, shape, learnt, elsewhere):
    """Between the generation prompt and the end of the turn, each in the text that generation continues."""
    tokenizer = make_tokenizer(SHAPES[shape])
    template = ChatTemplate.from_tokenizer(tokenizer)
    found = Conversation(template, TWO, "x").learnt()
    assert [[chat.text[start:end] for start, end in chat.responses] for chat in found] == learnt
    assert sum(chat.elsewhere for chat in found) == elsewhere
    assert found[-1].text == tokenizer.apply_chat_template(TWO, tokenize=False)
    assert [chat.text for chat in found[:-1]] == [template.render(TWO[:2], "x").text] * (len(found) - 1)
    for end, index in ((2, 0), (4, -1)):  # all that generation continues stands before the answer
        prompt = template.render(TWO[: end - 1], "x", add_generation_prompt=True).text
        chat = found[index]
        start = chat.responses[index][0]
        assert chat.text[:start] == prompt if not elsewhere else prompt.startswith(chat.text[:start])
    (last,) = Conversation(template, TWO, "x").learnt(last=True)
    assert [last.text[start:end] for start, end in last.responses] == [learnt[-1][-1]]


def test_an_answer_that_is_followed_by_the_user_has_a_row_of_its_own_where_it_is_rewritten(make_tokenizer):
    template = ChatTemplate.from_tokenizer(make_tokenizer(SHAPES["a thought"]))
    (alone,) = Conversation(template, TWO[:3], "x").learnt()
    assert alone.text == template.render(TWO[:2], "x").text
    alone, whole = Conversation(template, TWO[:3], "x").learnt(roles=("assistant", "user"))
    assert alone.text == template.render(TWO[:2], "x").text and not alone.others
    assert [whole.text[start:end] for start, end in whole.others] == ["q<|im_end|>\n", "r<|im_end|>\n"]
    assert not whole.responses


def test_an_answer_before_which_the_past_is_rewritten_stands_behind_what_generation_sees(make_tokenizer):
    template = ChatTemplate.from_tokenizer(make_tokenizer(SHAPES["called"]))
    chat = [TWO[0], {"role": "assistant", "content": "call", "thinking": "t"}, {"role": "tool", "content": "x"}]
    chat += [{"role": "assistant", "content": "a", "thinking": "u"}]
    found = Conversation(template, chat, "x").learnt()
    learnt = [[one.text[start:end] for start, end in one.responses] for one in found]
    assert learnt == [["<think>t</think>call<|im_end|>\n"], ["<think>u</think>a<|im_end|>\n"]]
    for one, count in zip(found, (1, 3), strict=True):
        assert one.text[: one.responses[0][0]] == template.render(chat[:count], "x", add_generation_prompt=True).text
        assert not one.elsewhere


@pytest.mark.parametrize("before", ["{{ messages[0].role ~ '!' }}", "{{ 'assistant!' if messages }}"])
def test_an_answer_may_stand_first_whatever_the_template_writes_with_the_first_message(make_tokenizer, before):
    template = ChatTemplate.from_tokenizer(make_tokenizer(before + SHAPES["two ends"]))
    (found,) = Conversation(template, [TWO[1], *TWO], "x").learnt()
    assert found.text.startswith("assistant!<|im_start|>assistant\na") and not found.elsewhere
    assert [found.text[start:end] for start, end in found.responses] == ["a<|im_end|>", "a<|im_end|>", "b</s>"]
    with pytest.raises(DataError, match="^x: the chat template refuses the conversation: list object has no"):
        template = ChatTemplate("{{ messages[0].role }}{% for m in messages %}{{ m.content }}{% endfor %}", {})
        Conversation(template, TWO[1:], "x").learnt()


@pytest.mark.parametrize("mark", ["", "generation"])
def test_a_turn_that_is_not_written_is_refused(make_tokenizer, mark):
    """Its end alone would be learnt; an empty answer is one, and one that is not learnt may be anything."""
    said = "{{ m.content if m.content is not string }}{{ m.name }}<|im_end|>"
    if mark:
        marked = f"{{% generation %}}{said}{{% endgeneration %}}"
        said = f"{{% if m.role == 'assistant' %}}{marked}{{% else %}}{said}{{% endif %}}"
    template = ChatTemplate.from_tokenizer(make_tokenizer(TURN + said + "{% endfor %}" + PROMPT))
    call = [{"function": {"name": "f", "arguments": {}}}]
    for message, what in (
        ({"content": "a"}, "content"),
        ({"content": "", "tool_calls": call}, "tool calls"),
        ({"content": "", "thinking": "a"}, "thought"),
    ):
        chat = [TWO[0], {"role": "assistant", **message}]
        with pytest.raises(
            DataError, match=rf"^f:1: the chat template does not write the {what} of messages\[1\], so "
        ):
            Conversation(template, chat, "f:1").learnt()
        (left_out,) = Conversation(template, chat, "f:1").learnt(train=(None, False))
        assert not left_out.responses
    for message in ({"content": ""}, {"content": "a", "name": "n"}):
        (chat,) = Conversation(template, [TWO[0], {"role": "assistant", **message}], "f:1").learnt()
        assert [chat.text[start:end] for start, end in chat.responses] == [f"{message.get('name', '')}<|im_end|>"]


def test_a_template_that_rewrites_the_question_is_refused(make_tokenizer):
    template = ChatTemplate.from_tokenizer(
        make_tokenizer(
            "{% for m in messages %}{{ m.content ~ ('!' if add_generation_prompt and m.role == 'user') }}\n{% endfor %}"
        )
    )
    with pytest.raises(
        DataError, match=r"^rows\.jsonl:7: the chat template writes the text before messages\[1\] other"
    ):
        Conversation(template, TWO, "rows.jsonl:7").learnt()


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
        assert ChatTemplate(source, {}).render([{"role": "user", "content": "a"}], "x").text == ""
        raise DataError("refuses: nothing was rendered")
