"""Mutated requests by a seeded fuzzer: whatever comes, the answer is 200 or 4xx, and the server lives."""

import copy
import json
import random
import socket

import pytest

from tests.support.serving import CHAT, COMPLETIONS, KEY, chat_body, text_body

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
BODIES = [
    (CHAT, chat_body(max_tokens=2, n=2, stop=["x"], seed=1, top_p=0.9, stream_options=None)),
    (CHAT, chat_body(max_tokens=2, logprobs=True, top_logprobs=2, logit_bias={"7": 1}, stream=True)),
    (CHAT, chat_body([{"type": "text", "text": "a"}], max_tokens=1, tools=[TOOL], chat_template_kwargs={"a": 1})),
    (COMPLETIONS, text_body(["ab", "c"], max_tokens=2, echo=True, logprobs=2)),
    (COMPLETIONS, text_body([5, 6, 7], max_tokens=2, stream=True, stop_token_ids=[9], ignore_eos=True)),
    ("/tokenize", {"prompt": "ab", "model": "tiny"}),
    ("/tokenize", {"messages": [{"role": "user", "content": "a"}], "add_generation_prompt": True}),
    ("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "y"}),
    ("/v1/unload_lora_adapter", {"lora_name": "x"}),
]
ODD = [
    None,
    True,
    False,
    0,
    1,
    -1,
    2**31,
    2**63,
    -(2**64),
    10**300,
    1.5,
    -0.0,
    1e308,
    "",
    "x",
    "\x00",
    "😀" * 9,
    "<s>",
    "\\",
    "../../etc/passwd",
    "NaN",
    "{{ 7 * 7 }}",
    "a" * 5000,
    [],
    {},
    [[]],
    [None],
    [[[[1]]]],
    {"": None},
    {"role": "user"},
    {"type": "text"},
    [{"role": "tool"}],
    ["a", 1],
    {"a": {"b": [1, {"c": None}]}},
]
TEXTS = [
    b"NaN",
    b"Infinity",
    b"-",
    b"1e999",
    b'"\\ud800"',
    b'"\\u0000"',
    b"[" * 300,
    b"{" * 150,
    b"9" * 400,
    b"\xff\xfe",
    b'"',
    b"//",
    b"'a'",
    b",",
    b":",
]


def places(value, path=()):
    """All places of a JSON value."""
    yield path
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(inner, (*path, key))


def mutated(draw, body):
    """A body with a few changes of its values, or of its bytes."""
    value = copy.deepcopy(body)
    for _ in range(draw.randint(1, 3)):
        *path, last = draw.choice([place for place in places(value) if place] or [("model",)])
        inner = value
        for key in path:
            inner = inner[key]
        how = draw.random()
        if how < 0.6 or last not in (inner if isinstance(inner, dict) else range(len(inner))):
            inner[last] = copy.deepcopy(draw.choice(ODD))
        elif how < 0.75 and isinstance(inner, dict):
            del inner[last]
        elif isinstance(inner, dict):
            inner[draw.choice(["n", "extra", "model", "é", "", str(last) + "s"])] = copy.deepcopy(draw.choice(ODD))
        else:
            inner.append(copy.deepcopy(draw.choice(ODD)))
    data = json.dumps(value, ensure_ascii=draw.random() < 0.5).encode()
    for _ in range(draw.choice([0, 0, 1, 2])):
        place = draw.randrange(len(data) + 1)
        data = (
            data[:place] + draw.choice([*TEXTS, bytes([draw.randrange(256)])]) + data[place + draw.choice([0, 1, 4]) :]
        )
    return data


def test_mutated_bodies(server, count=250):
    draw, statuses = random.Random(7), {}
    for number in range(count):
        path, body = draw.choice(BODIES)
        data = mutated(draw, body)
        response = server.client.post(path, content=data, headers={"Content-Type": "application/json"})
        assert response.status_code == 200 or 400 <= response.status_code < 500, (
            number,
            path,
            data[:500],
            response.text,
        )
        statuses[response.status_code] = statuses.get(response.status_code, 0) + 1
        if response.status_code != 200:
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}
        elif b"text/event-stream" in response.headers["content-type"].encode():
            assert response.text.endswith("data: [DONE]\n\n") and '"error"' not in response.text, data
    assert statuses[200] > count // 50 and statuses[400] > count // 2
    assert server.ok(CHAT, chat_body())["usage"]["completion_tokens"] == 12


def test_mutated_bytes(server, count=40):
    """Request lines and headers with flipped bytes: 200, 4xx, or the connection ends."""
    draw = random.Random(8)
    body = json.dumps(chat_body(max_tokens=1)).encode()
    head = (
        f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\nContent-Type: application/json\r\n"
    )
    whole = f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body
    for _ in range(count):
        data = bytearray(whole)
        for _ in range(draw.randint(1, 4)):
            place = draw.randrange(len(data))
            data[place : place + draw.choice([0, 1, 2])] = draw.choice(
                [b"", b"\r\n", b" ", b"\x00", bytes([draw.randrange(256)])]
            )
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            answer = connection.recv(64)
        status = int(answer.split(b" ", 2)[1]) if answer else 400
        assert status == 200 or 400 <= status < 500, (bytes(data), answer)


@pytest.mark.exhaustive(by="test_mutated_bodies, test_mutated_bytes")
def test_ten_thousand(server):
    test_mutated_bodies(server, 9_000)
    test_mutated_bytes(server, 1_000)
