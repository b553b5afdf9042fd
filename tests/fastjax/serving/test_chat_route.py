"""Chats and completions over HTTP, whole and streamed, equal to the offline answer."""

import concurrent.futures

import pytest

from fastjax.generation.options import GenerationOptions
from fastjax.generation.prompts import Reading
from fastjax.generation.text import answers
from tests.support.generation import whole_logits
from tests.support.serving import CHAT, COMPLETIONS, LENGTH, adapted, chat_body, model, text_body


def offline(prompt, chat=True, n=1, **options):
    """Of always four answers, by the same programs, the first ones."""
    options = GenerationOptions(**{"max_new_tokens": 12, "n": 4, **options})
    [found] = answers(model().value, [prompt], options, reading=Reading(chat, special_tokens="text"))
    return found[:n]


def joined(events, key="content"):
    texts = {}
    for event in events:
        for choice in event["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["delta"].get(key, "")
    return [texts[index] for index in sorted(texts)]


def test_the_answer_is_the_offline_one(server):
    body = chat_body()
    [expected] = offline(body["messages"])
    whole = server.ok(CHAT, body)
    [choice] = whole["choices"]
    assert choice["message"] == {"role": "assistant", "content": expected.text, "refusal": None}
    assert choice["finish_reason"] == expected.finish_reason == "length" and whole["model"] == "tiny"
    prompt = len(expected.prompt_token_ids)
    assert whole["usage"] == {"prompt_tokens": prompt, "completion_tokens": 12, "total_tokens": prompt + 12}
    assert joined(server.events(CHAT, body)) == [expected.text]


def test_the_form_of_a_stream(server):
    options = {"stream_options": {"include_usage": True}, "n": 2, "seed": 5, "temperature": 1.0}
    events = server.events(CHAT, chat_body(**options))
    assert len({event["id"] for event in events}) == 1
    *inside, last = events
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 24 and all("usage" not in e for e in inside)
    roles, reasons = [], {}
    for event in inside:
        [choice] = event["choices"]
        assert reasons.get(choice["index"]) is None  # nothing comes behind the end
        reasons[choice["index"]] = choice["finish_reason"]
        roles += [choice["index"]] if "role" in choice["delta"] else []
    assert sorted(roles) == [0, 1] and reasons == {0: "length", 1: "length"}
    for without in ({}, {"stream_options": {"include_usage": False}}):
        assert all(len(event["choices"]) == 1 for event in server.events(CHAT, chat_body(**without)))


def test_seeds(server):
    body = chat_body(n=4, seed=7, temperature=1.0)
    first, again = (server.ok(CHAT, body)["choices"] for _ in range(2))
    texts = [choice["message"]["content"] for choice in first]
    assert first == again and len(set(texts)) == 4
    assert texts == [one.text for one in offline(body["messages"], n=4, seed=7, temperature=1.0)]
    assert sorted(joined(server.events(CHAT, body))) == sorted(texts)
    greedy = server.ok(CHAT, chat_body(n=4, top_p=0.3, top_k=5))["choices"]
    assert len({choice["message"]["content"] for choice in greedy}) == 1


@pytest.mark.parametrize(
    "off", [{"top_k": 0}, {"top_k": -1}, {"top_k": 10**6}, {"top_p": 1}, {"min_p": 0}, {"repetition_penalty": 1}]
)
def test_what_is_off_changes_nothing(server, off):
    body = chat_body(seed=3, temperature=1.0, max_tokens=6, logprobs=True, frequency_penalty=0)
    assert server.ok(CHAT, {**body, **off})["choices"] == server.ok(CHAT, body)["choices"]


def test_an_absent_temperature_is_one(server):
    """Never greedy by accident; with top_p 0, which OpenAI allows, the likeliest token stays."""
    body = chat_body(seed=3)
    del body["temperature"]
    assert server.ok(CHAT, body)["choices"] == server.ok(CHAT, {**body, "temperature": 1.0})["choices"]
    assert server.ok(CHAT, body)["choices"] != server.ok(CHAT, chat_body())["choices"]
    assert server.ok(CHAT, {**body, "top_p": 0})["choices"] == server.ok(CHAT, chat_body())["choices"]


def test_completions_of_texts_and_of_ids(server):
    prompts = ["ab", "héllo"]
    expected = [offline(prompt, chat=False)[0] for prompt in prompts]
    ids = [list(one.prompt_token_ids) for one in expected]
    for prompt in (prompts, ids):
        whole = server.ok(COMPLETIONS, text_body(prompt))
        assert [choice["text"] for choice in whole["choices"]] == [one.text for one in expected]
        assert [choice["index"] for choice in whole["choices"]] == [0, 1]
        assert whole["usage"]["prompt_tokens"] == sum(map(len, ids)) and whole["usage"]["completion_tokens"] == 24
    assert server.ok(COMPLETIONS, text_body(ids[0]))["choices"][0]["text"] == expected[0].text
    told = server.ok(COMPLETIONS, text_body("ab", return_token_ids=True))["choices"][0]
    assert told["token_ids"] == list(expected[0].token_ids) and told["prompt_token_ids"] == ids[0]


def test_two_adapters_and_the_base_at_once(server):
    """Greedy answers: each token is the likeliest one by a forward pass of its own model alone."""
    models = {"tiny": model(), "sums": adapted(1), "Tales": adapted(2)}
    body = chat_body("a long prompt " * 8, return_token_ids=True)
    with concurrent.futures.ThreadPoolExecutor(9) as pool:
        asked = [name for _ in range(3) for name in models]
        found = list(pool.map(lambda name: server.ok(CHAT, {**body, "model": name}), asked))
    answered = {name: whole for name, whole in zip(asked, found, strict=True)}
    for name, whole in zip(asked, found, strict=True):
        assert whole["model"] == name and whole["choices"] == answered[name]["choices"]
    for name, of in models.items():
        ids = answered[name]["choices"][0]["token_ids"]
        logits = whole_logits(of, answered[name]["prompt_token_ids"], ids, LENGTH)
        assert logits.argmax(axis=-1).tolist() == ids and len(ids) == 12
    assert len({tuple(whole["choices"][0]["token_ids"]) for whole in answered.values()}) == 3


def test_the_prompt_is_that_of_training(server):
    body = chat_body("<s>A:</s> U:")
    ids = server.ok("/tokenize", {"messages": body["messages"]})
    [expected] = offline(body["messages"])
    assert ids["tokens"] == list(expected.prompt_token_ids) and ids["count"] == len(ids["tokens"])
    assert ids["tokens"].count(1) == 1 and 2 not in ids["tokens"]  # what a user types is text
    assert server.ok(CHAT, {**body, "return_token_ids": True})["prompt_token_ids"] == ids["tokens"]
    assert "".join(server.ok("/tokenize", {"prompt": "ab c"})["token_strs"]) == "ab c"


def test_parts_of_content_and_a_begun_answer(server):
    parts = [{"type": "text", "text": "hél"}, {"type": "text", "text": "lo 👍"}]
    assert server.ok(CHAT, chat_body(parts))["choices"] == server.ok(CHAT, chat_body())["choices"]
    begun = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "ab"}]
    whole = server.ok(CHAT, {**chat_body(), "messages": begun, "continue_final_message": True})
    reading = Reading(special_tokens="text", continue_final_message=True)
    [[expected]] = answers(model().value, [begun], GenerationOptions(max_new_tokens=12), reading=reading)
    assert whole["choices"][0]["message"]["content"] == expected.text


def test_a_stop_is_looked_for_in_the_answer_alone(server):
    [plain] = offline(chat_body()["messages"], max_new_tokens=30)
    stop = plain.text[9:12]
    assert stop not in plain.text[:9]
    for given in (stop, [stop, "never"]):
        body = chat_body(stop=given, max_tokens=30, return_token_ids=True)
        whole = server.ok(CHAT, body)
        [choice] = whole["choices"]
        assert choice["message"]["content"] == plain.text[: plain.text.index(stop)]
        assert choice["finish_reason"] == "stop" and whole["usage"]["completion_tokens"] == len(choice["token_ids"])
        events = server.events(CHAT, body)
        assert joined(events) == [choice["message"]["content"]]
        ids = [token for event in events for token in event["choices"][0].get("token_ids", [])]
        assert ids == choice["token_ids"]
    asked = server.ok(CHAT, chat_body(stop="héllo", max_tokens=30))  # it stands in the prompt
    assert asked["choices"][0]["message"]["content"] == plain.text


def test_models(server):
    found = server.client.get("/v1/models").json()["data"]
    assert [one["id"] for one in found] == ["tiny", "Tales", "sums"] and found[0]["max_model_len"] == LENGTH
    assert [one["parent"] for one in found] == [None, "tiny", "tiny"]
    assert server.client.get("/v1/models/sums").json() == found[2]
    assert server.client.get("/health").json() == {"status": "ok"}


@pytest.mark.parametrize("name", ["Tiny", "tin", "SUMS", "none", "org/tiny"])
def test_a_name_that_is_not_there(server, name):
    error = server.refused(CHAT, chat_body(model=name), 404)
    assert error["code"] == "model_not_found" and error["param"] == "model"
    assert error["message"] == f"model: expected one of tiny, Tales, sums, got {name!r}"
    assert server.client.get(f"/v1/models/{name}").json()["error"]["code"] == "model_not_found"
