"""A request that does not fit gets one error that names the field, before any byte of an answer."""

import json

import pytest

from tests.support.serving import CHAT, COMPLETIONS, LENGTH, chat_body, text_body

BAD_CHATS = [
    ({"temperature": -1}, "temperature: expected a number from 0 to 100, got -1"),
    ({"temperature": 1e6}, "temperature: expected a number from 0 to 100, got 1000000.0"),
    ({"temperature": "warm"}, "temperature: expected a number from 0 to 100, got 'warm'"),
    ({"top_p": -1}, "top_p: expected a number from 0 to 1 or null, got -1"),
    ({"repetition_penalty": 0}, "repetition_penalty: expected a number from 0.01 to 100, got 0"),
    ({"n": 10_000}, "n: expected an integer from 1 to 128, got 10000"),
    ({"n": 0}, "n: expected an integer from 1 to 128, got 0"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs: expected an integer from 0 to 20, got -1"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs: expected an integer from 0 to 20, got 21"),
    ({"top_logprobs": 2}, "top_logprobs: expected logprobs: true beside it, got none"),
    ({"logit_bias": {"9999": 1}}, "logit_bias: expected token ids from 0 to 259, got 9999"),
    ({"logit_bias": {"word": 1}}, "logit_bias: expected token ids as keys, got 'word'"),
    ({"logit_bias": {"7": 1e9}}, "logit_bias[7]: expected a number from -100 to 100, got 1000000000.0"),
    ({"logit_bias": {"7": -1e9}}, "logit_bias[7]: expected a number from -100 to 100, got -1000000000.0"),
    ({"stop": ""}, "stop: expected a text or a list of texts that are not empty, got ''"),
    ({"stop": [1]}, "stop: expected a text or a list of texts that are not empty, got [1]"),
    ({"stop": ["a"] * 17}, "stop: expected at most 16 texts, got 17"),
    ({"max_tokens": 0}, "max_tokens: expected at least 1, got 0"),
    ({"max_tokens": 4, "max_completion_tokens": 5}, "max_tokens: expected equal values of both names, got max_tokens 4 "
     "and max_completion_tokens 5"),
    ({"messages": []}, "messages: expected at least one message, got none"),
    ({"messages": "hi"}, "messages: expected a list of objects, got 'hi'"),
    ({"response_format": {"type": "json_schema"}}, "response_format: is not served; expected {'type': 'text'}, got "
     "{'type': 'json_schema'}"),
    ({"chat_template": "x"}, "chat_template: is not served; leave it out, got 'x'"),
    ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs: expected variables of the model's "
     "template, got another chat_template"),
    ({"temprature": 1}, "temprature: unknown; did you mean temperature?"),
    ({"best_of": 3}, "best_of: is not served; expected 1, got 3"),
    ({"stream_options": 5}, "stream_options: expected an object, got 5"),
    ({"tools": [{"type": "x"}]}, "tools[0]: expected a function with a name, got {'type': 'x'}"),
    ({"tool_choice": "required"}, "tool_choice: expected auto or none, got 'required': a call cannot be forced; leave "
     "it out, and ask for the call in a message"),
    ({"tool_choice": "auto"}, "tool_choice: expected tools beside it, got none"),
]  # fmt: skip


@pytest.mark.parametrize(("bad", "message"), BAD_CHATS, ids=lambda value: str(value)[:40])
def test_a_chat_that_does_not_fit(server, bad, message):
    error = server.refused(CHAT, chat_body(**bad))
    assert message is None or error["message"] == message
    assert error["type"] == "invalid_request_error" and error["param"] in bad


BAD_PROMPTS = [
    ([-1], "prompt[0]: expected a token id from 0 to 259, got -1"),
    ([5, 260], "prompt[1]: expected a token id from 0 to 259, got 260"),
    ([2**40], f"prompt[0]: expected a token id from 0 to 259, got {2**40}"),
    ([True], "prompt[0]: expected a token id from 0 to 259, got True"),
    ([1.5], "prompt[0]: expected a token id from 0 to 259, got 1.5"),
    ([[-1]], "prompt[0][0]: expected a token id from 0 to 259, got -1"),
    ([[]], "prompt[0]: expected a text or token ids, got []"),
    (["a", 5], "prompt[1]: expected a text or token ids, got 5"),
    ([], None),
    (None, None),
    ({"a": 1}, None),
]


@pytest.mark.parametrize(("prompt", "message"), BAD_PROMPTS, ids=lambda value: str(value)[:30])
def test_a_prompt_that_is_none(server, prompt, message):
    error = server.refused(COMPLETIONS, text_body(prompt))
    assert error["param"] == "prompt" and (message is None or error["message"] == message)


def test_options_of_a_stream(server):
    error = server.post(CHAT, chat_body(stream_options={"include_usage": True})).json()["error"]
    assert error["message"] == "stream_options: expected stream: true beside it, got none"
    error = server.post(CHAT, chat_body(stream=True, stream_options={"x": True})).json()["error"]
    assert error["message"].startswith("stream_options: expected include_usage")


def test_lengths(server):
    over = server.refused(CHAT, chat_body(max_tokens=LENGTH))
    assert over["code"] == "context_length_exceeded"
    assert (
        f"at most {LENGTH} tokens together, got a prompt of" in over["message"] and "max_tokens 256" in over["message"]
    )
    long = server.refused(COMPLETIONS, text_body("a" * (LENGTH + 1), max_tokens=1))
    assert f"got a prompt of {LENGTH + 2 - 1} tokens" in long["message"] or "tokens and max_tokens 1" in long["message"]
    for path, body in (
        (CHAT, chat_body("a" * 10**5)),
        (COMPLETIONS, text_body("a" * 10**5)),
        ("/tokenize", {"prompt": "a" * 10**5}),
    ):
        error = server.post(path, body).json()["error"]  # so long that nothing counts its tokens
        assert (
            f"at most {LENGTH} tokens together, got 1000" in error["message"] and "which are more" in error["message"]
        )
        assert error["code"] == "context_length_exceeded"
    one = server.ok(CHAT, chat_body(max_tokens=1))
    assert one["usage"]["completion_tokens"] == 1 and one["choices"][0]["finish_reason"] == "length"
    body = chat_body(max_completion_tokens=3, max_tokens=3)
    assert server.ok(CHAT, body)["usage"]["completion_tokens"] == 3
    unsaid = chat_body(ignore_eos=True)
    del unsaid["max_tokens"]
    assert server.ok(CHAT, unsaid)["usage"]["total_tokens"] == LENGTH


@pytest.mark.parametrize(
    ("text", "status", "message"),
    [
        ('{"model": "tiny", "messages": [{"role": "user", "content": "\\ud83d"}]}', 400, "half a character"),
        ('{"model": "tiny", "messages": [{"role": "user", "content": "x", "name": "\\ud83d"}]}', 400, "column 73"),
        ('{"model": "tiny", "model": "tiny"}', 400, "the same key twice: model"),
        ('{"model": NaN}', 400, "model: expected a string"),
        ('{"temperature": NaN, "model": "tiny", "messages": [{"role": "user", "content": "x"}]}', 400, "temperature: "),
        ("[1]", 400, "body: expected a JSON object, got [1]"),
        ("{", 400, "body: expected JSON"),
        ("[" * 100_000, 400, "nested"),
        ('{"n": ' + "9" * 5000 + "}", 400, "digits"),
        (b"\xff", 400, "invalid byte at 0"),
        ("", 400, "body: expected JSON"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_body_that_is_none(server, text, status, message):
    for path in (CHAT, COMPLETIONS, "/tokenize"):
        response = server.client.post(path, content=text, headers={"Content-Type": "application/json"})
        assert response.status_code == status
        assert message in response.json()["error"]["message"] or path != CHAT


def test_a_template_that_refuses_and_parts_that_are_not_text(server):
    image = [{"type": "image_url", "image_url": {"url": "data:,"}}, {"type": "text", "text": "what?"}]
    assert server.refused(CHAT, chat_body(image))["param"] == "messages"
    assert (
        server.refused(CHAT, {**chat_body(), "messages": [{"role": "oracle", "content": "x"}]})["param"] == "messages"
    )


def test_what_passes(server):
    passed = {
        "user": "u", "metadata": {"a": "b"}, "parallel_tool_calls": True, "response_format": {"type": "text"},
        "store": False, "service_tier": "auto", "logit_bias": None, "modalities": ["text"], "stop": None,
        "reasoning_effort": None, "safety_identifier": "x", "tools": None,
    }  # fmt: skip
    assert server.ok(CHAT, chat_body(**passed))["choices"] == server.ok(CHAT, chat_body())["choices"]
    assert json.dumps(server.ok(CHAT, chat_body(text=" ")))
