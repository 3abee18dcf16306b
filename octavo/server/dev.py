"""Endpoints for development: the prefix cache, and an engine that sleeps."""

from __future__ import annotations

from urllib.parse import parse_qs

import msgspec
from msgspec import Struct
from starlette.responses import Response
from starlette.types import Scope

from octavo.messages import SleepStatus
from octavo.server.errors import bad_request
from octavo.server.protocol.answers import StatusResponse
from octavo.server.service import Service
from octavo.server.streaming import AsgiResponse

MODES = ("wait", "abort")


class IsSleepingResponse(Struct):
    """Answer of GET /is_sleeping."""

    is_sleeping: bool


class SleepResponse(IsSleepingResponse):
    """Answer of POST /sleep and POST /wake_up."""

    level: int
    """At which the engine sleeps; 0: it is awake."""
    freed_bytes: int
    seconds: float


async def reset_prefix_cache(service: Service, scope: Scope, body: None) -> AsgiResponse:
    """POST /reset_prefix_cache."""
    await service.engine.reset_prefix_cache()
    return _json(StatusResponse())


async def sleep(service: Service, scope: Scope, body: None) -> AsgiResponse:
    """POST /sleep.

    Raises:
        ApiError, RequestError: 400 for a wrong level or mode, or an engine that cannot.
    """
    query = parse_qs(scope["query_string"].decode("latin-1"), keep_blank_values=True)
    level, mode = query.get("level", ["1"])[-1], query.get("mode", ["wait"])[-1]
    if level not in ("1", "2"):
        raise bad_request(f"level={level[:64]!r} is not valid: give 1 or 2", "level")
    if mode not in MODES:
        raise bad_request(f"mode={mode[:64]!r} is not valid: give {' or '.join(MODES)}", "mode")
    return _sleep_status(await service.engine.sleep(int(level), mode))


async def wake_up(service: Service, scope: Scope, body: None) -> AsgiResponse:
    """POST /wake_up.

    Raises:
        ApiError, RequestError: 400 where the engine is awake, or only a part is to wake up.
        RequestFailedError: it cannot, and sleeps on.
    """
    if b"tags=" in scope["query_string"]:
        raise bad_request("tags is not supported by this version: leave it out, all wakes up at once", "tags")
    return _sleep_status(await service.engine.wake_up())


async def is_sleeping(service: Service, scope: Scope, body: None) -> AsgiResponse:
    """GET /is_sleeping."""
    return _json(IsSleepingResponse(service.engine.is_sleeping))


def _sleep_status(status: SleepStatus) -> Response:
    return _json(SleepResponse(status.level > 0, status.level, status.freed_bytes, round(status.seconds, 3)))


def _json(value: Struct) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
