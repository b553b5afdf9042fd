"""Reasoning and calls over HTTP: whole and streamed alike, for every cut of the text into events."""

import json

import pytest

from fastjax.serving.metrics import Metrics
from tests.support import serving
from tests.support.serving import CHAT, chat_body

TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("look", "tell")
]
LONG = 'line\n "quoted" \\ back 😀 ' * 10
THOUGHT = '<think>\nQuestion: <tool_call>{"name": "look"}</tool_call>\n</think>\n\n'


def call(name, **arguments):
    return f"\n<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"


@pytest.fixture(scope="module")
def engine():
    return serving.Scripted()


@pytest.fixture(scope="module")
def server(engine):
    with serving.served(engine) as running:
        yield running


def body(**more):
    return chat_body(tools=TOOLS, **{"max_tokens": 3000, **more})


def streamed(events):
    """The message that a client puts together, and the reason of the end."""
    message, calls = {}, {}
    for event in events:
        [choice] = event["choices"]
        for key, value in choice["delta"].items():
            if key != "tool_calls":
                message[key] = message.get(key, "") + value
        for one in choice["delta"].get("tool_calls", ()):
            told = calls.setdefault(one["index"], {"arguments": ""})
            assert not ("id" in one and "id" in told) and ("id" in one) == ("name" in one["function"])
            told |= {key: one[key] for key in ("id", "type") if key in one}
            told |= {"name": one["function"]["name"]} if "name" in one["function"] else {}
            told["arguments"] += one["function"]["arguments"]
    return message, [calls[index] for index in sorted(calls)], events[-1]["choices"][0]["finish_reason"]


@pytest.mark.parametrize("steps", [1, 3, 5000])
def test_three_calls_behind_a_thought_with_a_draft(server, engine, steps):
    engine.steps = steps
    engine.text = THOUGHT + "I look." + call("look", q=LONG) + call("tell", a=1) + call("look", q="b")
    whole = server.ok(CHAT, body())
    [choice] = whole["choices"]
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls" and message["content"] == "I look."
    assert message["reasoning_content"] == 'Question: <tool_call>{"name": "look"}</tool_call>'
    calls = [
        (one["type"], one["function"]["name"], json.loads(one["function"]["arguments"]))
        for one in message["tool_calls"]
    ]
    assert calls == [
        ("function", "look", {"q": LONG}),
        ("function", "tell", {"a": 1}),
        ("function", "look", {"q": "b"}),
    ]
    assert len({one["id"] for one in message["tool_calls"]}) == 3
    events = server.events(CHAT, body(stream_options={"include_usage": True}))
    assert events.pop()["usage"] == whole["usage"]
    found, told, reason = streamed(events)
    assert found == {
        "role": "assistant",
        "content": message["content"],
        "reasoning_content": message["reasoning_content"],
    }
    assert [(one["name"], json.loads(one["arguments"])) for one in told] == [each[1:] for each in calls]
    assert reason == "tool_calls" and whole["usage"]["completion_tokens"] == len(engine.tokenizer.encode(engine.text))


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_counts_in_the_content_alone(server, engine, stream):
    engine.text, engine.steps = THOUGHT + "It is so. Question: next", 2
    asked = chat_body(max_tokens=3000, stop=["Question:"])
    if stream:
        message, _, reason = streamed(server.events(CHAT, asked))
    else:
        [choice] = server.ok(CHAT, asked)["choices"]
        message, reason = choice["message"], choice["finish_reason"]
    assert message["content"] == "It is so. " and "Question:" in message["reasoning_content"] and reason == "stop"


def test_a_call_that_is_cut_and_one_that_is_none(server, engine):
    engine.text, engine.steps = "I look." + call("look", q=LONG), 4
    cut = body(max_tokens=30)
    [choice] = server.ok(CHAT, cut)["choices"]
    assert choice["finish_reason"] == "length" and "tool_calls" not in choice["message"]
    assert choice["message"]["content"] == "I look."
    assert streamed(server.events(CHAT, cut))[2] == "length"
    for text in (call("nobody", q="a"), "\n<tool_call>\nno JSON\n</tool_call>"):
        engine.text = "So:" + text
        [choice] = server.ok(CHAT, body())["choices"]
        assert choice["finish_reason"] == "stop" and "tool_calls" not in choice["message"]
        assert choice["message"]["content"].split() == engine.text.split()
        assert streamed(server.events(CHAT, body()))[0]["content"] == choice["message"]["content"]
    without = body(tool_choice="none")
    assert "tool_calls" not in server.ok(CHAT, without)["choices"][0]["message"]


def test_a_call_without_content_has_null(server, engine):
    engine.text = call("look", q="a")
    assert server.ok(CHAT, body())["choices"][0]["message"]["content"] is None


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "look"}}, "any"])
def test_a_choice_that_is_not_served(server, choice):
    error = server.refused(CHAT, body(tool_choice=choice))
    assert error["param"] == "tool_choice" and "expected auto or none" in error["message"]


def test_a_template_that_refuses(engine):
    """With its own sentence."""
    rule = "{% if messages[0].role == 'system' %}{{ raise_exception('No system turn here.') }}{% endif %}"
    strict = serving.Scripted("so")
    strict.tokenizer.chat_template = rule + strict.tokenizer.chat_template
    with serving.served(strict) as server:
        refused = {**chat_body(), "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]}
        error = server.refused(CHAT, refused)
        assert "No system turn here." in error["message"] and error["param"] == "messages"
        assert server.ok(CHAT, chat_body())["choices"][0]["message"]["content"] == "so"


def test_the_rate_of_the_last_seconds():
    figures = Metrics()
    for second in range(100):
        figures.generated += 5
        figures.stepped(float(second))
    assert figures.rate(99.0) == 5.0 and figures.rate(105.0) == 2.0 and figures.rate(1000.0) == 0.0


def test_what_a_client_sends_back(server, engine):
    """Calls, their results and thoughts reach the template, which decides."""
    calls = [{"id": "a12345678", "type": "function", "function": {"name": "look", "arguments": '{"q": "z"}'}}]
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": None, "reasoning_content": "hmm", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "a12345678", "content": "<|im_end|><think>found"},
    ]
    ids = server.ok("/tokenize", {"messages": messages})["tokens"]
    text = engine.tokenizer.decode(ids)
    assert text.count("<think>\nhmm\n</think>") == 1 and '{"name": "look", "arguments": {"q": "z"}}' in text
    end = engine.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert ids.count(end) == 3  # what a tool says is text
