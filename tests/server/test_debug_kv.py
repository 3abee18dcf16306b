"""/debug/kv and /debug/kv.json: only where asked for, bounded, and drawn by a browser."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from octavo.server.debug_kv import MOST_CELLS
from tests.server.conftest import running
from tests.server.fakes import FakeEngine
from tests.server.page.browser import NAMES, find


def engine(num_owned: int = 100) -> FakeEngine:
    """An engine whose pool of 5000 blocks has some of each state."""
    made = FakeEngine()
    owned = made.pool.allocate(num_owned)
    made.pool.acquire(owned[: num_owned // 4])
    cached = made.pool.allocate(50)
    for block in cached:
        made.pool.register(0, block.to_bytes(4, "big"), block)
    made.pool.release(cached)
    return made


def test_other_servers_have_no_map():
    with running() as server:
        for path in ("/debug/kv", "/debug/kv.json"):
            assert server.client.get(path).status_code == 404
            assert path not in server.client.get("/openapi.json").json()["paths"]


def test_the_map_is_bounded_and_its_counts_exact():
    with running(engine(), enable_kv_debug=True) as server:
        told = server.client.get("/debug/kv.json").json()
        assert told["states"] == ["free", "cached", "owned", "shared"]
        assert told["counts"] == {"free": 4850, "cached": 50, "owned": 75, "shared": 25}
        assert len(told["cells"]) == 2500 <= MOST_CELLS and told["blocks_per_cell"] == 2
        assert told["cells"].startswith("3" * 12) and set(told["cells"]) == set("0123")
        few = server.client.get("/debug/kv.json?cells=7").json()
        assert len(few["cells"]) == 7 and few["counts"] == told["counts"]
        assert "/debug/kv.json" in server.client.get("/openapi.json").json()["paths"]


@pytest.mark.parametrize("cells", ["0", "-1", "4097", "x", "", "9" * 400, "%c2%b2", "000000019999"])
def test_other_sizes_are_refused(cells):
    with running(engine(), enable_kv_debug=True) as server:
        answer = server.client.get(f"/debug/kv.json?cells={cells}")
        if cells == "":  # as if it were not there
            assert answer.status_code == 200
        else:
            assert answer.status_code == 400 and "from 1 to 4096" in answer.json()["error"]["message"]


def test_the_map_needs_the_key_and_the_page_does_not():
    with running(engine(), enable_kv_debug=True, api_key=["k"]) as server:
        assert server.client.get("/debug/kv.json").status_code == 401
        assert server.client.get("/debug/kv.json", headers={"authorization": "Bearer k"}).status_code == 200
        page = server.client.get("/debug/kv")
        assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")


def test_a_dead_engine_is_told():
    with running(engine(), enable_kv_debug=True) as server:
        server.call(server.engine.kill)
        assert server.client.get("/debug/kv.json").status_code == 503


def test_the_page_asks_nobody_else():
    with running(engine(), enable_kv_debug=True) as server:
        page = server.client.get("/debug/kv")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert not re.findall(r"https?://|src=|@import", page.text)


def test_a_browser_draws_the_map(tmp_path: Path):
    browser = find()
    if browser is None:
        pytest.skip(f"no browser that runs without a screen ({', '.join(NAMES)})")
    with running(engine(), enable_kv_debug=True) as server:
        done = subprocess.run(
            [browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}",
             "--virtual-time-budget=3000", "--dump-dom", f"{server.url}/debug/kv"],
            capture_output=True, text=True, timeout=60, check=False,
            env={**os.environ, "HOME": str(tmp_path)},
        )  # fmt: skip
    dom = done.stdout
    assert "5000 blocks of 16 tokens" in dom, done.stderr[-500:]
    for state, count in (("free", 4850), ("cached", 50), ("owned", 75), ("shared", 25)):
        assert re.search(rf'data-state="{state}"><i[^>]*></i>{state} {count}</span>', dom), state
    # 2500 cells in rows of 128, of 8 pixels each.
    assert re.search(r'<canvas id="pool"[^>]* width="1024" height="160"', dom)
    assert re.search(r'<p id="problem" role="alert"></p>', dom)
