"""Thousands of bad requests to a real engine: no 5xx, no dead engine, and a neighbour's tokens as ever."""

from __future__ import annotations

import collections
import json
import threading
from collections.abc import Sequence

import httpx
import pytest

from tests import tiny
from tests.server.bad_bodies import GOOD, bad_bodies
from tests.server.test_real_engine import TEXTS, octavo, settled


def assault(
    url: str,
    document: dict,
    seed: int,
    count: int,
    seen: collections.Counter[int],
    paths: Sequence[str] = tuple(GOOD),
) -> list[str]:
    """Send the bodies of a seed, one after the other; what went wrong."""
    wrong = []
    with httpx.Client(base_url=url, timeout=60, trust_env=False) as client:
        for path, body in bad_bodies(document, seed, count, paths):
            headers = {"content-type": "application/json"}
            response = client.post(path, content=body, headers=headers)
            seen[response.status_code] += 1
            if response.status_code >= 500 or '"code":"internal_error"' in response.text:
                wrong.append(f"{response.status_code} {path} {body[:300]!r}: {response.text[:300]}")
            elif response.status_code >= 400:
                error = json.loads(response.text)["error"]
                if not error["message"] or "\n" in error["message"]:
                    wrong.append(f"{path} {body[:300]!r}: {error}")
    return wrong


@pytest.mark.parametrize("count", [400, pytest.param(4000, marks=pytest.mark.slow)])
def test_bad_bodies(count: int) -> None:
    with octavo("--kv-cache-memory-bytes", "4MiB", "--max-num-seqs", "8") as server:
        document = server.client.get("/openapi.json").json()
        assert set(GOOD) <= set(document["paths"])
        url = str(server.client.base_url)
        seen: collections.Counter[int] = collections.Counter()
        wrong: list[str] = []
        threads = [
            threading.Thread(
                target=lambda seed=seed: wrong.extend(assault(url, document, seed, count // 2, seen))
            )
            for seed in range(2)
        ]
        for thread in threads:
            thread.start()
        victims, want = 0, tiny.greedy("llama", 0)[:48]
        while victims < 3 or any(thread.is_alive() for thread in threads):
            ask = {"prompt": tiny.PROMPTS[0], "max_tokens": 48, "temperature": 0, "ignore_eos": True}
            with server.client.stream(
                "POST", TEXTS, json=ask | {"stream": True, "return_token_ids": True}
            ) as told:
                chunks = [json.loads(line[6:]) for line in told.iter_lines() if line.startswith("data: {")]
            assert [t for chunk in chunks for t in chunk["choices"][0]["token_ids"]] == want
            victims += 1
        assert not wrong, "\n".join(wrong[:20])
        assert sum(seen.values()) == count and seen[400] > count / 2 and seen[200] > count / 50
        assert server.client.get("/health").status_code == 200
        settled(server)


def test_bad_bodies_for_a_model_that_makes_embeddings() -> None:
    with octavo("--kv-cache-memory-bytes", "4MiB", "--runner", "pooling") as server:
        document = server.client.get("/openapi.json").json()
        seen: collections.Counter[int] = collections.Counter()
        paths = ("/v1/embeddings", "/v1/score")
        wrong = assault(str(server.client.base_url), document, 5, 300, seen, paths)
        assert not wrong, "\n".join(wrong[:20])
        assert seen[400] > 100 and seen[200] > 10
        for path in paths:
            assert server.post(path, **GOOD[path]).status_code == 200
        settled(server)
