"""Errors of requests, in the shapes that OpenAI's and Anthropic's clients know."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import ValidationError

from forge_rl.errors import ConfigError, DeadlineError, ForgeError, ModelError, ServiceError, WeightsError

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


class ApiError(Exception):
    """An error that a client is answered with.

    Args:
        status: HTTP status.
        message: what is wrong, with a hint; shown to the client.
        param: the parameter that is wrong, such as "messages.0.content".
        code: OpenAI's error code, such as "context_length_exceeded".
        headers: extra headers of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers or {}

    def openai(self) -> dict[str, object]:
        """Return the body that OpenAI's clients know."""
        kind = _OPENAI_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def anthropic(self) -> dict[str, object]:
        """Return the body that Anthropic's clients know."""
        kind = _ANTHROPIC_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        message = f"{self.param}: {self.message}" if self.param else self.message
        return {"type": "error", "error": {"type": kind, "message": message}}


def from_validation_error(error: ValidationError) -> ApiError:
    """Name the first wrong field of a request."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {first['msg']}", code="invalid_json")
    # Of a union, pydantic names each branch that was tried; what the client wrote are its keys and places.
    path = [str(part) for part in first["loc"] if isinstance(part, int) or str(part).isidentifier()]
    param = ".".join(path) or None
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"unknown parameter: {param}", param=param, code="unknown_parameter")
    if first["type"] == "missing":
        return ApiError(400, f"missing parameter: {param}", param=param, code="missing_required_parameter")
    return ApiError(400, f"invalid {param or 'body'}: {first['msg']}", param=param, code="invalid_value")


def from_forge_error(error: ForgeError) -> ApiError:
    """Translate a ForgeError for a client; its hint is for the server's owner and left out."""
    match error:
        case ConfigError() | ModelError():
            return ApiError(400, error.message)
        case DeadlineError():
            return ApiError(504, f"the engines took too long: {error.message}", code="timeout")
        case ServiceError() | WeightsError():
            return ApiError(503, f"the engines cannot answer now: {error.message}", code="engine_unavailable")
    return ApiError(500, error.message, code="internal_error")


def to_api_error(error: ApiError | ValidationError | ForgeError) -> ApiError:
    """Translate an error for a client."""
    match error:
        case ValidationError():
            return from_validation_error(error)
        case ForgeError():
            return from_forge_error(error)
    return error


def context_length(prompt_tokens: int, max_tokens: int, limit: int, param: str = "messages") -> ApiError:
    """Make the error of a prompt that is, with its completion, longer than the model takes."""
    return ApiError(
        400,
        f"This model's maximum context length is {limit} tokens. However, you requested {prompt_tokens + max_tokens} "
        f"tokens ({prompt_tokens} in the {param}, {max_tokens} in the completion). Please reduce the length of the "
        f"{param} or completion.",
        param=param,
        code="context_length_exceeded",
    )
