"""Errors as the OpenAI API shows them: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import logging

import msgspec
from starlette.responses import Response

from octavo.errors import (
    EngineAsleepError,
    EngineDeadError,
    EngineRestartingError,
    RequestAbortedError,
    RequestError,
    RequestFailedError,
)

logger = logging.getLogger(__name__)


class ErrorBody(msgspec.Struct):
    """What went wrong: for people (`message`), for programs (`type`, `code`), and with which field."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(msgspec.Struct):
    """Body of every answer whose status is 400 or above."""

    error: ErrorBody


class ApiError(Exception):
    """An answer with an error status. `code` is a stable word for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: dict[str, str] | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.headers = headers

    @property
    def kind(self) -> str:
        """OpenAI's error type for this status."""
        if self.status == 401:
            return "authentication_error"
        return "invalid_request_error" if self.status < 500 else "server_error"

    def body(self) -> ErrorResponse:
        """The error in OpenAI's shape."""
        return ErrorResponse(ErrorBody(str(self), self.kind, self.param, self.code))

    def response(self) -> Response:
        """The whole HTTP answer."""
        content = msgspec.json.encode(self.body())
        return Response(content, self.status, headers=self.headers, media_type="application/json")


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """400: the request itself is at fault."""
    return ApiError(400, message, param=param, code=code or "invalid_value")


def as_api_error(error: Exception) -> ApiError:
    """Any exception as an answer; what a client cannot cure is logged and not shown."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        return bad_request(str(error), error.param, error.code)
    if isinstance(error, EngineRestartingError):
        return ApiError(503, str(error), code="engine_restarting", headers={"retry-after": "10"})
    if isinstance(error, EngineDeadError):
        return ApiError(503, f"the engine has stopped: {error}; restart the server", code="engine_dead")
    if isinstance(error, EngineAsleepError):
        return ApiError(503, str(error), code="engine_asleep")
    if isinstance(error, RequestAbortedError):
        return ApiError(503, str(error), code="request_aborted")
    if isinstance(error, RequestFailedError):
        return ApiError(500, str(error), code="request_failed")
    logger.error("request failed", exc_info=error)
    return ApiError(500, "internal error; the server's log has the details", code="internal_error")
