"""Requests beside each other over HTTP: every answer is the one that it is alone."""

import concurrent.futures
import logging

import jax
import pytest

from fastjax.generation import engine as engine_module
from tests.support import serving
from tests.support.serving import CHAT, COMPLETIONS, chat_body, text_body


def chat(text, system=None, **more):
    body = chat_body(text, logprobs=True, top_logprobs=2, **more)
    if system is not None:
        body["messages"].insert(0, {"role": "system", "content": system})
    return CHAT, body


def text(prompt, **more):
    return COMPLETIONS, text_body(prompt, logprobs=2, **more)


REQUESTS = [
    *[chat("the very same prompt")] * 3,
    *[chat(f"question {number}", system=f"{'left' if number % 2 else 'right'} " * 8) for number in range(6)],
    *[text("abc"), text("ab " * 17), text("abc " * 45, max_tokens=40)],
    *[text("aaaa bbbb", repetition_penalty=1.5), text("aaaa bbbb", presence_penalty=2, frequency_penalty=1.5)],
    *[chat("drawn", seed=seed, temperature=1.0, n=2) for seed in (1, 2)],
    *[chat("drawn", seed=1, temperature=1.0, repetition_penalty=1.3), text(["one", "and another"], max_tokens=30)],
]


@pytest.fixture(scope="module")
def tight(one_width):
    """Few rows, a cache that they do not fit into together, and prompts that come in by pieces."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_module, "LEAST", 32)
        with serving.served(serving.engine(rows=4, tokens=320, prefill_tokens=32), key=serving.KEY) as running:
            yield running


@pytest.mark.parametrize(
    "kind",
    [
        "server",
        pytest.param("tight", marks=pytest.mark.exhaustive(by="test_requests_at_once_are_answered_as_alone[server]")),
    ],
)
def test_requests_at_once_are_answered_as_alone(kind, request):
    """Prompts of several lengths and systems, penalties, seeds; all with one identifier of their callers."""
    server = request.getfixturevalue(kind)

    def answered(asked, **header):
        response = server.post(*asked, **header)
        assert response.status_code == 200, response.text
        whole = response.json()
        return whole.pop("id"), {"choices": whole["choices"], "usage": whole["usage"]}

    alone = [answered(one)[1] for one in REQUESTS]
    assert alone[0] == alone[1] == alone[2] and alone[0]["choices"][0]["message"]["content"]
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda asked: answered(asked, **{"X-Request-Id": "mine"}), REQUESTS))
    assert len({own for own, _ in found}) == len(found)
    for (_, one), expected in zip(found, alone, strict=True):
        assert told(one) == told(expected)


def told(whole):
    """An answer, its log-probabilities to 1e-4: products of other widths round otherwise."""
    if isinstance(whole, dict):
        return {key: told(value) for key, value in whole.items()}
    if isinstance(whole, list):
        return [told(value) for value in whole]
    return pytest.approx(whole, abs=1e-4) if isinstance(whole, float) else whole


def test_two_streams_read_at_once(server):
    bodies = [chat_body(word, max_tokens=30) for word in ("left", "right")]
    expected = [server.ok(CHAT, body)["choices"][0]["message"]["content"] for body in bodies]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        streams = list(pool.map(lambda body: server.events(CHAT, body), 2 * bodies))
    for events, text in zip(streams, 2 * expected, strict=True):
        assert "".join(event["choices"][0]["delta"].get("content", "") for event in events) == text


def test_the_last_token_allowed_ends_an_answer_or_cuts_it(server):
    whole = server.ok(CHAT, chat_body(return_token_ids=True))
    ids = whole["choices"][0]["token_ids"]
    last = next(place for place in range(2, 12) if ids[place] not in ids[:place])
    for path, body in ((CHAT, chat_body()), (COMPLETIONS, text_body(whole["prompt_token_ids"]))):
        for most, reason in ((last, "length"), (last + 1, "stop")):
            body |= {"max_tokens": most, "stop_token_ids": [ids[last]]}
            whole = server.ok(path, body)
            assert whole["choices"][0]["finish_reason"] == reason and whole["usage"]["completion_tokens"] == last
            assert server.events(path, body)[-1]["choices"][0]["finish_reason"] == reason


@pytest.fixture
def compiled(caplog):
    """Programs that are compiled meanwhile, in any thread."""
    before = jax.config.jax_log_compiles
    jax.config.update("jax_log_compiles", True)
    with caplog.at_level(logging.WARNING, logger="jax"):
        yield lambda: [record.message for record in caplog.records if "Compiling" in record.message]
    jax.config.update("jax_log_compiles", before)


def test_fresh_stop_strings_compile_nothing(server, compiled):
    ask = [text_body("ab", max_tokens=1, stop=[f"stop {number}", f"{number}!"]) for number in range(100)]
    expected = server.ok(COMPLETIONS, ask[0])["choices"]
    before = compiled()
    assert all(server.ok(COMPLETIONS, body)["choices"] == expected for body in ask) and compiled() == before


def test_a_request_without_a_model_is_the_bases(server):
    named = server.ok(CHAT, chat_body())
    body = {key: value for key, value in chat_body().items() if key != "model"}
    whole = server.ok(CHAT, body)
    assert whole["model"] == "tiny" and whole["choices"] == named["choices"]
    assert {event["model"] for event in server.events(CHAT, body)} == {"tiny"}
