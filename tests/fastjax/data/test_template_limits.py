"""Templates that fail, recurse, allocate or never end: one sentence in a short time and little memory."""

import json
import time

import pytest

from fastjax.data import ChatRecord, Encoder, parse_row
from fastjax.data.responses import Conversation
from fastjax.data.template import ChatTemplate
from fastjax.errors import ConfigError, DataError
from tests.support import tokenizers as made
from tests.support.data import uncached

CHAT = [{"role": "user", "content": "a\tb"}, {"role": "assistant", "content": "c"}]
ENDLESS = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "loops that write": "{% for a in range(99999) %}{% for b in range(99999) %}some text {% endfor %}{% endfor %}",
    "a macro that calls itself": "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "a macro that calls itself twice": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
    "{{ f(60) }}",
    "a loop that calls itself": "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
    "a block within itself": "{% block a %}{{ self.a() }}{% endblock %}",
    "sums of lists": "{% set n = namespace(l=[[0]] * 9999) %}{% for i in range(9999) %}"
    "{{ n.l | sum(start=[]) | length }}{% endfor %}",
}
LARGE = {
    "a long range": "{% for a in range(10**9) %}{% endfor %}",
    "a product": "{{ 'a' * 10**10 }}",
    "a list": "{{ ([0] * 10**10) | length }}",
    "a reflected product": "{{ 10**10 * 'a' }}",
    "a power": "{{ 10**(10**10) }}",
    "sums": "{% set n = namespace(s='a') %}{% for i in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "joined": "{% set n = namespace(s='a') %}{% for i in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
    "slices": "{% set n = namespace(l=[], s='a' * 10**6) %}{% for i in range(9999) %}"
    "{% set n.l = n.l + [n.s[i:]] %}{% endfor %}",
    "center": "{{ 'a' | center(10**10) }}",
    "ljust": "{{ 'a'.ljust(10**10) }}",
    "zfill": "{{ 'a'.zfill(10**10) }}",
    "expandtabs": "{{ messages[0].content.expandtabs(10**10) }}",
    "indent": "{{ 'a\n\nb' | indent(10**10, blank=true) }}",
    "tojson": "{{ messages | tojson(indent=10**10) }}",
    "replace": "{{ ('a' * 10**5).replace('a', 'b' * 10**5) }}",
    "the filter replace": "{{ ('a' * 10**5) | replace('a', 'b' * 10**5) }}",
    "join": "{{ ('b' * 10**5).join(['a'] * 10**4) }}",
    "the filter join": "{{ (['a'] * 10**4) | join('b' * 10**5) }}",
    "joined repeats": "{{ (['b' * 10**5] * 10**4) | join }}",
    "translate": "{{ ('a' * 10**5).translate({97: 'b' * 10**5}) }}",
    "a format's width": "{{ '%999999999999s' % 'a' }}",
    "a format's width as an argument": "{{ '%*s' % (10**10, 'a') }}",
    "format": "{{ '{:>9999999999}'.format('a') }}",
    "format's argument": "{{ '{:>{}}'.format('a', 10**10) }}",
    "the filter format": "{{ '%9999999999s' | format('a') }}",
    "repeated in a format": "{{ ('%(a)s' * 10**5) % {'a': 'b' * 10**5} }}",
    "batch": "{{ [1] | batch(10**10, 0) | list }}",
    "slice": "{{ [1] | slice(10**10) | list }}",
    "split": "{{ ('a ' * 10**5).split(' ') | length }}",
    "characters": "{{ ('a' * 10**5) | list | length }}",
    "lists within lists": "{% set n = namespace(l=[1]) %}{% for i in range(99) %}{% set n.l = [n.l] * 99 %}{% endfor %}"
    "{{ n.l | tojson }}",
    "lists written": "{% set n = namespace(l=[1]) %}{% for i in range(9) %}{% set n.l = [n.l] * 99 %}{% endfor %}"
    "{{ n.l }}",
    "pairs of pairs": "{% set n = namespace(l=[1], m=[1]) %}{% for i in range(60) %}{% set n.l = [n.l, n.l] %}"
    "{% set n.m = [n.m, n.m] %}{% endfor %}{{ n.l == n.m }}",
    "pairs as keys": "{% set n = namespace(t=1) %}{% for i in range(60) %}{% set n.t = (n.t, n.t) %}{% endfor %}"
    "{{ {n.t: 1} }}",
    "pairs in mappings": "{% set n = namespace(l={}) %}{% for i in range(60) %}{% set n.l = dict(a=n.l, b=n.l) %}"
    "{% endfor %}{{ n.l in [n.l] }}",
    "words": "{{ ('ab ' * 10**5) | wordwrap(1) }}",
    "a macro's text": "{% macro f() %}{% for i in range(99999) %}{{ 'a' * 9999 }}{% endfor %}{% endmacro %}{{ f() }}",
    "a block's text": "{% set s %}{% for i in range(99999) %}" + "a" * 9999 + "{% endfor %}{% endset %}{{ s }}",
    "lipsum": "{{ lipsum(10**10) }}",
}
FAILING = {
    "divides by zero": ("{{ 1 / 0 }}", "division by zero"),
    "takes the remainder": ("{{ 1 % 0 }}", "by zero"),
    "too large for a float": ("{{ 10.0 ** 400 }}", "out of range|too large"),
    "an import": ("{% import 'a' as b %}", "loader"),
    "a number of many digits": ("{{ ('9' * 5000) | int }}{{ 10 ** 5000 }}", "limit"),
    "a long message": ("{{ raise_exception('no ' * 1000) }}", r"no no .*\.\.\."),
}


def refused(source: str, *, messages=CHAT) -> str:
    """What a template's refusal says; it comes soon and in one line."""
    start = time.thread_time()
    with pytest.raises(DataError, match=r"^rows:3: the chat template refuses the conversation: ") as caught:
        Conversation(ChatTemplate(source, {}), messages, "rows:3").learnt()
    assert time.thread_time() - start < 5
    assert len(str(caught.value)) < 400 and "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", ENDLESS)
def test_templates_that_never_end(name, monkeypatch):
    monkeypatch.setattr("fastjax.data.template_limits.SECONDS", 0.2)
    refused(ENDLESS[name])


@pytest.mark.parametrize("name", LARGE)
def test_templates_that_allocate(name, monkeypatch):
    monkeypatch.setattr("fastjax.data.template_limits.CHARACTERS", 3 * 10**6)
    import tracemalloc

    tracemalloc.start()
    try:
        refused(LARGE[name])
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 60e6


@pytest.mark.parametrize("name", FAILING)
def test_templates_that_fail(name):
    source, message = FAILING[name]
    with pytest.raises(DataError, match=message):
        ChatTemplate(source, {}).render(CHAT, "rows:3")
    refused(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ " + "(" * 9999,
        "{{ " + "[" * 9999 + "]" * 9999 + " }}",
        "{{ 1" + " - 1" * 9999 + " }}",
        "{{ " + "9" * 9999 + " }}",
    ]
    + ["{% for a in b %}" * 40 + "{% endfor %}" * 40, "a" * (10**6 + 1)],
    ids=["parentheses", "lists", "a difference", "digits", "loops", "long"],
)
def test_sources_that_cannot_be_compiled(source):
    with pytest.raises(ConfigError, match="the chat template") as caught:
        ChatTemplate(source, {})
    assert len(str(caught.value)) < 400


def test_what_templates_do_with_long_conversations_is_within_the_limits():
    source = (
        "{% set n = namespace(text='') %}{% for m in messages %}{% set n.text = n.text + m.content | trim %}"
        "{{ m.role ~ ': ' ~ m.content.split('\n')[0] }}{{ m | tojson(indent=2) }}{{ '%-20s|' % m.role }}"
        "{{ '{:>8}'.format(m.role) }}{{ messages[loop.index0:] | length }}{% endfor %}{{ n.text | length }}"
    )
    chat = [{"role": "user", "content": "some words to say\n" * 60}] * 200
    text = ChatTemplate(source, {}).render(chat, "x").text
    assert text.endswith(str(200 * (60 * 18 - 1)))


def nested(depth):
    value = "a"
    for _ in range(depth):
        value = {"a": value}
    return value


def test_tools_nested_deep():
    tools = [{"type": "function", "function": nested(20_000)}]
    record = parse_row({"messages": CHAT, "tools": tools}, "rows:3")
    template = ChatTemplate("{{ tools | tojson }}", {})
    with pytest.raises(DataError, match=r"^rows:3: the chat template refuses the conversation: .* nested too deep"):
        template.render(record.messages, "rows:3", {"tools": record.tools})
    tokenizer = made.byte_level()
    tokenizer.chat_template = "{{ tools | tojson }}"
    for kind in ("control", "text"):
        with pytest.raises(DataError, match=r"^rows:3: .*nested too deep"):
            list(Encoder(tokenizer, uncached(special_tokens=kind)).encode([record._replace(where="rows:3")]))
    for row in (
        {"messages": CHAT, "tools": "[" * 20_000},
        {"messages": [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": "[" * 20_000}]}]},
        {"messages": nested(20_000)},
        {"messages": [{"role": "user", "content": nested(20_000)}]},
        {"conversations": [{"from": "function_call", "value": "[" * 20_000}]},
    ):
        with pytest.raises(DataError, match=r"^rows:3: ") as caught:
            parse_row(row, "rows:3")
        assert len(str(caught.value)) < 300


@pytest.mark.parametrize("role", [[], {}, ["user"], 3, None, True, "x" * 9999])
def test_roles_and_speakers_that_are_none(role):
    for row in (
        {"conversations": [{"from": role, "value": "a"}]},
        {"messages": [{"role": role, "content": "a"}]},
        {"conversations": [{"role": role, "content": "a"}]},
    ):
        with pytest.raises(DataError, match=r"^rows:3: .*\[0\]: unknown (speaker|role) ") as caught:
            parse_row(row, "rows:3")
        assert len(str(caught.value)) < 400


def test_half_of_a_surrogate_pair():
    tokenizer = made.byte_level()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{{ tools | tojson if tools }}{% endfor %}"
    rows = [
        '{"text": "a\\ud800b"}',
        '{"prompt": "a", "completion": "\\udfff"}',
        '{"messages": [{"role": "user", "content": "\\ud83d"}]}',
        '{"messages": [{"role": "user", "content": "q"}], "tools": [{"name": "\\udc00"}]}',
    ]
    for text in rows:
        for kind in ("control", "text"):
            encoder = Encoder(tokenizer, uncached(special_tokens=kind))
            with pytest.raises(DataError, match=r"^rows:3: .*\\ud[89a-f][0-9a-f]{2}, half of a surrogate pair"):
                list(encoder.encode([parse_row(json.loads(text), "rows:3")]))
    list(Encoder(tokenizer).encode([parse_row(json.loads('{"text": "\\ud83d\\ude00"}'), "rows:3")]))
    with pytest.raises(DataError, match=r"^the prompt: .*\\ud800, half of a surrogate pair"):
        Encoder(tokenizer).encode_prompt([{"role": "user", "content": "\ud800"}])
    with pytest.raises(DataError, match=r"^the prompt: .*\\ud800, half of a surrogate pair, behind 'ab'; remove it"):
        Encoder(tokenizer).encode_beginning("ab\ud800")
    long = ChatRecord([{"role": "user", "content": "x" * 9999 + "\ud800" + "y" * 9999}], "rows:3")
    with pytest.raises(DataError) as caught:
        list(Encoder(tokenizer).encode([long]))
    assert len(str(caught.value)) < 300
