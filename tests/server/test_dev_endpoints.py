"""Endpoints for development over a pretend engine."""

from __future__ import annotations

from collections.abc import Iterator

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
    check_error(server.client.request(method, path), 404)
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
