"""Refusals before a handler is called, and limits of what a client may send and of how slowly it may read.

In this order: a body with two lengths (request smuggling), the header `Host` (a page elsewhere that has pointed its own
name at this machine: DNS rebinding), a foreign `Origin`, the key, the type of the content, and the size and the time of
the body, which is read here.
"""

import asyncio
import hmac
import ipaddress
import logging
import time
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fastjax.serving.errors import FAILED, ApiError
from fastjax.serving.metrics import Metrics
from fastjax.serving.page import OPEN_PATHS
from fastjax.serving.settings import LOCAL_NAMES, ServerSettings

_LOG = logging.getLogger("fastjax.serving")

#: Paths that need no key: whether the server lives, and the page's own files, which hold no data.
OPEN = OPEN_PATHS | {"/health"}


class SlowReader(Exception):
    """A client did not take what was sent in time."""


class Guard:
    """Middleware around all routes."""

    def __init__(self, app: ASGIApp, settings: ServerSettings, metrics: Metrics):
        """Wrap an application.

        Args:
            app: it.
            settings: of the server.
            metrics: that count responses.
        """
        self._app, self._settings, self._metrics = app, settings, metrics
        self._key = None if settings.key is None else settings.key.encode()
        self._hosts = {*LOCAL_NAMES, *(host.lower() for host in settings.allowed_hosts)}
        self._held = 0  # bytes of bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status, held = time.perf_counter(), 0, 0

        async def bounded(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message).setdefault("x-content-type-options", "nosniff")
            try:
                async with asyncio.timeout(self._settings.write_seconds):
                    await send(message)
            except TimeoutError:
                raise SlowReader from None

        try:
            try:
                self._check(scope)
                body = await self._body(scope, receive)
                held = 0 if body is None else len(body)
                await self._app(scope, receive if body is None else _replayed(body, receive), bounded)
            except ApiError as error:
                await error.response()(scope, receive, bounded)
            except SlowReader:
                raise
            except Exception:
                _LOG.exception("a handler has failed")
                if status:
                    _abort(scope)
                else:
                    await ApiError(500, FAILED).response()(scope, receive, bounded)
        except SlowReader:  # of a refusal too
            status = 0
            _abort(scope)
        finally:
            self._held -= held
            route = _route(scope)
            self._metrics.responses[route, status] += 1
            _LOG.info("%s %s %d %.3f s", scope["method"][:20], route, status, time.perf_counter() - began)

    def _check(self, scope: Scope) -> None:
        """Refuse by the headers."""
        headers = Headers(scope=scope)
        if (
            "content-length" in headers and "transfer-encoding" in headers
        ):  # a proxy may see another end (RFC 9112, 6.1)
            message = "Content-Length: expected none beside Transfer-Encoding"
            raise ApiError(400, message, param="Content-Length", headers={"Connection": "close"})
        hosts = headers.getlist("host")
        if len(hosts) != 1 or not self._is_allowed(hosts[0]):
            raise ApiError(403, "Host: expected an IP address, localhost, or a name of --allowed_host", param="Host")
        origin = headers.get("origin")
        if origin is not None and _place(origin) != hosts[0].lower():
            raise ApiError(403, "Origin: expected this server's own, got another page's", param="Origin")
        if scope["path"] not in OPEN and self._key is not None:
            given = headers.get("authorization", "")
            kind, _, key = given.partition(" ")
            if not hmac.compare_digest(key.strip().encode(), self._key) or kind.lower() != "bearer":
                message = "Authorization: expected `Bearer KEY` with this server's key, got none or another"
                raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        if scope["method"] == "POST" and not _is_json(headers.get("content-type", "")):
            raise ApiError(415, "Content-Type: expected application/json, in UTF-8", param="Content-Type")
        if headers.get("content-encoding", "identity").lower() != "identity":
            raise ApiError(415, "Content-Encoding: expected none", param="Content-Encoding")

    def _is_allowed(self, host: str) -> bool:
        """Whether a header names this server; an address, unlike a name, cannot be another's pointed here."""
        try:
            parts = urlsplit(f"//{host}")
            name, _ = (parts.hostname or "").rstrip("."), parts.port
        except ValueError:
            return False
        if parts.netloc != host or parts.username is not None:
            return False
        try:
            ipaddress.ip_address(name)
            return True
        except ValueError:
            return name in self._hosts

    async def _body(self, scope: Scope, receive: Receive) -> bytes | None:
        """The body of a request that has one; counted among those that are held."""
        if scope["method"] != "POST":
            return None
        most = self._settings.body_bytes
        stated = Headers(scope=scope).get("content-length", "0")
        if not stated.isdecimal() or int(stated[:20]) > most:
            raise self._too_long()
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self._settings.body_seconds):
                more = True
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ApiError(400, "body: the connection has ended within it")
                    part = message.get("body", b"")
                    parts.append(part)
                    size += len(part)
                    self._held += len(part)
                    if size > most:
                        raise self._too_long()
                    if self._held > max(self._settings.bodies_bytes, most):
                        message_ = "the server is reading as many bytes as it holds at a time; ask again later"
                        raise ApiError(429, message_, code="busy", headers={"Retry-After": "1"})
                    more = message.get("more_body", False)
        except TimeoutError:
            self._held -= size
            seconds = self._settings.body_seconds
            message_ = f"body: expected all of it within {seconds:g} s"
            raise ApiError(408, message_, headers={"Connection": "close"}) from None
        except BaseException:
            self._held -= size
            raise
        return b"".join(parts)

    def _too_long(self) -> ApiError:
        return ApiError(413, f"body: expected at most {self._settings.body_bytes} bytes", code="body_too_large")


def _replayed(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives a body that was read already, and then the client's end."""
    given = False

    async def replayed() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replayed


def _place(origin: str) -> str | None:
    """Host and port of an `Origin`; None: it has none."""
    try:
        return urlsplit(origin).netloc.lower() or None
    except ValueError:  # half an IPv6 address
        return None


def _abort(scope: Scope) -> None:
    """Cut the connection, whatever its client has not taken."""
    scope.get("state", {}).get("abort", lambda: None)()


def _is_json(content_type: str) -> bool:
    kind, *parameters = (part.strip().lower() for part in content_type.split(";"))
    return kind == "application/json" and all(each in ("", "charset=utf-8", 'charset="utf-8"') for each in parameters)


def _route(scope: Scope) -> str:
    """The route's own path, which holds nothing of a client's."""
    app = scope.get("app")
    for route in app.routes if app is not None else ():
        if route.matches(scope)[0] is not Match.NONE:
            return route.path
    return "other"
