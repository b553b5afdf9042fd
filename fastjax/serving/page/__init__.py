"""The page of the server: a chat with the served models, and the live curves of a run.

Plain files beside this module: index.html, its style sheet and its JavaScript modules. No framework, no build, nothing
from elsewhere. A strict Content-Security-Policy has them alone run: no inline script or style, no request but to the
server itself, and no string is ever read as HTML (Trusted Types). They hold nothing secret, so the page opens without a
key (`OPEN_PATHS`) and asks for it when the API answers 401.
"""

from pathlib import Path
from typing import Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from convert.errors import shown
from fastjax.serving.page.curves import RunCurves

CONTENT_SECURITY_POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    ]
)
HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
"""Headers of every answer of the page's routes."""
MEDIA_TYPES = {".css": "text/css", ".html": "text/html", ".js": "text/javascript", ".svg": "image/svg+xml"}

FILES = (
    "page.css",
    "icon.svg",
    "page.js",
    "chat.js",
    "answers.js",
    "tokens.js",
    "settings.js",
    "server.js",
    "run.js",
    "plot.js",
    "dom.js",
)
"""Beside index.html."""
OPEN_PATHS = frozenset(["/", *(f"/page/{name}" for name in FILES)])
"""Paths of the page's own files, which need no key."""


class PageSettings(Protocol):
    """The settings that the page reads.

    Attributes:
        run: the output folder of a run whose curves are shown; None: no curves.
    """

    @property
    def run(self) -> str | Path | None: ...  # noqa: D102


def routes(settings: PageSettings) -> list[Route]:
    """The page's routes: `/`, its files under `/page/`, and `/run`.

    Files are read once, here; a request's path is compared with their names and never opened.

    Args:
        settings: of the server.

    Raises:
        ConfigError: `settings.run` is no folder.
        OSError: a file of the page cannot be read.
    """
    files = [Route("/", _file("index.html"))] + [Route(f"/page/{name}", _file(name)) for name in FILES]
    return [*files, Route("/run", _run(RunCurves(settings.run) if settings.run is not None else None))]


def _file(name: str):
    """The endpoint of a file."""
    content = (Path(__file__).parent / name).read_bytes()
    kind = MEDIA_TYPES[Path(name).suffix]

    async def endpoint(request: Request) -> Response:
        return Response(content, media_type=kind, headers={**HEADERS, "Cache-Control": "no-cache"})

    return endpoint


def _run(curves: RunCurves | None):
    """The endpoint of a run's rows; it reads a file, so it is a plain function, which has a thread of its own."""

    def endpoint(request: Request) -> Response:
        if curves is None:
            return _json({"run": None})
        offset = request.query_params.get("offset", "0")
        if not (offset.isascii() and offset.isdecimal() and len(offset) <= 18):
            message = f"offset: expected a number of bytes, as `offset` of the answer before, got {shown(offset)}"
            return _json({"error": {"message": message, "type": "invalid_request_error", "param": "offset"}}, 400)
        return _json({"run": curves.read(request.query_params.get("file", ""), int(offset))})

    return endpoint


def _json(value: object, status: int = 200) -> Response:
    return JSONResponse(value, status, headers={**HEADERS, "Cache-Control": "no-store"})
