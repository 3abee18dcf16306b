"""Board and rules in deploy/: they ask for what a server exports, and a real Prometheus answers."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from octavo.messages import CoreStats
from octavo.server.metrics import Metrics
from tests import tiny
from tests.deploy.monitoring import BOARD, RULES, board_queries, metric_names, rule_queries, rules
from tests.server.test_real_engine import TEXTS, Octavo, _children, octavo

FOLDER = RULES.parent
SPECULATION = '{"method": "ngram", "num_speculative_tokens": 3}'


def exported() -> set[str]:
    """Names of all series of a server."""
    stats = CoreStats(spec_drafts=1, spec_accepted_per_pos=[1])
    text = Metrics(lambda: stats, "m", 128, lambda: {"weights": 1}).render().decode()
    names = {sample.name for family in text_string_to_metric_families(text) for sample in family.samples}
    # Once a request came.
    return names | {"http_requests_total", "up"}


def test_every_name_is_one_that_a_server_exports() -> None:
    names = exported()
    for where, query in board_queries() + rule_queries():
        read = metric_names(query)
        assert read or "model:octavo_" in query, f"{where}: {query} reads nothing"
        assert read <= names, f"{where} asks for {read - names}"


def test_alerts_on_recorded_series_name_one_that_is_recorded() -> None:
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    used = {word for _, query in rule_queries() for word in query.split() if word.startswith("model:")}
    assert used and used <= recorded


def test_alerts_say_what_is_wrong_and_how_bad() -> None:
    alerts = [rule for rule in rules() if "alert" in rule]
    assert len({alert["alert"] for alert in alerts}) == len(alerts) >= 7
    for alert in alerts:
        assert alert["labels"]["severity"] in ("warning", "critical")
        assert set(alert["annotations"]) == {"summary", "description"}


def test_the_board_s_panels_have_ids_and_places_of_their_own() -> None:
    board = json.loads(BOARD.read_text())
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids) > 20
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
    variables = {variable["name"] for variable in board["templating"]["list"]}
    assert variables == {"datasource", "model_name", "instance"}


def binary(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"no {name} on the PATH (Debian's package prometheus has it)")
    return found


def test_promtool_finds_no_fault() -> None:
    promtool = binary("promtool")
    for arguments in (("check", "rules", "rules.yml"), ("check", "config", "prometheus.yml"),
                      ("test", "rules", "rules_test.yml")):  # fmt: skip
        done = subprocess.run([promtool, *arguments], cwd=FOLDER, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


@pytest.fixture
def prometheus(tmp_path: Path) -> Iterator[Callable[[str], httpx.Client]]:
    """Starts a Prometheus that scrapes an address every second, under the example's settings."""
    program, running = binary("prometheus"), []

    def start(target: str) -> httpx.Client:
        config = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s", "scrape_timeout": "1s"}
        config["scrape_configs"][0]["static_configs"] = [{"targets": [target]}]
        (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
        shutil.copy(RULES, tmp_path)
        url = f"127.0.0.1:{free_port()}"
        command = [program, f"--config.file={tmp_path}/prometheus.yml", f"--web.listen-address={url}",
                   f"--storage.tsdb.path={tmp_path}/data"]  # fmt: skip
        log = (tmp_path / "log").open("w")
        running.append((subprocess.Popen(command, stdout=log, stderr=log), log))
        client = httpx.Client(base_url=f"http://{url}", timeout=20, trust_env=False)
        until = time.monotonic() + 30
        while True:
            try:
                if client.get("/-/ready").status_code == 200:
                    return client
            except httpx.TransportError:
                pass
            assert time.monotonic() < until, (tmp_path / "log").read_text()
            time.sleep(0.1)

    yield start
    for child, log in running:
        child.send_signal(signal.SIGTERM)
        child.wait(20)
        log.close()


def answers(client: httpx.Client, query: str) -> list[float]:
    """The values of a query now."""
    got = client.get("/api/v1/query", params={"query": query.replace("$__rate_interval", "20s")}).json()
    assert got["status"] == "success", f"{query}: {got}"
    return [float(series["value"][1]) for series in got["data"]["result"]]


def keep_busy(server: Octavo, until: Callable[[], bool]) -> None:
    """Streams and whole answers, one client that hangs up now and then, one prompt that is wrong."""
    prompt, turn = tiny.PROMPTS[0], 0
    while not until():
        turn += 1
        server.stream(prompt=[5 + turn % 90, *prompt], max_tokens=8, ignore_eos=True)
        server.text(prompt=prompt * 4, max_tokens=24, ignore_eos=True, n=2)
        server.post(TEXTS, prompt=[-1])


def without_data(client: httpx.Client, queries: list[tuple[str, str]]) -> list[str]:
    """The queries that have no answer, or none that is a number."""
    empty = []
    for where, query in queries:
        values = answers(client, query)
        if not values or all(value != value for value in values):
            empty.append(f"{where}: {query}")
    return empty


@pytest.mark.slow
def test_a_real_prometheus_answers_every_query(prometheus: Callable[[str], httpx.Client]) -> None:
    # With a small pool, a host tier and speculation, so that what these count moves too.
    settings = ["--kv-cache-memory-bytes", "128KiB", "--swap-space", "0.01", "--max-num-seqs", "4"]
    with octavo(*settings, "--speculative-config", SPECULATION) as server:
        client = prometheus(str(server.client.base_url).removeprefix("http://").rstrip("/"))
        stop = time.monotonic() + 25
        busy = threading.Thread(target=keep_busy, args=(server, lambda: time.monotonic() > stop))
        busy.start()
        time.sleep(23)
        assert without_data(client, board_queries()) == []
        busy.join(30)
        # The share of 5xx needs one.
        [engine] = _children(server.child.pid)
        os.kill(engine, signal.SIGKILL)
        until = time.monotonic() + 40
        while time.monotonic() < until:
            assert server.post(TEXTS, prompt="a").status_code == 503
            alerts = client.get("/api/v1/alerts").json()["data"]["alerts"]
            if any(a["labels"]["alertname"] == "OctavoEngineDown" and a["state"] == "firing" for a in alerts):
                break
            time.sleep(0.5)
        else:
            raise AssertionError(alerts)
        assert without_data(client, rule_queries()) == []
        groups = client.get("/api/v1/rules").json()["data"]["groups"]
        health = {rule["name"]: rule["health"] for group in groups for rule in group["rules"]}
        assert health == dict.fromkeys(health, "ok") and len(health) == len(rules())
