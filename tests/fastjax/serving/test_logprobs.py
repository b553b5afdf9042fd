"""Log-probabilities and token ids in each API's own form."""

import numpy as np
import pytest

from tests.support.generation import whole_passes
from tests.support.serving import CHAT, COMPLETIONS, LENGTH, chat_body, model, text_body


def streamed_content(events):
    return [one for event in events for one in (event["choices"][0]["logprobs"] or {}).get("content", [])]


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.5, "top_p": 0.9, "seed": 3, "presence_penalty": 1.0}])
def test_a_chats_are_those_of_the_models_own_logits(server, sampling):
    body = chat_body(
        logprobs=True, top_logprobs=5, max_tokens=20, return_token_ids=True, **{"temperature": 0, **sampling}
    )
    whole = server.ok(CHAT, body)
    [choice] = whole["choices"]
    content, ids = choice["logprobs"]["content"], choice["token_ids"]
    expected = np.asarray(whole_passes(model(), whole["prompt_token_ids"], ids, LENGTH))
    assert len(content) == len(ids) == whole["usage"]["completion_tokens"]
    for place, one in enumerate(content):
        np.testing.assert_allclose(one["logprob"], expected[place, ids[place]], atol=1e-4)  # float32, 2 layers
        tops = [other["logprob"] for other in one["top_logprobs"]]
        np.testing.assert_allclose(tops, np.sort(expected[place])[::-1][:5], atol=1e-4)
        assert tops == sorted(tops, reverse=True) and len(tops) == 5
    data = b"".join(bytes(one["bytes"]) for one in content)
    assert data.decode(errors="replace") == choice["message"]["content"]
    events = server.events(CHAT, body)
    assert streamed_content(events) == content
    for event in events:
        [one] = event["choices"]
        if one["logprobs"] is not None:
            assert len(one["logprobs"]["content"]) == len(one["token_ids"])


def test_a_chat_without_alternatives(server):
    content = server.ok(CHAT, chat_body(logprobs=True))["choices"][0]["logprobs"]["content"]
    assert len(content) == 12 and all(one["top_logprobs"] == [] for one in content)
    assert server.ok(CHAT, chat_body())["choices"][0]["logprobs"] is None
    assert server.ok(CHAT, chat_body(logprobs=True, top_logprobs=0))["choices"][0]["logprobs"]["content"] == content


@pytest.mark.parametrize("count", [0, 5])
def test_a_completions_form(server, count):
    body = text_body("héllo", logprobs=count, max_tokens=20)
    [choice] = server.ok(COMPLETIONS, body)["choices"]
    told = choice["logprobs"]
    assert list(told) == ["tokens", "token_logprobs", "top_logprobs", "text_offset"]
    assert [len(each) for each in told.values()] == [20] * 4
    for token, value, top in zip(told["tokens"], told["token_logprobs"], told["top_logprobs"], strict=True):
        assert top[token] == value and len(top) in ((1,) if count == 0 else (5, 6))
    starts = [*told["text_offset"], len(choice["text"])]
    assert starts == sorted(starts) and starts[0] == 0
    for token, start, end in zip(told["tokens"], starts, starts[1:], strict=False):
        assert token.startswith(("bytes:", "<")) or choice["text"][start:end] == token  # special tokens have no text
    events = server.events(COMPLETIONS, body)
    for key, values in told.items():
        parts = [event["choices"][0]["logprobs"][key] for event in events if event["choices"][0]["logprobs"]]
        assert sum(parts, []) == values, key


def test_stops_and_log_probabilities_belong_together(server):
    text = server.ok(COMPLETIONS, text_body(max_tokens=30))["choices"][0]["text"]
    body = text_body(max_tokens=30, stop=text[8:11], logprobs=2, return_token_ids=True)
    whole = server.ok(COMPLETIONS, body)
    [choice] = whole["choices"]
    assert len(choice["token_ids"]) == len(choice["logprobs"]["tokens"]) == whole["usage"]["completion_tokens"]
    for event in server.events(COMPLETIONS, body):
        [one] = event["choices"]
        if one["logprobs"]:
            assert len(one["logprobs"]["tokens"]) == len(one["token_ids"])
            plain = all(not token.startswith("bytes:") for token in one["logprobs"]["tokens"])
            assert not plain or "".join(one["logprobs"]["tokens"]) == one["text"]


def test_a_banned_token_and_a_forced_one(server):
    first = server.ok(COMPLETIONS, text_body(max_tokens=1, return_token_ids=True))["choices"][0]["token_ids"][0]
    banned = server.ok(
        COMPLETIONS, text_body(max_tokens=4, logit_bias={str(first): -100}, return_token_ids=True, logprobs=5)
    )
    assert first not in banned["choices"][0]["token_ids"]
    assert all(np.isfinite(banned["choices"][0]["logprobs"]["token_logprobs"]))
    forced = server.ok(COMPLETIONS, text_body(max_tokens=4, logit_bias={"77": 100}, return_token_ids=True))
    assert forced["choices"][0]["token_ids"] == [77] * 4


@pytest.mark.parametrize("new", [0, 1, 9])
def test_an_echo_is_scored(server, new):
    body = text_body("héllo you 👍", echo=True, logprobs=3, max_tokens=new, return_token_ids=True)
    whole = server.ok(COMPLETIONS, body)
    [choice] = whole["choices"]
    told, ids = choice["logprobs"], [*choice["prompt_token_ids"], *choice["token_ids"]]
    assert choice["text"].startswith("héllo you 👍") and choice["finish_reason"] == "length"
    assert whole["usage"]["completion_tokens"] == new == len(choice["token_ids"])
    assert [len(each) for each in told.values()] == [len(ids)] * 4
    assert told["token_logprobs"][0] is None and told["top_logprobs"][0] is None
    expected = np.asarray(whole_passes(model(), ids[:1], ids[1:], LENGTH))
    scores = expected[np.arange(len(ids) - 1), ids[1:]]
    np.testing.assert_allclose(told["token_logprobs"][1:], scores, atol=1e-4)  # float32, 2 layers
    starts = [*told["text_offset"], len(choice["text"])]
    assert starts == sorted(starts)
    for token, start, end in zip(told["tokens"], starts, starts[1:], strict=False):
        assert token.startswith(("bytes:", "<")) or choice["text"][start:end] == token
    events = server.events(COMPLETIONS, body)
    for key, values in told.items():
        parts = [event["choices"][0]["logprobs"][key] for event in events if event["choices"][0]["logprobs"]]
        assert sum(parts, []) == values, key
    assert "".join(event["choices"][0]["text"] for event in events) == choice["text"]
    assert server.ok(COMPLETIONS, body)["choices"] == whole["choices"]  # after a request with the same prompt
    plain = server.ok(COMPLETIONS, {**body, "logprobs": None})["choices"][0]
    assert plain["text"] == choice["text"] and plain["logprobs"] is None
    stopped = server.ok(COMPLETIONS, {**body, "stop": "héllo"})["choices"][0]  # it stands in the prompt alone
    assert stopped["text"] == choice["text"]
