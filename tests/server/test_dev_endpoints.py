"""Endpoints for development over a pretend engine."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator

import httpx
import pytest

from tests.server.conftest import Running, running
from tests.server.fakes import FakeEngine
from tests.server.test_bad_input import check_error

PATHS = [("POST", "/reset_prefix_cache"), ("POST", "/sleep"), ("POST", "/wake_up"), ("GET", "/is_sleeping")]


@pytest.fixture
def dev() -> Iterator[Running]:
    with running(FakeEngine(), enable_dev_endpoints=True) as server:
        yield server


@pytest.mark.parametrize(("method", "path"), PATHS)
def test_not_there_unless_asked_for(server: Running, method: str, path: str) -> None:
    error = check_error(server.client.request(method, path), 404)
    assert error["message"].endswith("on a server that was started with --enable-dev-endpoints")
    assert server.engine.level == 0


def test_a_sleeping_server_refuses_with_the_remedy(dev: Running) -> None:
    assert dev.client.get("/is_sleeping").json() == {"is_sleeping": False}
    slept = dev.post("/sleep?level=2&mode=abort").json()
    assert slept == {"is_sleeping": True, "level": 2, "freed_bytes": 1000, "seconds": 0.25}
    assert (dev.engine.level, dev.engine.mode) == (2, "abort")
    for path, body in (
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/completions", {"prompt": "a", "stream": True}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/embeddings", {"input": "a"}),
        ("/v1/score", {"text_1": "a", "text_2": "b"}),
    ):
        error = check_error(dev.post(path, body), 503)
        assert error["code"] == "engine_asleep" and "/wake_up" in error["message"]
    assert dev.client.get("/health").status_code == 200
    assert check_error(dev.client.get("/ready"), 503)["code"] == "engine_asleep"
    assert dev.client.get("/health").status_code == 200
    assert check_error(dev.post("/sleep"))["message"].startswith("the engine sleeps already")
    assert dev.post("/wake_up").json()["is_sleeping"] is False
    assert dev.client.get("/ready").status_code == 200
    assert dev.post("/v1/completions", {"prompt": "a"}).status_code == 200
    check_error(dev.post("/wake_up"))


def test_requests_that_sleep_ends_are_told_so() -> None:
    """503, not 500: nothing is wrong with them, nor with the server."""
    with running(FakeEngine(delay=0.02), enable_dev_endpoints=True) as server:
        body = {"prompt": "abc", "max_tokens": 150}
        whole: list[httpx.Response] = []
        thread = threading.Thread(target=lambda: whole.append(server.post("/v1/completions", body)))
        thread.start()
        with server.client.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
            lines = response.iter_lines()
            next(lines)
            while len(server.engine.live) < 2:
                time.sleep(0.005)
            assert server.post("/sleep?mode=abort").status_code == 200
            events = [line.removeprefix("data: ") for line in lines if line]
        thread.join(10)
        assert json.loads(events[-2])["error"]["code"] == "request_aborted" and events[-1] == "[DONE]"
        error = check_error(whole[0], 503)
        assert error["code"] == "request_aborted" and "put to sleep" in error["message"]
        text = server.client.get("/metrics").text
        assert re.search(r'request_success_total{.*finished_reason="abort".*} 2.0', text)
        assert re.search(r'request_success_total{.*finished_reason="error".*} 0.0', text)


@pytest.mark.parametrize(
    ("path", "param"),
    [("/sleep?level=3", "level"), ("/sleep?level=x", "level"), ("/sleep?mode=keep", "mode"),
     ("/wake_up?tags=weights", "tags")],
)  # fmt: skip
def test_what_is_wrong_is_named(dev: Running, path: str, param: str) -> None:
    assert check_error(dev.post(path))["param"] == param
    assert dev.engine.level == 0


def test_the_prefix_cache_is_reset(dev: Running) -> None:
    ask = {"prompt": "a" * 40, "max_tokens": 1}

    def cached() -> int:
        usage = dev.post("/v1/completions", ask).json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert [cached(), cached()] == [0, 32]
    assert dev.post("/reset_prefix_cache").status_code == 200
    assert [cached(), cached()] == [0, 32]
