"""From the bytes of a request to a typed body, within bounds."""

from __future__ import annotations

import asyncio
import difflib
import functools
import itertools
import logging
import re
import typing
from collections.abc import Callable, Set
from typing import Any, Literal, TypeVar

import msgspec
from starlette.types import Receive, Scope

from octavo.server.errors import ApiError, bad_request
from octavo.setting_values import members_of

logger = logging.getLogger(__name__)

MAX_DEPTH = 32
BODY_TIMEOUT = 120.0
"""Seconds within which a body must have arrived: a client that trickles holds no connection for ever."""

DISCARD = 4
"""A body up to this many times the limit is read and thrown away, since most clients look at the answer
only once they have sent everything."""

MOST_TOLD = 16
"""Unknown fields of one request that the log tells."""

MOST_NAMES = 1024
"""Unknown fields that it tells in all."""

_told: set[str] = set()

T = TypeVar("T", bound=msgspec.Struct)


def _one_or_none(value: Any) -> bool:
    return value in (None, 1)


def _empty(value: Any) -> bool:
    return not value


NOT_BUILT: dict[str, Callable[[Any], bool]] = {
    "tools": _empty,  # of completions, which have no form for them
    "tool_choice": lambda value: value in (None, "none", "auto"),
    "functions": _empty,
    "function_call": lambda value: value in (None, "none", "auto"),
    "audio": _empty,
    "modalities": lambda value: value is None or value == ["text"],
    "prediction": _empty,
    "web_search_options": lambda value: value is None,
    "mm_processor_kwargs": _empty,
    "prompt_embeds": _empty,
    "suffix": _empty,
    "best_of": _one_or_none,
    "use_beam_search": _empty,
    "length_penalty": _one_or_none,  # of beam search
    "early_stopping": _empty,  # likewise
    "logits_processors": _empty,
    "kv_transfer_params": _empty,
    "lora_request": _empty,
}
"""Fields whose features this version lacks, each with the values that ask for nothing and may pass."""


def check_type(scope: Scope) -> None:
    """Refuse a body that is not declared to be plain JSON.

    A web page of another origin may send other types without asking first, so that this is what keeps such
    pages from using a server that their reader can reach.

    Raises:
        ApiError: 415.
    """
    kind = coding = b""
    for name, value in scope["headers"]:
        if name == b"content-type":
            kind = value.partition(b";")[0].strip().lower()
        elif name == b"content-encoding":
            coding = value.strip().lower()
    if kind != b"application/json" and not (kind.startswith(b"application/") and kind.endswith(b"+json")):
        given = f"is {kind[:64].decode('latin-1')!r}" if kind else "is missing"
        raise ApiError(
            415, f"Content-Type {given}: send application/json", param="Content-Type", code="unsupported_type"
        )
    if coding not in (b"", b"identity"):
        raise ApiError(
            415,
            f"Content-Encoding {coding[:64].decode('latin-1')!r} is not supported: send the body as it is",
            param="Content-Encoding",
            code="unsupported_type",
        )


async def read_body(scope: Scope, receive: Receive, limit: int) -> bytes:
    """The whole body, at most `limit` bytes.

    Raises:
        ApiError: 413 when it is larger, 408 when it comes too slowly, 400 when the client stops early.
    """
    too_large = ApiError(
        413,
        f"the request body is larger than {limit} bytes: send less, or start the server with a larger "
        "--max-request-bytes",
        code="request_too_large",
        headers={"connection": "close"},
    )
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit() and int(value) > limit * DISCARD:
            raise too_large
    parts: list[bytes] = []
    size = 0
    more = True

    async def read_all() -> None:
        nonlocal size, more
        while more and size <= limit * DISCARD:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise bad_request("the client went away before its request was complete")
            part = message.get("body", b"")
            size += len(part)
            if size <= limit:
                parts.append(part)
            else:
                parts.clear()
            more = message.get("more_body", False)

    try:
        await asyncio.wait_for(read_all(), BODY_TIMEOUT)
    except asyncio.TimeoutError:
        raise ApiError(
            408,
            f"the request body did not arrive within {BODY_TIMEOUT:g} seconds",
            code="timeout",
            headers={"connection": "close"},
        ) from None
    if size > limit:
        raise too_large
    return b"".join(parts)


def decode_body(body: bytes, kind: type[T], strict: bool = False) -> T:
    """Parse a JSON body.

    Fields of features that are not built are refused; unknown ones are ignored with a warning in
    the log that names the nearest known field, or refused too if `strict`.

    Raises:
        ApiError: 400 with the field at fault in `param`.
    """
    try:
        given = _raw_decoder().decode(body)
        unknown = given.keys() - _known_fields(kind)
        for name in unknown & NOT_BUILT.keys():
            _refuse_unless_harmless(name, given[name])
        _tell_unknown(unknown - NOT_BUILT.keys(), kind, strict)
        for name, inner in _objects(kind).items():
            _tell_unknown(_names_in(given.get(name)) - _known_fields(inner), inner, strict, f"{name}.")
        value: T = _decoder(kind).decode(body)
    except RecursionError:
        raise bad_request("the request body is nested too deeply") from None
    except msgspec.ValidationError as error:
        raise _explain(str(error), kind) from None
    except msgspec.DecodeError as error:
        raise bad_request(f"the request body is not valid JSON: {_json_problem(body, str(error))}") from None
    except UnicodeDecodeError:
        raise bad_request("the request body is not valid UTF-8") from None
    return value


def check_depth(value: Any, name: str, limit: int = MAX_DEPTH) -> None:
    """Refuse free-form JSON that is nested deeper than `limit`.

    Raises:
        ApiError: 400 naming the field.
    """
    level = [value]
    for _ in range(limit):
        level = [
            child
            for item in level
            if isinstance(item, (dict, list))
            for child in (item.values() if isinstance(item, dict) else item)
        ]
        if not level:
            return
    raise bad_request(f"{name} is nested deeper than {limit} levels", name)


@functools.cache
def _raw_decoder() -> msgspec.json.Decoder[dict[str, msgspec.Raw]]:
    return msgspec.json.Decoder(dict[str, msgspec.Raw])


@functools.cache
def _decoder(kind: type[T]) -> msgspec.json.Decoder[T]:
    return msgspec.json.Decoder(kind)


@functools.cache
def _known_fields(kind: type[msgspec.Struct]) -> frozenset[str]:
    return frozenset(kind.__struct_fields__)


def _refuse_unless_harmless(name: str, raw: msgspec.Raw) -> None:
    if not NOT_BUILT[name](msgspec.json.decode(raw)):
        raise ApiError(
            400,
            f"{name} is not supported by this version: leave it out",
            param=name,
            code="unsupported_parameter",
        )


def _tell_unknown(names: Set[str], kind: type[msgspec.Struct], strict: bool, where: str = "") -> None:
    """Refuse the first of some names, or write a line about each: once, and about few, so that neither a busy
    client nor one that makes names up floods the log, or keeps others waiting.

    Args:
        where: what stands before them, of fields of an object.
    """
    for name in itertools.islice(names, MOST_TOLD):
        full = where + name[:64]
        if strict:
            raise ApiError(
                400,
                f"{full!r} is no field of this request{_nearest(name[:64], kind)}: leave it out (this server "
                "was started with --strict-fields)",
                param=full,
                code="unknown_parameter",
            )
        if full not in _told and len(_told) < MOST_NAMES:
            _told.add(full)
            logger.warning("ignored the unknown request field %r%s", full, _nearest(name[:64], kind))


@functools.cache
def _objects(kind: type[msgspec.Struct]) -> dict[str, type[msgspec.Struct]]:
    """The fields that are objects with fields of their own, which a client may misspell too."""
    found: dict[str, type[msgspec.Struct]] = {}
    for name, hint in typing.get_type_hints(kind).items():
        for member in members_of(hint):
            if isinstance(member, type) and issubclass(member, msgspec.Struct):
                found[name] = member
    return found


def _names_in(raw: msgspec.Raw | None) -> set[str]:
    """The names in an object; none of something else, which is refused where it is typed."""
    if raw is None or not bytes(raw).lstrip().startswith(b"{"):
        return set()
    return set(_raw_decoder().decode(raw))


def _nearest(name: str, kind: type[msgspec.Struct]) -> str:
    """A hint at the known field that a client may have meant; empty where none is near."""
    near = difflib.get_close_matches(name, _known_fields(kind), 1)
    return f" (did the client mean {near[0]}?)" if near else ""


def _words_for(kind: type[msgspec.Struct], where: str) -> list[str]:
    """The words of which a field takes one; `where` is its path, as in `a.b[0].c`."""
    hints: list[Any] = [kind]
    for step in re.findall(r"[^.[\]]+|\[[^\]]*\]", where):
        members = [member for hint in hints for member in (typing.get_args(hint) or (hint,))]
        if step.startswith("["):
            hints = [arguments[-1] for hint in [*hints, *members] if (arguments := typing.get_args(hint))]
        else:
            structs = [m for m in members if isinstance(m, type) and issubclass(m, msgspec.Struct)]
            hints = [found[step] for m in structs if step in (found := typing.get_type_hints(m))]
    literals = [
        m for hint in hints for m in (hint, *typing.get_args(hint)) if typing.get_origin(m) is Literal
    ]
    return [str(word) for literal in literals for word in typing.get_args(literal)]


def _explain(message: str, kind: type[msgspec.Struct]) -> ApiError:
    found = re.fullmatch(r"(.*?)(?: - at `(?:key in )?\$\.?(.*)`)?", message, re.DOTALL)
    what, where = (found.group(1), found.group(2)) if found else (message, None)
    missing = re.fullmatch(r"Object missing required field `(.*)`", what)
    if missing:
        where = f"{where}.{missing.group(1)}" if where else missing.group(1)
        return ApiError(400, f"{where} is missing", param=where, code="missing_required_parameter")
    what = what[:1].lower() + what[1:].replace("`", "")
    if where and what.startswith("invalid enum value") and (words := _words_for(kind, where)):
        what = f"{what.removeprefix('invalid enum value ')} is not known: choose {', '.join(words)}"
    return bad_request(f"{where}: {what}" if where else f"the request body: {what}", where or None)


def _json_problem(body: bytes, message: str) -> str:
    if "truncated" in message and re.search(rb"\\u[dD][89abAB]", body):
        return f"{message}, or holds half of a surrogate pair"
    return message
