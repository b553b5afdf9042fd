"""Streams that are cut, slow, too many, or under way when the server ends."""

import contextlib
import json
import signal
import socket
import threading
import time

import pytest

from tests.support import serving
from tests.support.serving import CHAT, COMPLETIONS, ROWS, Scripted, chat_body, text_body, until


def opened(server, body, path=CHAT):
    """A connection that has sent a request."""
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=60)
    send(connection, body, path)
    return connection


def send(connection, body, path):
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes(stream):
    engine = Scripted("word " * 3000, steps=1)
    with serving.served(engine) as server:
        connection = opened(server, chat_body(max_tokens=3900, n=4, stream=stream))
        until(lambda: len(engine.going) == 4)
        if stream:
            assert connection.recv(4096).startswith(b"HTTP/1.1 200")
        connection.close()
        until(lambda: not engine.going and not server.worker.open)
        assert server.worker.metrics.finished["cancelled"] == 4
        engine.text = "so"
        assert server.ok(CHAT, chat_body())["choices"][0]["message"]["content"] == "so"


def test_a_cancel_that_comes_too_late():
    with serving.served(Scripted("so")) as server:
        tickets, submit = [], server.worker.submit
        server.worker.submit = lambda wanted: tickets.append(submit(wanted)) or tickets[-1]
        server.ok(CHAT, chat_body())
        for _ in range(2):
            tickets[0].cancel()
        server.ok(CHAT, chat_body())
        assert server.worker.metrics.finished == {"stop": 2} and server.worker.open == 0


def test_a_stop_string_counts_as_a_stop():
    with serving.served(Scripted("one two three " * 99, steps=1)) as server:
        server.ok(CHAT, chat_body(stop="two", max_tokens=900, n=2))
        until(lambda: server.worker.open == 0)
        assert server.worker.metrics.finished == {"stop": 2}


def test_a_full_queue():
    engine = Scripted("a b c")
    with serving.served(engine, queue=2) as server:
        engine.free.clear()
        waiting = [opened(server, chat_body(n=5)) for _ in range(2)]
        until(lambda: server.worker.open == ROWS + 2)
        for more in ({}, {"stream": True}):
            response = server.post(CHAT, chat_body(**more))
            assert response.status_code == 429 and response.headers["retry-after"] == "1"
            assert response.json()["error"]["code"] == "queue_full"
        engine.free.set()
        assert all(connection.recv(64).startswith(b"HTTP/1.1 200") for connection in waiting)
        until(lambda: not server.worker.open)
        assert server.ok(CHAT, chat_body())["usage"]["completion_tokens"]
        [connection.close() for connection in waiting]


def test_an_engine_that_fails_under_a_stream():
    engine = Scripted("word " * 400, steps=1)
    with serving.served(engine) as server:
        with server.client.stream("POST", CHAT, json=chat_body(max_tokens=800, stream=True)) as response:
            lines = response.iter_lines()
            next(lines)
            engine.broken = True
            rest = [line for line in lines if line]
        assert response.status_code == 200 and rest[-1] == "data: [DONE]" and rest.count("data: [DONE]") == 1
        error = json.loads(rest[-2][6:])["error"]
        assert (
            error["type"] == "server_error" and "secrets" not in "".join(rest) and "RuntimeError" not in "".join(rest)
        )
        until(lambda: server.ended)
        assert server.ended == [False]  # so that who watches over the server starts it again


def test_a_reader_of_a_byte_a_second_among_fast_ones():
    """The slow one is cut at the stated limit, and what waits for it is bounded; others keep their pace."""
    engine = Scripted("many words of text " * 60, steps=8)
    engine.max_length = 10**6
    with serving.served(engine, queue=200, write_seconds=1.0) as server:
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        connection.connect(("127.0.0.1", server.port))
        send(connection, text_body(["a"] * 8, n=16, max_tokens=1000, logprobs=5, stream=True), COMPLETIONS)
        until(lambda: server.worker.open == 128)
        began = time.monotonic()
        for _ in range(5):
            assert connection.recv(1)
            assert server.ok(CHAT, chat_body())["usage"]["completion_tokens"] == 12
        assert time.monotonic() - began < 20
        until(lambda: server.worker.metrics.responses["/v1/completions", 0] == 1)
        connection.close()
        until(lambda: not server.worker.open)


def large(server, buffer=1024):
    """A connection with a small buffer that has asked for a whole answer of 11 MB."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    connection.settimeout(60)
    connection.connect(("127.0.0.1", server.port))
    send(connection, text_body([77] * 30_000, n=128, return_token_ids=True), COMPLETIONS)
    return connection


def test_a_whole_answer_that_nobody_reads():
    """Its connection is cut while the server ends, which waits for one that reads on."""
    engine = Scripted("so")
    engine.max_length = 10**6
    with serving.served(engine, queue=300, write_seconds=1.0) as server, contextlib.ExitStack() as opened_ones:
        done = server.worker.metrics.responses
        opened_ones.enter_context(large(server))
        reader = opened_ones.enter_context(large(server, 2**18))
        parts = [reader.recv(2**16)]
        until(lambda: done["/v1/completions", 200] == 2)
        server.server.handle_exit(signal.SIGTERM, None)
        while parts[-1]:
            parts.append(reader.recv(2**18))
            time.sleep(0.005)
        body = b"".join(parts).partition(b"\r\n\r\n")[2]
        assert len(json.loads(body)["choices"]) == 128 and len(body) > 10**7
        until(lambda: server.ended, seconds=10)
        assert server.ended == [True]


def test_the_time_of_a_request():
    engine = Scripted("word " * 3000, steps=1)
    with serving.served(engine, request_seconds=0.3) as server:
        engine.free.clear()
        threading.Timer(1.0, engine.free.set).start()
        response = server.post(CHAT, chat_body(max_tokens=3900))
        assert response.status_code == 504 and response.json()["error"]["code"] == "timeout"
        until(lambda: not server.worker.open)
        engine.free.clear()
        threading.Timer(1.0, engine.free.set).start()
        *_, error = server.events(CHAT, chat_body(max_tokens=3900))
        assert error["error"]["code"] == "timeout"
        until(lambda: not engine.going and not server.worker.open)


def test_a_signal_drains_and_a_second_one_ends():
    before = threading.active_count()
    engine = Scripted("word " * 40, steps=1)
    with serving.served(engine) as server:
        engine.free.clear()
        going = [opened(server, chat_body(max_tokens=3000, stream=True)) for _ in range(20)]
        until(lambda: server.worker.open == 20)
        server.server.handle_exit(signal.SIGTERM, None)
        refused = server.post(CHAT, chat_body())
        assert refused.status_code == 503 and refused.headers["retry-after"]
        health = server.client.get("/health")
        assert health.status_code == 503 and health.json() == {"status": "draining"}
        engine.free.set()
        for connection in going:
            data = b""
            while part := connection.recv(65536):
                data += part
            assert data.count(b"[DONE]") == 1 and b'"finish_reason":"stop"' in data
            connection.close()
        until(lambda: server.ended)
        assert server.ended == [True]
    engine = Scripted("word " * 3000, steps=1)
    with serving.served(engine) as server:
        connection = opened(server, chat_body(max_tokens=3900, stream=True))
        assert connection.recv(64)
        for _ in range(2):
            server.server.handle_exit(signal.SIGTERM, None)
        until(lambda: server.ended, seconds=5)
        connection.close()
    until(lambda: threading.active_count() == before)
