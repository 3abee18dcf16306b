"""The ASGI application: routes, API keys, CORS, and errors in OpenAI's shape."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from octavo.server.endpoints import OPERATIONS, Operation, not_found
from octavo.server.errors import ApiError, as_api_error
from octavo.server.parsing import decode_body, read_body
from octavo.server.service import Service
from octavo.server.streaming import EventStream, run_while_connected


def build_app(service: Service) -> Starlette:
    """The application over a service."""
    routes = [
        Route(
            operation.path.replace("{model}", "{model:path}"),
            _Endpoint(service, operation),
            methods=[operation.method],
        )
        for operation in OPERATIONS
    ]
    middleware = []
    if service.config.allowed_origins:
        # Outermost: a preflight request carries no key.
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=service.config.allowed_origins,
                allow_methods=["GET", "POST"],
                allow_headers=["*"],
            )
        )
    keys = service.config.all_api_keys()
    if keys:
        middleware.append(Middleware(_KeyMiddleware, keys=keys))
    return Starlette(routes=routes, middleware=middleware, exception_handlers={HTTPException: _http_error})


class _Endpoint:
    """Runs one operation: body, handler, answer; every failure becomes an error in OpenAI's shape."""

    def __init__(self, service: Service, operation: Operation):
        self._service = service
        self._operation = operation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        operation, service = self._operation, self._service
        try:
            body: Any = None
            if operation.generates:
                service.check_accepting()
            if operation.request is not None:
                raw = await read_body(scope, receive, service.config.max_request_bytes)
                body = decode_body(raw, operation.request)
        except Exception as error:
            await as_api_error(error).response()(scope, receive, send)
            return
        work = self._answer(scope, receive, send, body)
        if operation.request is not None:
            await run_while_connected(work, receive)
        else:
            await work

    async def _answer(self, scope: Scope, receive: Receive, send: Send, body: Any) -> None:
        service = self._service
        job = asyncio.current_task()
        assert job is not None
        response: Any = None
        if self._operation.generates:
            service.jobs.add(job)
        try:
            response = await self._operation.handler(service, scope, body)
            await response(scope, receive, send)
        except asyncio.CancelledError:
            if job not in service.expired:
                raise
            await _fail(response, _EXPIRED, scope, receive, send)
        except Exception as error:
            await _fail(response, as_api_error(error), scope, receive, send)
        finally:
            service.jobs.discard(job)


_EXPIRED = ApiError(
    503, "the server shut down before the request was finished: send it to another one", code="shutting_down"
)


async def _fail(response: Any, error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    if isinstance(response, EventStream) and response.started:
        await response.fail(error, send)
    else:
        await error.response()(scope, receive, send)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        return not_found(request.url.path).response()
    message = (
        f"{request.method} is not allowed on {request.url.path}" if error.status_code == 405 else error.detail
    )
    headers = dict(error.headers) if error.headers else None
    return ApiError(error.status_code, message, code="method_not_allowed", headers=headers).response()


class _KeyMiddleware:
    """Asks for an API key on every path but the open ones."""

    def __init__(self, app: ASGIApp, keys: list[str]):
        self._app = app
        # Digests have one length, so that the time of a comparison tells nothing about a key.
        self._digests = [_digest(key.encode()) for key in keys]
        self._open = {operation.path for operation in OPERATIONS if operation.open}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in self._open or self._allowed(scope):
            await self._app(scope, receive, send)
            return
        error = ApiError(
            401,
            "the API key is missing or wrong: send `Authorization: Bearer KEY`",
            code="invalid_api_key",
            headers={"www-authenticate": "Bearer"},
        )
        await error.response()(scope, receive, send)

    def _allowed(self, scope: Scope) -> bool:
        given = b""
        for name, value in scope["headers"]:
            if name == b"authorization":
                scheme, _, key = value.partition(b" ")
                given = key.strip() if scheme.lower() == b"bearer" else b""
        digest = _digest(given)
        # Every key is compared, so that the time does not tell which one came near.
        return any([hmac.compare_digest(digest, known) for known in self._digests])


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
