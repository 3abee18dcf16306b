"""Profiles with ranks: each writes a trace of its own, and the engine one of its stages."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import pytest

from octavo.engine.trace_summary import read_trace
from octavo.errors import RequestError
from tests.engine.test_llm_parity import expected, generate, make


def names(trace: str) -> Counter[str]:
    return Counter(event["name"] for event in read_trace(trace) if event.get("ph") == "X")


@pytest.mark.parametrize("sizes", [dict(tensor_parallel_size=2), dict(pipeline_parallel_size=2)])
def test_every_rank_writes_a_trace(sizes, tmp_path):
    folder = tmp_path / "traces"
    with make("llama", **sizes, torch_profiler_dir=str(folder), profiler_max_iterations=4) as llm:
        llm.start_profile()
        with pytest.raises(RequestError, match="under way already"):
            llm.start_profile()
        assert generate(llm) == expected("llama")
        status = llm.stop_profile()
        assert status.num_steps == 4 and len(status.rank_traces) == 2
        assert sorted(map(str, folder.iterdir())) == sorted(
            [status.trace, status.summary, *status.rank_traces]
        )
        own = names(status.trace)
        assert own["octavo.step"] == own["octavo.schedule"] == 4
        launched = own["octavo.execute"]
        assert not any(name.startswith("aten::") for name in own)
        for trace in status.rank_traces:
            found = names(trace)
            assert found["octavo.execute"] == found["octavo.step"] == launched > 0
            assert any(name.startswith("aten::") for name in found), found
            assert any("gloo" in name or "c10d" in name for name in found), found
        page = Path(status.summary).read_text()
        for trace in (status.trace, *status.rank_traces):
            assert f"{Path(trace).name}: view it" in page
        llm.start_profile()  # one whose folder goes
        shutil.rmtree(folder)
        assert generate(llm) == expected("llama")
        with pytest.raises(RequestError, match="the profile cannot be written"):
            llm.stop_profile()
        llm.start_profile()
        assert generate(llm) == expected("llama")
        assert llm.stop_profile().rank_traces
