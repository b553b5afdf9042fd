"""The application: routes, handlers, and the guard around them."""

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Route

from convert.errors import shorten
from fastjax.errors import ConfigError, DataError
from fastjax.serving import page
from fastjax.serving.adapters import Adapters
from fastjax.serving.endpoints import Endpoints, refused
from fastjax.serving.errors import ApiError
from fastjax.serving.guard import Guard
from fastjax.serving.model import Models, ServedModel
from fastjax.serving.settings import ServerSettings
from fastjax.serving.worker import Closing, Worker


def create_app(worker: Worker, settings: ServerSettings) -> Starlette:
    """The application of a server; `state.close` ends its thread for the reading of prompts.

    Args:
        worker: that answers; it is left running.
        settings: of the server.

    Raises:
        ConfigError: a model that cannot be served.
    """
    models = Models(settings.name, ServedModel(worker.model, settings))
    adapters = Adapters(worker, models, settings)
    adapters.load_all()
    endpoints = Endpoints(worker, models, settings)

    async def health(http: HttpRequest) -> Response:
        state = "failed" if worker.failed else "draining" if worker.draining else "ok"
        return JSONResponse({"status": state}, 200 if state == "ok" else 503)

    async def metrics(http: HttpRequest) -> Response:
        return PlainTextResponse(worker.metrics.text(worker.gauges()), media_type="text/plain; version=0.0.4")

    routes: list[BaseRoute] = [
        Route("/health", health),
        Route("/metrics", metrics),
        Route("/v1/models", endpoints.models),
        Route("/v1/models/{name:path}", endpoints.model),
        Route("/v1/chat/completions", endpoints.chat, methods=["POST"]),
        Route("/v1/completions", endpoints.completions, methods=["POST"]),
        Route("/v1/load_lora_adapter", adapters.load, methods=["POST"]),
        Route("/v1/unload_lora_adapter", adapters.unload, methods=["POST"]),
        Route("/tokenize", endpoints.tokenize, methods=["POST"]),
    ]
    routes += page.routes(settings)

    handlers = {kind: refused for kind in (ApiError, Closing, ConfigError, DataError)}
    guard = Middleware(Guard, settings=settings, metrics=worker.metrics)
    app = Starlette(routes=routes, middleware=[guard], exception_handlers=handlers | {HTTPException: _not_found})
    app.state.close = endpoints.close
    return app


async def _not_found(http: HttpRequest, error: Exception) -> Response:
    """No such route or method, in the form of the other errors."""
    assert isinstance(error, HTTPException)
    asked, headers = f"{http.method[:20]} {shorten(http.url.path, 80)}", error.headers or {}
    there = {
        route.path.replace("{name:path}", "NAME") for route in http.app.routes if route.path not in page.OPEN_PATHS
    }
    methods = ", ".join(sorted(headers["Allow"].split(", "))) if "Allow" in headers else None
    expected = methods or f"one of {', '.join(sorted(there))}"
    return ApiError(error.status_code, f"{asked}: expected {expected}", headers=headers).response()
