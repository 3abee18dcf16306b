"""The server against its own OpenAPI document, by requests that schemathesis makes up from it.

`make test-schema` installs schemathesis in an environment of its own and runs this; without it nothing runs.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.server.test_real_engine import octavo

PROGRAM = os.environ.get("SCHEMATHESIS") or shutil.which("schemathesis")
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"


@pytest.mark.slow
@pytest.mark.skipif(PROGRAM is None, reason="schemathesis is not installed: make test-schema")
def test_no_server_error_and_every_answer_as_documented(tmp_path: Path) -> None:
    assert PROGRAM is not None
    with octavo("--enable-auto-tool-choice", "--tool-call-parser", "hermes") as server:
        document = server.client.get("/openapi.json").json()
        named = 0
        for name, schema in document["components"]["schemas"].items():
            # Of all the names that could be made up none is served, and nothing else would be tried.
            if name.endswith("Request") and "model" in schema["properties"]:
                schema["properties"]["model"] = {"const": "tiny"}
                named += 1
        assert named >= 5
        # As in OpenAI's own document, a stream's schema is that of its events' data; schemathesis takes it
        # for that of whole events, names included. `test_openapi.py` checks the data.
        for methods in document["paths"].values():
            for operation in methods.values():
                operation["responses"]["200"]["content"].get("text/event-stream", {}).pop("schema", None)
        path = tmp_path / "openapi.json"
        path.write_text(json.dumps(document))
        command = [
            PROGRAM, "run", str(path), "--url", str(server.client.base_url), "--checks", CHECKS,
            "--phases", "coverage,fuzzing", "--max-examples", "20", "--seed", "1", "--request-timeout", "60",
            "--generation-database", "none", "--no-color",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=900)
        assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
        tried = re.search(r"(\d+) generated, (\d+) passed", done.stdout)
        assert tried is not None and int(tried.group(1)) > 500, done.stdout[-3000:]
        assert server.client.get("/health").status_code == 200
        metrics = server.metrics()
        assert metrics["octavo:num_requests_running"] == 0 and metrics["octavo:kv_cache_usage_perc"] == 0
