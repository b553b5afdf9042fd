"""/v1/chat/completions and /v1/models, whole and streamed, equal to the offline answer."""

import pytest

from fastjax.generation.options import GenerationOptions
from fastjax.generation.prompts import Reading
from fastjax.generation.text import answers
from tests.support import serving

CHAT = "/v1/chat/completions"
ASKED = {"model": "tiny", "messages": [{"role": "user", "content": "héllo 👍"}], "max_tokens": 12, "temperature": 0}


@pytest.fixture(scope="module")
def server():
    with serving.served() as running:
        yield running


def offline(messages=ASKED["messages"], **options):
    [found] = answers(
        serving.model(),
        [messages],
        GenerationOptions(**{"max_new_tokens": 12, **options}),
        reading=Reading(special_tokens="text"),
    )
    return found


def test_the_answer_is_the_offline_one(server):
    [expected] = offline()
    whole = server.ok(CHAT, ASKED)
    [choice] = whole["choices"]
    assert choice["message"] == {"role": "assistant", "content": expected.text, "refusal": None}
    assert choice["finish_reason"] == expected.finish_reason == "length" and whole["model"] == "tiny"
    assert whole["usage"] == {
        "prompt_tokens": len(expected.prompt_token_ids),
        "completion_tokens": 12,
        "total_tokens": len(expected.prompt_token_ids) + 12,
    }
    events = server.events(CHAT, ASKED)
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in events) == expected.text
    assert len({event["id"] for event in events}) == 1


def test_models(server):
    [model] = server.client.get("/v1/models").json()["data"]
    assert model["id"] == "tiny" and model["max_model_len"] == serving.LENGTH
    assert server.client.get("/v1/models/tiny").json() == model
    assert server.client.get("/health").json() == {"status": "ok"}
