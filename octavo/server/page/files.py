"""The page's own files: read once, served with a policy that lets them ask nobody else."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

from starlette.responses import Response
from starlette.types import Scope

from octavo.server.service import Service

FOLDER = Path(__file__).parent / "static"
TYPES = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml", ".html": "text/html"}
ASSETS = ("style.css", "icon.svg", "app.js", "chart.js", "chat.js", "history.js", "panels.js", "texts.js")
"""What the page loads, from `/page/`."""

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",  # asked for again each time, and answered with 304
}


async def page_index(service: Service, scope: Scope, body: None) -> Response:
    """`GET /`: the page, which learns from an attribute whether to ask for a key."""
    needs_key = "true" if service.keys.wanted else "false"
    content = _read("index.html").replace(b'data-needs-key=""', f'data-needs-key="{needs_key}"'.encode())
    return _answer(scope, content, ".html")


async def page_asset(service: Service, scope: Scope, body: None) -> Response:
    """`GET /page/NAME`: one of `ASSETS` (the table of routes holds no other)."""
    name = scope["path"].rpartition("/")[2]
    return _answer(scope, _read(name), Path(name).suffix)


@functools.cache
def _read(name: str) -> bytes:
    return (FOLDER / name).read_bytes()


def _answer(scope: Scope, content: bytes, suffix: str) -> Response:
    tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    headers = {**_HEADERS, "etag": tag}
    for name, value in scope["headers"]:
        if name == b"if-none-match" and value.decode("latin-1") == tag:
            return Response(b"", 304, headers=headers)
    return Response(content, headers=headers, media_type=TYPES[suffix])
