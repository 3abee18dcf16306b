"""Who may ask: API keys, CORS, model names, the defaults of the settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.errors import ConfigError
from octavo.server.api_keys import ApiKeys
from octavo.server.config import ServerConfig
from tests.server.conftest import running

BODY = {"prompt": "a", "max_tokens": 1}


def test_api_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_API_KEY", "third")
    with running(api_key=["one", "two"]) as server:
        for header in (None, "Bearer wrong", "Bearer", "Basic one", "one", "Bearer o ne"):
            headers = {} if header is None else {"authorization": header}
            for path in ("/v1/completions", "/tokenize", "/nothing"):
                response = server.post(path, BODY, headers=headers)
                assert response.status_code == 401, (header, path)
                assert response.json()["error"]["code"] == "invalid_api_key"
            assert server.client.get("/metrics", headers=headers).status_code == 401
        for key in ("one", "two", "third"):
            answer = server.post("/v1/completions", BODY, headers={"authorization": f"Bearer {key}"})
            assert answer.status_code == 200
        assert server.client.get("/health").status_code == 200
        assert server.client.get("/ping").status_code == 200


@pytest.mark.parametrize("key", ["", " ", "a ", "\n"])
def test_a_key_that_is_none_is_refused(key: str) -> None:
    """An empty one would let in whoever sends no key at all."""
    with pytest.raises(ConfigError, match="api_key .* is empty, or begins or ends with white space"):
        ApiKeys(ServerConfig(api_key=["good", key]))


@pytest.mark.parametrize("key", ["a\n", " a", " "])
def test_a_key_of_the_environment_that_no_client_can_send_is_refused(
    monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    """A file's line end, say: it used to shut everybody out."""
    monkeypatch.setenv("OCTAVO_API_KEY", key)
    with pytest.raises(ConfigError, match="OCTAVO_API_KEY.* begins or ends with white space"):
        ApiKeys(ServerConfig())


def test_keys_may_be_any_bytes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OCTAVO_API_KEY", b"\xff\xe9".decode("utf-8", "surrogateescape"))
    file = tmp_path / "keys"
    file.write_bytes("\ufeffschlüssel\nzwei".encode())  # as some editors begin a file
    keys = ApiKeys(ServerConfig(api_key=["ключ"], api_key_file=str(file)))
    for known in (b"\xff\xe9", "schlüssel".encode(), b"zwei", "ключ".encode()):
        assert keys.allow(known)
    assert not keys.allow("\ufeffschlüssel".encode()) and not keys.allow(b"")


def test_open_without_keys() -> None:
    with running() as server:
        assert server.post("/v1/completions", BODY).status_code == 200


def test_cors_only_when_asked_for() -> None:
    headers = {"origin": "https://page.example", "access-control-request-method": "POST"}
    with running() as server:
        answer = server.client.get("/health", headers=headers)
        assert "access-control-allow-origin" not in answer.headers
    with running(allowed_origins=["https://page.example"], api_key=["k"]) as server:
        assert server.client.options("/v1/completions", headers=headers).status_code == 200
        answer = server.client.get("/health", headers=headers)
        assert answer.headers["access-control-allow-origin"] == "https://page.example"
        other = server.client.get("/health", headers={"origin": "https://other.example"})
        assert "access-control-allow-origin" not in other.headers


def test_served_model_names() -> None:
    with running(served_model_name=["a", "b/c"]) as server:
        assert [card["id"] for card in server.client.get("/v1/models").json()["data"]] == ["a", "b/c"]
        assert server.client.get("/v1/models/b/c").json()["root"] == "some/model"
        for name, told in ((None, "a"), ("a", "a"), ("b/c", "b/c")):
            assert server.post("/v1/completions", BODY | {"model": name}).json()["model"] == told
        assert server.post("/v1/completions", BODY | {"model": "some/model"}).status_code == 404


def test_settings_are_checked() -> None:
    assert ServerConfig().host == "127.0.0.1"
    for bad in ({"port": 70000}, {"drain_timeout": -1.0}, {"tokenizer_threads": 0}, {"max_request_bytes": 1}):
        with pytest.raises(ConfigError):
            ServerConfig(**bad)  # type: ignore[arg-type]


def test_ids_are_told_in_a_header_if_asked_for() -> None:
    with running() as server:
        assert "x-request-id" not in server.client.get("/v1/models").headers
    body = {"prompt": "a", "max_tokens": 2}
    with running(enable_request_id_headers=True) as server:
        made = server.post("/v1/completions", body)
        assert made.json()["id"] == "cmpl-" + made.headers["x-request-id"]
        given = server.post("/v1/completions", body | {"stream": True}, headers={"x-request-id": "me"})
        assert given.headers["x-request-id"] == "me"
        own = server.post("/v1/completions", body | {"request_id": "you"}, headers={"x-request-id": "me"})
        assert own.headers["x-request-id"] == "you"
        for path in ("/nothing", "/health"):
            assert len(server.client.get(path).headers["x-request-id"]) == 32
        for wrong in ("a b", "a\r\nx-evil: 1", "x" * 300, "é"):
            refused = server.post("/v1/completions", body | {"request_id": wrong})
            assert refused.status_code == 400 and "x-evil" not in refused.headers
            assert "x-request-id" not in refused.headers


def test_version_tells_the_cache_root() -> None:
    with running() as server:
        cache = server.client.get("/version").json()["prefix_cache"]
        assert cache == {
            "enabled": True,
            "root": bytes(range(32)).hex(),
            "hash_algorithm": "sha256",
            "block_size": 16,
        }
