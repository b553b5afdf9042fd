"""Refusals before a handler is called: of hosts, origins, keys, types, sizes and slowness."""

import socket
import time

import httpx
import pytest

from fastjax.errors import ConfigError
from fastjax.serving.settings import ServerSettings
from tests.support import serving
from tests.support.serving import CHAT, KEY, chat_body


def raw(server, data, seconds=20):
    """The first line of the answer to bytes on a new connection."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=seconds) as connection:
        try:
            connection.sendall(data)
        except (BrokenPipeError, ConnectionResetError):
            pass  # it was refused meanwhile
        return connection.recv(64)


def status_of(data):
    return int(data.split(b" ", 2)[1])


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost@evil", ""])
def test_a_foreign_host(server, host):
    for origin in ({}, {"Origin": "http://127.0.0.1"}):
        response = server.client.get("/health", headers={"Host": host, **origin})
        assert response.status_code == 403
        assert not [name for name in response.headers if name.startswith("access-control")]
    assert server.client.get("/health", headers={"Host": f"localhost:{server.port}"}).status_code == 200
    assert server.client.get("/health", headers={"Host": "[::1]:9"}).status_code == 200


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1:1", "http://["])
def test_a_foreign_origin(server, origin):
    for method, path in (("POST", CHAT), ("OPTIONS", CHAT), ("GET", "/v1/models")):
        response = server.client.request(method, path, headers={"Origin": origin})
        assert response.status_code == 403
        assert not [name for name in response.headers if name.startswith("access-control")]
    assert server.client.get("/v1/models", headers={"Origin": server.url}).status_code == 200


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "application/json; charset=utf-16", ""]
)
def test_content_that_is_no_json(server, kind):
    response = server.client.post(CHAT, content=b"{}", headers={"Content-Type": kind})
    assert response.status_code == 415 and response.json()["error"]["param"] == "Content-Type"


def test_every_route_needs_the_key(server):
    """But whether it lives, and the page's own files, which hold no data."""
    from fastjax.serving.page import OPEN_PATHS

    routes = server.server.config.app.routes
    assert len(routes) > 10
    wrong = ({}, {"Authorization": "Bearer wrong"}, {"Authorization": KEY}, {"Authorization": f"Basic {KEY}"})
    with httpx.Client() as stranger:
        for route in routes:
            for method in route.methods:
                for header in wrong:
                    path = route.path.replace("{name:path}", "tiny")
                    response = stranger.request(method, server.url + path, headers=header)
                    if path in OPEN_PATHS or path == "/health":
                        assert response.status_code == 200
                    else:
                        assert response.status_code == 401 and response.headers["www-authenticate"] == "Bearer"


def test_figures_name_nobody(server):
    server.ok(CHAT, chat_body("secret words", user="somebody"))
    text = server.client.get("/metrics").text
    for word in ("secret", "somebody", KEY, "sums", "Tales"):
        assert word not in text
    assert 'fastjax_responses_total{route="/v1/chat/completions",status="200"}' in text
    assert "fastjax_cache_tokens 2048" in text and "fastjax_tokens_per_second " in text
    assert "fastjax_time_to_first_token_seconds_count" in text and "fastjax_rows 8" in text
    server.client.get("/secret/words")
    assert 'route="other",status="404"' in server.client.get("/metrics").text


def test_errors_have_one_form(server):
    """One for a route that is not there names those that are."""
    found = {}
    for method, path, status in (("POST", "/v1/embeddings", 404), ("GET", CHAT, 405), ("DELETE", "/health", 405)):
        response = server.client.request(method, path, json={} if method == "POST" else None)
        assert response.status_code == status and response.json()["error"]["type"]
        found[path] = response.json()["error"]["message"]
    assert found["/v1/embeddings"].startswith("POST /v1/embeddings: expected one of /health, /metrics, /run, /tokenize")
    assert found[CHAT] == f"GET {CHAT}: expected POST" and found["/health"] == "DELETE /health: expected GET, HEAD"


def test_a_body_with_two_lengths_is_no_second_request(server):
    """A proxy that goes by the other one would let it pass as the first one's body."""
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 40\r\n"
    data = f"{head}Transfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        connection.sendall(data.encode())
        said = b"".join(iter(lambda: connection.recv(4096), b""))
    assert status_of(said) == 400 and said.count(b"HTTP/1.1") == 1


def test_too_much(server):
    head = (
        f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\nContent-Type: application/json\r\n"
    )
    many = head + "".join(f"X-{number}: a\r\n" for number in range(100_000)) + "\r\n"
    assert status_of(raw(server, many.encode())) == 431
    assert status_of(raw(server, (head + "X: " + "a" * 2**26).encode())) == 431
    stated = raw(server, (head + f"Content-Length: {2**26}\r\n\r\n").encode())
    assert status_of(stated) == 413
    chunk = b"100000\r\n" + b" " * 2**20 + b"\r\n"
    assert status_of(raw(server, (head + "Transfer-Encoding: chunked\r\n\r\n").encode() + chunk * 64)) == 413
    assert status_of(raw(server, b"nonsense\r\n\r\n")) == 400
    assert server.ok(CHAT, chat_body())["usage"]["completion_tokens"] == 12


def test_too_slow():
    worker_engine = serving.engine()
    with serving.served(worker_engine, header_seconds=0.3, body_seconds=0.3) as server:
        for begun in (b"", b"GET /health HTTP/1.1\r\nHost: loc", b"GET /health HTTP/1.1\r\nX: a\r\n"):
            assert status_of(raw(server, begun)) == 408
        body = (
            f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{{"
        )
        assert status_of(raw(server, body.encode())) == 408
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:  # a line at a time
            began = time.monotonic()
            try:
                while time.monotonic() - began < 10:
                    connection.sendall(b"GET /health HTTP/1.1\r\n" if time.monotonic() - began < 0.01 else b"X: a\r\n")
                    time.sleep(0.1)
            except OSError:
                pass
            assert time.monotonic() - began < 5
        assert server.client.get("/health").status_code == 200


def test_refusals_that_nobody_reads():
    """Answers of the guard itself are cut as those of the routes."""
    with serving.served(serving.engine(), write_seconds=0.5) as server, socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        connection.connect(("127.0.0.1", server.port))
        connection.settimeout(0.2)
        try:
            while True:
                connection.sendall(b"GET /health HTTP/1.1\r\nHost: evil.example\r\n\r\n" * 1000)
        except (TimeoutError, ConnectionResetError, BrokenPipeError):
            pass
        serving.until(lambda: not server.server.server_state.connections)


def test_the_limits_of_settings():
    with pytest.raises(
        ConfigError, match=r"host: expected an address of this machine alone without a key.*FASTJAX_API_KEY"
    ):
        ServerSettings(host="0.0.0.0")
    assert ServerSettings(host="0.0.0.0", key=KEY).key == KEY and KEY not in repr(ServerSettings(key=KEY))
    with pytest.raises(ConfigError, match="key: expected"):
        ServerSettings(key="short")
    for key in ("clé-of-a-server-à", KEY + " ", KEY + "\n"):
        with pytest.raises(ConfigError, match="key: expected ASCII without spaces around it"):
            ServerSettings(key=key)
