"""Errors of requests, in the formats of OpenAI's and Anthropic's APIs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pydantic import ValidationError
from starlette.responses import JSONResponse

from forge_rl.errors import (
    ConfigError,
    DeadlineError,
    ForgeError,
    ModelError,
    PoisonError,
    ServiceError,
    WeightsError,
)

ANTHROPIC_PATH = "/v1/messages"
"""Prefix of the paths answered in the format of Anthropic's API."""
ENDS_ENGINES = "ends_engines"
"""Error code of a request that crashed several engines."""
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_OPENAI_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


@dataclass(eq=False)
class ApiError(Exception):
    """An error response to a client."""

    status: int
    """HTTP status."""
    message: str
    """Problem and hint, shown to the client."""
    param: str | None = None
    """Wrong parameter, such as "messages.0.content"."""
    code: str | None = None
    """OpenAI's error code, such as "context_length_exceeded"."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Extra headers of the response."""

    def body(self, is_anthropic: bool) -> dict[str, object]:
        """Return the response body in Anthropic's or OpenAI's format."""
        other = "invalid_request_error" if self.status < 500 else "api_error" if is_anthropic else "server_error"
        kind = (_ANTHROPIC_TYPES if is_anthropic else _OPENAI_TYPES).get(self.status, other)
        if not is_anthropic:
            return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}
        # Anthropic's errors have no field for the parameter.
        is_named = self.param is None or self.param in self.message
        message = self.message if is_named else f"{self.param}: {self.message}"
        return {"type": "error", "error": {"type": kind, "message": message}}

    def response(self, path: str) -> JSONResponse:
        """Return the response to a request for a path, in the format of its API."""
        return JSONResponse(self.body(path.startswith(ANTHROPIC_PATH)), self.status, headers=dict(self.headers))


def to_api_error(error: Exception) -> ApiError:
    """Translate an error for a client, without a ForgeError's hint, which is for the server's owner."""
    match error:
        case ApiError():
            return error
        # Engines and the chat template raise these for what a request asks of them.
        case ConfigError() | ModelError():
            return ApiError(400, error.message)
        # DeadlineError and PoisonError are ServiceErrors, and must be matched before that class.
        case DeadlineError():
            return ApiError(504, f"the engines took too long: {error.message}", code="timeout")
        case PoisonError():
            # A client error, as clients retry server errors, and this request would crash further engines.
            return ApiError(400, f"this request cannot be answered: {error.message}", code=ENDS_ENGINES)
        case ServiceError() | WeightsError():
            return ApiError(503, f"the engines cannot answer now: {error.message}", code="engine_unavailable")
    message = error.message if isinstance(error, ForgeError) else "the gateway failed; see its log"
    return ApiError(500, message, code="internal_error")


def invalid(error: ValidationError, prefix: str = "") -> ApiError:
    """Return the error for the first wrong field of a request; `prefix` is the path of the part that was validated."""
    first_error = error.errors(include_url=False, include_input=False, include_context=False)[0]
    # For unions, pydantic's path includes the branches tried; keep only the client's keys and indices.
    path = (str(part) for part in first_error["loc"] if isinstance(part, int) or part.isidentifier())
    param = ".".join([*([prefix] if prefix else []), *path]) or None
    if first_error["type"] == "missing":
        return ApiError(400, f"missing parameter: {param}", param=param, code="missing_required_parameter")
    return ApiError(400, f"invalid {param or 'body'}: {first_error['msg']}", param=param, code="invalid_value")
