"""The JSON under the page: equal to /metrics, exact, without secrets and without texts unless asked for."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import msgspec
import pytest

from octavo.kv.pool import BlockPool
from octavo.server.metrics.families import Namer, ValueHistogram
from octavo.server.page.state import values
from tests.server.conftest import Running, running
from tests.server.fakes import FakeEngine
from tests.server.test_metrics import samples

TEXTS = "/v1/completions"


def state(server: Running) -> dict[str, Any]:
    answer = server.client.get("/server_state.json")
    assert answer.status_code == 200 and answer.headers["cache-control"] == "no-store"
    told: dict[str, Any] = answer.json()
    return told


def info(server: Running) -> dict[str, Any]:
    told: dict[str, Any] = server.client.get("/server_info.json").json()
    return told


def settings(server: Running) -> dict[str, Any]:
    return {one["name"]: one for one in info(server)["settings"]}


def test_values_are_those_of_the_metrics() -> None:
    with running(FakeEngine()) as server:
        for length in (3, 5, 70):
            server.post(TEXTS, {"prompt": "a" * length, "max_tokens": length, "n": 2})
        told = state(server)
        metrics = {name.partition(":")[2]: value for name, value in samples(
            server.client.get("/metrics").text).items() if name.startswith("octavo:")}  # fmt: skip
        plain = {name: value for name, value in told["metrics"].items() if "{" not in name}
        counted = {f"{name}_sum": h["sum"] for name, h in told["histograms"].items()}
        counted |= {f"{name}_count": sum(h["counts"]) for name, h in told["histograms"].items()}
        assert counted["time_to_first_token_seconds_count"] == 3
        missing = {"weights_info", "memory_bytes", "cache_config_info"}  # have labels of their own
        assert (plain | counted) == {
            name: value for name, value in metrics.items() if "/" not in name and name not in missing
        }
        assert told["metrics"]['request_success_total{finished_reason="length"}'] == 6
        assert told["metrics"]['memory_bytes{kind="weights"}'] == 60


def test_histograms_are_counted_by_bucket() -> None:
    histogram = ValueHistogram("time_seconds", "A time.", (0.001, 0.005, 1.0))
    for seconds in (0.0005, 0.001, 0.0011, 5000.0):
        histogram.observe(seconds)
    found = values([histogram.family(Namer("p", ("m", "0")))])[1]["time_seconds"]
    assert found.bounds == [0.001, 0.005, 1.0] and found.counts == [2, 1, 0, 1]
    assert found.sum == pytest.approx(5000.0026)


def test_requests_have_lengths_and_ages_and_no_texts() -> None:
    with running(FakeEngine(delay=0.05)) as server:
        asked = threading.Thread(
            target=server.post, args=(TEXTS, {"prompt": "secret words", "max_tokens": 40})
        )
        asked.start()
        until = time.monotonic() + 10
        while not (told := state(server))["requests"] and time.monotonic() < until:
            time.sleep(0.05)
        (request,) = told["requests"]
        assert request["state"] == "running" and request["max_tokens"] == 10 and request["age"] >= 1.5
        assert request["prompt"] is None and request["output"] is None
        assert "secret" not in json.dumps(told)
        asked.join(20)


def test_texts_only_where_the_settings_allow_them() -> None:
    with running(FakeEngine(), page_show_texts=True) as server:
        server.engine.live.add("r")
        (request,) = state(server)["requests"]
        assert (request["prompt"], request["output"]) == ("ask", "say")


def test_many_viewers_cost_one_question() -> None:
    engine = FakeEngine()
    asked = []
    answer = engine.describe_kv

    async def count(*args: Any) -> Any:
        asked.append(args)
        return await answer(*args)

    engine.describe_kv = count  # type: ignore[method-assign]
    with running(engine) as server:
        times = {state(server)["time"] for _ in range(5)}
        assert len(asked) == len(times) <= 3  # each answer lasts half a second
        time.sleep(0.6)
        assert state(server)["time"] not in times


def test_large_pools_are_asked_less_often() -> None:
    engine = FakeEngine()
    engine.pool = BlockPool(400_000)  # 4 seconds
    with running(engine) as server:
        first = state(server)["time"]
        time.sleep(0.7)
        assert state(server)["time"] == first


def test_settings_in_force_are_told_without_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_API_KEY", "fromtheenvironment")
    engine = FakeEngine(hf_token="hf_secret", download_dir="https://user:word@host/x", max_num_seqs=7)
    with running(engine, api_key=["firstkey", "secondkey"], served_model_name=["a", "b"]) as server:
        server.client.headers["authorization"] = "Bearer firstkey"
        found, text = settings(server), json.dumps(info(server))
        for secret in ("hf_secret", "firstkey", "secondkey", "fromtheenvironment", "word@", "user:"):
            assert secret not in text, secret
        assert found["hf_token"]["value"] is None and found["hf_token"]["secret"]
        assert found["api_key"]["value"] is None and found["api_key"]["changed"]
        assert found["max_num_seqs"] == {
            "name": "max_num_seqs", "section": "engine", "value": "7", "default": "256", "changed": True,
            "secret": False,
        }  # fmt: skip
        assert found["download_dir"]["value"] == '"https://…@host/x"'
        # What was left open is told as it was chosen.
        assert found["max_num_batched_tokens"]["value"] == "2048"
        assert not found["max_num_batched_tokens"]["changed"]
        assert info(server)["models"] == ["a", "b"] and info(server)["sampling"]["temperature"] == 1.0


def test_a_long_setting_is_cut() -> None:
    with running(FakeEngine(chat_template="{{ 1 }}" + "x" * 1000)) as server:
        assert len(settings(server)["chat_template"]["value"]) == 201


def test_what_the_model_can_be_asked_for() -> None:
    def interface(engine: FakeEngine) -> str:
        with running(engine) as server:
            return str(info(server)["interface"])

    assert interface(FakeEngine()) == "chat"
    without = FakeEngine()
    without.tokenizer.has_chat_template = False
    assert interface(without) == "completion"
    ids = FakeEngine()
    ids.tokenizer = None
    assert interface(ids) == "tokens"
    vectors = FakeEngine()
    vectors.facts.pooling_type = "LAST"
    assert interface(vectors) == "embedding"


def test_the_state_is_small() -> None:
    with running(FakeEngine()) as server:
        answer = server.client.get("/server_state.json").content
        assert len(answer) < 16_000 and len(msgspec.json.decode(answer)["kv"]["cells"]) <= 1024
