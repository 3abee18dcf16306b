"""The ASGI application: routes, API keys, CORS, and errors in OpenAI's shape."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from typing import Any

from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from octavo.server.endpoints import Operation, not_found, operations
from octavo.server.errors import ApiError, as_api_error
from octavo.server.parsing import decode_body, read_body
from octavo.server.service import Service
from octavo.server.streaming import EventStream, run_while_connected
from octavo.server.tracing import with_trace_headers


def build_app(service: Service) -> ASGIApp:
    """The application over a service.

    Starlette's router and middleware without its application class, whose error handlers would wrap
    every chunk that is sent: each endpoint here answers for its own errors.
    """
    offered = operations(service.engine.config, service.config)
    paths = {operation.path: operation.path.replace("{model}", "{model:path}") for operation in offered}
    routes = [
        Route(paths[operation.path], _Endpoint(service, operation), methods=[operation.method])
        for operation in offered
    ]
    routes += [Route(path, _Refusal(405)) for path in paths.values()]
    app: ASGIApp = Router(routes, redirect_slashes=False, default=_Refusal(404))
    keys = service.config.all_api_keys()
    if keys:
        app = _KeyMiddleware(app, keys, offered)
    if service.config.allowed_origins:
        # Outermost: a preflight request carries no key.
        app = CORSMiddleware(
            app,
            allow_origins=service.config.allowed_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
        )
    if service.tracer is not None:
        app = with_trace_headers(app)
    return service.metrics.http.counting(app, paths)


class _Refusal:
    """Answers every request with 404, or with 405."""

    def __init__(self, status: int):
        self._status = status

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"{scope['type']} is not served")
        path = scope["path"]
        if self._status == 404:
            error = not_found(path)
        else:
            error = ApiError(
                405, f"{scope['method']} is not allowed on {path[:128]}", code="method_not_allowed"
            )
        await error.response()(scope, receive, send)


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
                body = decode_body(raw, operation.request, service.config.strict_fields)
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


class _KeyMiddleware:
    """Asks for an API key on every path but the open ones."""

    def __init__(self, app: ASGIApp, keys: list[str], offered: tuple[Operation, ...]):
        self._app = app
        # Digests have one length, so that the time of a comparison tells nothing about a key.
        self._digests = [_digest(key.encode()) for key in keys]
        self._open = {operation.path for operation in offered if operation.open}

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
