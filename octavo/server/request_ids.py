"""The id of a request, its client's or a new one: in the access log, in the answer's `id` and in a header."""

from __future__ import annotations

import secrets

from starlette.types import ASGIApp, Message, Receive, Scope, Send

REQUEST_ID = "octavo.request_id"
"""Key of a scope under which the request's id stands once it is known."""

MAX_ID_LENGTH = 256


def is_request_id(text: str) -> bool:
    """Whether an id may enter logs, answers and headers: 1 to 256 printable ASCII characters, no spaces."""
    return 1 <= len(text) <= MAX_ID_LENGTH and all("!" <= char <= "~" for char in text)


def give_id(scope: Scope) -> None:
    """Give a request that brings no id one of ours, as if its client had sent it."""
    if REQUEST_ID in scope:
        return
    for name, value in scope["headers"]:
        if name == b"x-request-id" and value:
            scope[REQUEST_ID] = value.decode("latin-1")
            return
    scope[REQUEST_ID] = secrets.token_hex(16)
    scope["headers"] = [*scope["headers"], (b"x-request-id", scope[REQUEST_ID].encode())]


class RequestIdMiddleware:
    """Tells every answer's request id in its header `X-Request-Id`; an id that is refused isn't told."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        give_id(scope)

        async def telling(message: Message) -> None:
            if message["type"] == "http.response.start" and is_request_id(scope[REQUEST_ID]):
                own = (b"x-request-id", scope[REQUEST_ID].encode())
                message = {**message, "headers": [*message.get("headers", ()), own]}
            await send(message)

        await self._app(scope, receive, telling)
