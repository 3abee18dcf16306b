"""A server that drafts: it says so, its counters move, and answers are those of plain decoding."""

from __future__ import annotations

import json

import pytest

from octavo.cli.main import main
from tests import tiny
from tests.server.conftest import running
from tests.server.fakes import FakeEngine
from tests.server.test_real_engine import octavo

CONFIG = {"method": "suffix", "num_speculative_tokens": 6, "adaptive": False}
COUNTERS = [f"octavo:spec_decode_num_{name}_total" for name in ("drafts", "draft_tokens", "accepted_tokens")]


def test_what_is_active_is_told_and_counted(capsys: pytest.CaptureFixture[str]):
    with octavo("--speculative-config", json.dumps(CONFIG)) as server:
        before = server.metrics()
        assert not any(name in before for name in COUNTERS)
        # The second time its own first answer is there to draft from.
        texts = [server.text(prompt=tiny.PROMPTS[0], ignore_eos=True)["text"] for _ in range(2)]
        assert texts[0] == texts[1]
        drafts, tokens, accepted = (server.metrics()[name] for name in COUNTERS)
        assert 0 < drafts < tokens and 0.5 * tokens < accepted <= tokens
        told = server.client.get("/server_info.json").json()["facts"]["speculation"]
        assert told == "suffix, up to 6 tokens, always"
        capsys.readouterr()
        assert main(["env", "--url", str(server.client.base_url)]) == 0
        shown = capsys.readouterr().out
        assert f"{accepted:.0f} of {tokens:.0f} tokens" in shown and "drafts stood" in shown


def test_all_that_synthetic_acceptance_yields_is_marked():
    config = {"method": "ngram", "synthetic_acceptance": [0.75, 0.5]}
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    completion = {"prompt": ["hi", "you"], "max_tokens": 4, "n": 2}
    response = {"input": "hi", "max_output_tokens": 4}
    asked = {"/v1/chat/completions": chat, "/v1/completions": completion, "/v1/responses": response}
    for given in (config, {"method": "ngram"}, None):
        want = [0.75, 0.5] if given is config else None
        with running(FakeEngine(speculative_config=given)) as server:
            for path, body in asked.items():
                assert server.post(path, body).json().get("synthetic_acceptance") == want, path
                options = {} if path == "/v1/responses" else {"stream_options": {"include_usage": True}}
                lines = server.post(path, {**body, "stream": True, **options}).text.splitlines()
                events = [json.loads(x[6:]) for x in lines if x.startswith("data: {")]
                told = [e["response"] for e in events if "response" in e] if not options else events
                assert len(told) > 2
                assert all(e.get("synthetic_acceptance") == want for e in told), path
            metrics = server.client.get("/metrics").text
        assert ("spec_decode_synthetic_acceptance{" in metrics) == (want is not None)
        if want is not None:
            assert 'position="1"} 0.5' in metrics
