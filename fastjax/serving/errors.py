"""Errors of requests, in OpenAI's form: {"error": {"message", "type", "param", "code"}}."""

import re
from collections.abc import Mapping
from typing import Any

from starlette.responses import JSONResponse

from fastjax.errors import ConfigError, DataError

#: Status → the type that OpenAI's clients know it by.
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
    504: "server_error",
}
_FIELD = re.compile(r"([A-Za-z_]\w*)(\[[^\]]*\]|\.\w+)*:")


class ApiError(Exception):
    """A request that is refused, or whose answer has failed."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        """Make it.

        Args:
            status: of HTTP.
            message: what is wrong, what was expected and given, and a way out.
            param: the field of the body.
            code: a word for programs.
            headers: of the response.
        """
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    @classmethod
    def of(cls, error: ConfigError | DataError) -> "ApiError":
        """The refusal of a request that does not fit; the field is what the message begins with.

        Args:
            error: of whoever read the field.
        """
        message = str(error).removeprefix("generate: ")
        found = _FIELD.match(message)
        return cls(400, message, param=found[1] if found else None)

    def body(self) -> dict[str, Any]:
        """The body that the client gets."""
        kind = _TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """The response with this error."""
        return JSONResponse(self.body(), self.status, self.headers)


#: What a client is told of a mistake that is not its own: no text of an exception and no name of a class.
FAILED = "the server has failed on this request; its log says why"
