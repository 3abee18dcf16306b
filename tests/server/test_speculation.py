"""A server that drafts: it says so, its counters move, and answers are those of plain decoding."""

from __future__ import annotations

import json

import pytest

from octavo.cli.main import main
from tests import tiny
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
