"""The unit, the image and the manifest in deploy/: they name what exists, and fit each other."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from octavo.cli.main import build_parser
from octavo.server.config import ServerConfig
from octavo.server.endpoints import OPERATIONS
from tests.deploy.monitoring import DEPLOY

ROOT = DEPLOY.parent
OPEN = {operation.path for operation in OPERATIONS if operation.method == "GET" and operation.open}


def manifest() -> dict[str, Any]:
    return {item["kind"]: item for item in yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())}


def dockerfile() -> str:
    return re.sub(r"\\\n", " ", (DEPLOY / "Dockerfile").read_text())


def words(instruction: str) -> list[str]:
    """The words of an instruction in its JSON form."""
    [found] = re.findall(rf"\b{instruction} (\[.*\])$", dockerfile(), re.M)
    return list(yaml.safe_load(found))


def test_probes_ask_paths_that_need_no_key() -> None:
    [container] = manifest()["Deployment"]["spec"]["template"]["spec"]["containers"]
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert container[probe]["httpGet"]["path"] in OPEN
    path = re.search(r"127\.0\.0\.1:8000(/\w+)", words("CMD")[-1])
    assert path is not None and path[1] in OPEN


def test_the_pods_are_those_of_deployment_service_and_volume() -> None:
    found = manifest()
    spec = found["Deployment"]["spec"]
    pod = spec["template"]["spec"]
    labels = spec["template"]["metadata"]["labels"]
    assert spec["selector"]["matchLabels"] == labels == found["Service"]["spec"]["selector"]
    [container] = pod["containers"]
    [port] = found["Service"]["spec"]["ports"]
    assert port["targetPort"] in {p["name"] for p in container["ports"]}
    assert {m["name"] for m in container["volumeMounts"]} == {v["name"] for v in pod["volumes"]}
    claims = {v["persistentVolumeClaim"]["claimName"] for v in pod["volumes"] if "persistentVolumeClaim" in v}
    assert claims == {found["PersistentVolumeClaim"]["metadata"]["name"]}
    # The image's user owns what the pod's user writes.
    assert re.search(rf"^USER {pod['securityContext']['runAsUser']}$", dockerfile(), re.M)


def test_commands_are_taken_by_the_command_line() -> None:
    [container] = manifest()["Deployment"]["spec"]["template"]["spec"]["containers"]
    entry = words("ENTRYPOINT")
    started = build_parser("serve").parse_args([*entry[1:], *container["args"]])
    assert started.host == "0.0.0.0" and started.port == container["ports"][0]["containerPort"]
    unit = (DEPLOY / "octavo.service").read_text()
    [command] = re.findall(r"^ExecStart=\S+ (.*)$", unit, re.M)
    line = command.replace("${OCTAVO_MODEL}", "org/model").replace("$OCTAVO_ARGS", "--dtype float16").split()
    assert build_parser("serve").parse_args(line).model == "org/model"


def test_running_requests_get_their_time_to_finish() -> None:
    drain = ServerConfig().drain_timeout
    unit = (DEPLOY / "octavo.service").read_text()
    [stop] = re.findall(r"^TimeoutStopSec=(\d+)$", unit, re.M)
    pod = manifest()["Deployment"]["spec"]["template"]["spec"]
    assert int(stop) > drain and pod["terminationGracePeriodSeconds"] > drain


def test_what_the_image_copies_is_there() -> None:
    for line in re.findall(r"^COPY (.*)$", dockerfile(), re.M):
        for source in line.split()[:-1]:
            assert (ROOT / source).exists(), source
    extras = re.search(r"'\.\[([\w,]+)\]'", dockerfile())
    assert extras is not None
    for extra in extras[1].split(","):
        assert re.search(rf"^{extra} = \[$", (ROOT / "pyproject.toml").read_text(), re.M), extra


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze here")
def test_systemd_finds_no_fault_in_the_unit(tmp_path: Path) -> None:
    unit = (DEPLOY / "octavo.service").read_text().replace("/opt/octavo/bin/octavo", sys.executable)
    (tmp_path / "octavo.service").write_text(unit)
    command = ["systemd-analyze", "verify", "--man=no", str(tmp_path / "octavo.service")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and "octavo.service" not in done.stderr, done.stderr


@pytest.mark.skipif(shutil.which("hadolint") is None, reason="no hadolint here")
def test_hadolint_finds_no_fault_in_the_image() -> None:
    done = subprocess.run(["hadolint", str(DEPLOY / "Dockerfile")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
