"""POST /start_profile and /stop_profile: only where a folder for traces is set, and behind the key."""

from __future__ import annotations

from tests.server.conftest import running
from tests.server.fakes import FakeEngine


def test_profiles_are_started_and_stopped():
    with running(FakeEngine(torch_profiler_dir="traces"), api_key=["k"]) as server:
        assert server.post("/start_profile").status_code == 401
        key = {"authorization": "Bearer k"}
        refused = server.post("/stop_profile", headers=key)
        assert refused.status_code == 400 and "no profile" in refused.json()["error"]["message"]
        assert server.post("/start_profile", headers=key).status_code == 200
        assert server.post("/start_profile", headers=key).status_code == 400
        answer = server.post("/stop_profile", headers=key)
        told = {"trace": "t.json.gz", "summary": "t.txt", "num_steps": 3, "rank_traces": ["t-rank0.json.gz"]}
        assert answer.json() == told


def test_other_servers_have_no_such_endpoints():
    with running() as server:
        assert server.post("/start_profile").status_code == 404
        assert "/start_profile" not in server.client.get("/openapi.json").json()["paths"]
