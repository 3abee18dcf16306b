"""HTTP requests by path, method and answer, as the usual exporters of web servers count them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, Metric
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_METHODS = frozenset({"GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"})


class HttpRequests:
    """Counts requests. Labels take few values: unknown paths and methods are counted together."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str, str]] = Counter()

    def counting(self, app: ASGIApp, paths: Iterable[str]) -> ASGIApp:
        """The application, counted.

        Args:
            paths: those that are served; `/a/{b}` stands for all that begin with `/a/`.
        """
        plain = {path for path in paths if "{" not in path}
        begins = [(path[: path.index("{")], path) for path in paths if "{" in path]

        def handler(path: str) -> str:
            if path in plain:
                return path
            return next((whole for begin, whole in begins if path.startswith(begin)), "none")

        async def counted(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                await app(scope, receive, send)
                return
            status = "none"

            async def noting(message: Message) -> None:
                nonlocal status
                if message["type"] == "http.response.start":
                    status = f"{message['status'] // 100}xx"
                await send(message)

            try:
                await app(scope, receive, noting)
            except Exception:
                status = "5xx"
                raise
            finally:
                method = scope["method"] if scope["method"] in _METHODS else "none"
                self._counts[handler(scope["path"]), method, status] += 1

        return counted

    def collect(self) -> Iterator[Metric]:
        """The counts now."""
        family = CounterMetricFamily(
            "http_requests",
            "HTTP requests that are over; status none: the client went away before an answer began.",
            labels=("handler", "method", "status"),
        )
        for labels, count in sorted(self._counts.items()):
            family.add_metric(labels, count)
        yield family
