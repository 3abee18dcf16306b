"""A hub on loopback: as much of its HTTP interface as huggingface_hub asks for to fetch a model."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "5f" * 20
OTHER_COMMIT = "a1" * 20


@dataclass
class Hub:
    """What the hub holds and how it behaves; `log` has method, path and Range of each request.

    Attributes:
        repos: repository to revision (branch, tag, commit) to commit.
        files: (repository, commit) to path to content.
        refuse: repository to (status, X-Error-Code).
        token: what private repositories ask for.
        cut: paths whose first download ends half way.
    """

    repos: dict[str, dict[str, str]] = field(default_factory=dict)
    files: dict[tuple[str, str], dict[str, bytes]] = field(default_factory=dict)
    refuse: dict[str, tuple[int, str | None]] = field(default_factory=dict)
    token: str | None = None
    cut: set[str] = field(default_factory=set)
    log: list[tuple[str, str, str | None]] = field(default_factory=list)
    address: str = ""

    def add(self, repo: str, files: dict[str, bytes], commit: str = COMMIT, revision: str = "main") -> None:
        """A commit of a repository, found by a branch or tag and by its digits."""
        names = self.repos.setdefault(repo, {})
        names.update({revision: commit, commit: commit, commit[:9]: commit})
        self.files[repo, commit] = files

    def downloads(self) -> list[str]:
        """Files that were asked for, in order."""
        return [
            p.split("/resolve/")[1].partition("/")[2] for m, p, _ in self.log if m == "GET" and "resolve" in p
        ]


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    """The hub at `hub.address` inside the block."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            _answer(hub, self, body=True)

        def do_HEAD(self) -> None:
            _answer(hub, self, body=False)

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    hub.address = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _answer(hub: Hub, request: BaseHTTPRequestHandler, body: bool) -> None:
    path = unquote(urlsplit(request.path).path).strip("/")
    span = request.headers.get("Range")
    hub.log.append((request.command, "/" + path, span))
    api = path.startswith("api/models/")
    parts = path.removeprefix("api/models/").split("/")
    repo, rest = "/".join(parts[:2]), parts[2:]
    if repo in hub.refuse:
        status, code = hub.refuse[repo]
        return _send(request, status, b"{}", body, {"X-Error-Code": code} if code else {})
    if hub.token is not None and request.headers.get("Authorization") != f"Bearer {hub.token}":
        return _send(request, 401, b"{}", body, {"X-Error-Code": "RepoNotFound"})
    if repo not in hub.repos:
        return _send(request, 404, b"{}", body, {"X-Error-Code": "RepoNotFound"})
    revision = rest[1] if len(rest) > 1 else "main"
    commit = hub.repos[repo].get(revision)
    if commit is None:
        return _send(request, 404, b"{}", body, {"X-Error-Code": "RevisionNotFound"})
    files = hub.files[repo, commit]
    if api and rest[:1] in ([], ["revision"]):
        siblings = [{"rfilename": n, "size": len(c), "blobId": _etag(c)} for n, c in files.items()]
        info = {"id": repo, "modelId": repo, "sha": commit, "siblings": siblings, "private": False}
        return _send(request, 200, json.dumps(info).encode(), body, {})
    if api and rest[0] == "tree":
        tree = [{"type": "file", "path": n, "size": len(c), "oid": _etag(c)} for n, c in files.items()]
        return _send(request, 200, json.dumps(tree).encode(), body, {})
    name = "/".join(rest[2:])
    if rest[:1] != ["resolve"] or name not in files:
        return _send(request, 404, b"", body, {"X-Error-Code": "EntryNotFound"})
    content = files[name]
    headers = {"ETag": f'"{_etag(content)}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
    start = int(span.removeprefix("bytes=").partition("-")[0]) if span and body else 0
    if start:
        headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
    if body and name in hub.cut:
        hub.cut.discard(name)
        request.send_response(200)
        for key, value in {**headers, "Content-Length": str(len(content))}.items():
            request.send_header(key, value)
        request.end_headers()
        request.wfile.write(content[: len(content) // 2])
        request.wfile.flush()
        request.connection.close()
        request.close_connection = True
        return None
    return _send(request, 206 if start else 200, content[start:], body, headers)


def _etag(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


def _send(
    request: BaseHTTPRequestHandler, status: int, content: bytes, body: bool, headers: dict[str, str]
) -> None:
    request.send_response(status)
    for key, value in {**headers, "Content-Length": str(len(content))}.items():
        request.send_header(key, value)
    request.end_headers()
    if body:
        request.wfile.write(content)
