"""The ASGI application: routes, API keys, CORS, and errors in OpenAI's shape."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any

from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from octavo.server.access_log import AccessLogMiddleware
from octavo.server.api_keys import ApiKeys
from octavo.server.endpoints import Operation, not_found, operations
from octavo.server.errors import ApiError, as_api_error
from octavo.server.parsing import check_type, decode_body, read_body
from octavo.server.request_ids import REQUEST_ID, RequestIdMiddleware
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
    if service.keys.wanted:
        app = _KeyMiddleware(app, service.keys, offered)
    app = _SiteMiddleware(app, service.config.allowed_origins or [])
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
    app = service.metrics.http.counting(app, paths)
    if service.config.enable_request_id_headers:
        app = RequestIdMiddleware(app)
    if service.access_log is not None:
        app = AccessLogMiddleware(app, service.access_log)
    if service.config.root_path is not None:
        app = _PrefixMiddleware(app, service.config.root_path)
    return app


class LoadingGate:
    """The application while there is no engine yet: it answers 503 to all, and then is the real one."""

    app: ASGIApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.app is not None:
            await self.app(scope, receive, send)
        else:
            await _LOADING.response()(scope, receive, send)


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
                check_type(scope)
                raw = await read_body(scope, receive, service.config.max_request_bytes)
                body = decode_body(raw, operation.request, service.config.strict_fields)
        except Exception as error:
            await as_api_error(error).response()(scope, receive, send)
            return
        given = getattr(body, "request_id", None)
        if isinstance(given, str):
            scope[REQUEST_ID] = given
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
        timer: asyncio.TimerHandle | None = None
        if self._operation.generates:
            service.jobs.add(job)
            if (limit := service.config.request_timeout) is not None:
                timer = asyncio.get_running_loop().call_later(limit, service.end, job, _timed_out(limit))
        try:
            if self._operation.generates and service.draining:  # begun while the body was on its way
                service.check_accepting()
            response = await self._operation.handler(service, scope, body)
            await response(scope, receive, send)
        except asyncio.CancelledError:
            error = service.ended.get(job)
            if error is None:
                raise
            # A client that does not read cannot be told.
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(_fail(response, error, scope, receive, send), _TELLING_SECONDS)
        except Exception as error:
            await _fail(response, as_api_error(error), scope, receive, send)
        finally:
            if timer is not None:
                timer.cancel()
            service.jobs.discard(job)
            service.ended.pop(job, None)


_TELLING_SECONDS = 2.0
_LOADING = ApiError(
    503, "the model is being loaded: send the request later", code="loading", headers={"retry-after": "5"}
)


def _timed_out(limit: float) -> ApiError:
    return ApiError(
        504, f"the request was not finished within {limit:g} s (--request-timeout)", code="request_timeout"
    )


async def _fail(response: Any, error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    if isinstance(response, EventStream) and response.started:
        await response.fail(error, send)
    else:
        await error.response()(scope, receive, send)


class _PrefixMiddleware:
    """Takes off the path under which a proxy offers the server, where the proxy has not."""

    def __init__(self, app: ASGIApp, prefix: str):
        self._app = app
        self._prefix = prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path, prefix = scope["path"], self._prefix
            if path == prefix:  # what the page asks for is relative to its address
                await Response(status_code=307, headers={"location": f"{prefix}/"})(scope, receive, send)
                return
            if path.startswith(f"{prefix}/"):
                scope["path"] = path[len(prefix) :]
        await self._app(scope, receive, send)


class _SiteMiddleware:
    """Refuses what a web page of another site sends, unless its origin is allowed.

    CORS keeps such a page from reading answers; but requests of a simple kind (a POST without a body, say)
    are sent without asking first, and would put an engine to sleep. Browsers mark them by `Sec-Fetch-Site`.
    """

    def __init__(self, app: ASGIApp, allowed: Sequence[str]):
        self._app = app
        self._allowed = {origin.encode() for origin in allowed}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] not in ("GET", "HEAD", "OPTIONS"):
            headers = dict(scope["headers"])
            site, origin = headers.get(b"sec-fetch-site"), headers.get(b"origin", b"")
            if site in (b"cross-site", b"same-site") and not self._allowed & {b"*", origin}:
                await _OTHER_SITE.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)


_OTHER_SITE = ApiError(
    403,
    "pages of other sites may not use this server: start it with their origin in --allowed-origins",
    code="origin_not_allowed",
)


class _KeyMiddleware:
    """Asks for an API key on every path but the open ones."""

    def __init__(self, app: ASGIApp, keys: ApiKeys, offered: tuple[Operation, ...]):
        self._app = app
        self._keys = keys
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
        return self._keys.allow(given)
