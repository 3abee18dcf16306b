"""HTTPS from files; files that are no certificate with its key are told before a model is loaded."""

from __future__ import annotations

import json
import os
import shutil
import ssl
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates")

COMMAND = [sys.executable, "-m", "tests.server.serve_fake", "0", "0", "1"]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate and its key, another key, and the first one with a password."""
    folder = tmp_path_factory.mktemp("tls")

    def run(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)

    for name in ("", "other-"):
        run(
            "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
            "-days", "2", "-keyout", f"{name}key.pem", "-out", f"{name}cert.pem", "-subj", "/CN=localhost",
            "-addext", "subjectAltName=IP:127.0.0.1",
        )  # fmt: skip
    run("ec", "-in", "key.pem", "-aes128", "-passout", "pass:secret", "-out", "locked.pem")
    return folder


def environment(**settings: str) -> dict[str, str]:
    return os.environ | {"SERVE_FAKE": json.dumps(settings)}


def test_requests_over_https(files: Path) -> None:
    settings = {"ssl_certfile": str(files / "cert.pem"), "ssl_keyfile": str(files / "key.pem")}
    child = subprocess.Popen(COMMAND, stdout=subprocess.PIPE, text=True, env=environment(**settings))
    try:
        assert child.stdout is not None and child.stdout.readline() == "loading\n"
        url = child.stdout.readline().removeprefix("Octavo is ready: ").strip()
        assert url.startswith("https://127.0.0.1:")
        trust = ssl.create_default_context(cafile=str(files / "cert.pem"))
        with httpx.Client(verify=trust, timeout=20, trust_env=False) as client:
            body = {"prompt": "a", "max_tokens": 3}
            assert client.post(f"{url}/completions", json=body).status_code == 200
            lines = client.post(f"{url}/completions", json=body | {"stream": True}).text.split("\n\n")
            assert lines[-2:] == ["data: [DONE]", ""]
            with pytest.raises(httpx.HTTPError):
                client.get(url.replace("https", "http") + "/models")
            assert client.get(f"{url}/models").status_code == 200
    finally:
        child.kill()
        child.communicate()


@pytest.mark.parametrize(
    ("certificate", "key", "told"),
    [
        ("cert.pem", "other-key.pem", "are no certificate with its key"),
        ("cert.pem", "locked.pem", "the key without a password"),
        ("key.pem", "key.pem", "are no certificate with its key"),
        ("cert.pem", "none.pem", "is not a file: HTTPS needs both"),
        ("cert.pem", None, "ssl_keyfile=None is not a file: HTTPS needs both"),
    ],
)
def test_what_is_no_pair_is_told_at_start(files: Path, certificate: str, key: str | None, told: str) -> None:
    settings = {"ssl_certfile": str(files / certificate)}
    if key is not None:
        settings["ssl_keyfile"] = str(files / key)
    done = subprocess.run(
        COMMAND,
        capture_output=True,
        text=True,
        timeout=60,
        env=environment(**settings),
        stdin=subprocess.DEVNULL,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("octavo: ssl_") and told in done.stderr and done.stderr.count("\n") == 1
