"""Profiles: the trace holds the engine's ranges and the operators, ends by itself, and is summed up."""

from __future__ import annotations

import asyncio
import gzip
import json

import pytest

from octavo import LLM, SamplingParams
from octavo.engine.profiling import Profiling
from octavo.engine.trace_summary import read_trace, render_summary, summarize_trace
from octavo.errors import RequestError
from tests import tiny
from tests.engine.simulation import make_core, request, run

SETTINGS = dict(dtype="float32", kv_cache_memory_bytes=4 << 20, num_threads=1)
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.0, detokenize=False)


@pytest.fixture(scope="module")
def model() -> str:
    return str(tiny.checkpoint("llama"))


def test_a_trace_holds_ranges_and_operators_of_as_many_steps_as_asked(model, tmp_path):
    folder = tmp_path / "new" / "folder"
    settings = dict(torch_profiler_dir=str(folder), profiler_max_iterations=4, profiler_delay_iterations=2)
    with LLM(model, **SETTINGS, **settings) as llm:
        plain = llm.generate([[5, 6, 7]] * 3, GREEDY, use_tqdm=False)
        llm.start_profile()
        with pytest.raises(RequestError, match="under way already"):
            llm.start_profile()
        outputs = llm.generate([[5, 6, 7]] * 3, GREEDY, use_tqdm=False)
        status = llm.stop_profile()
        assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in plain]
        with pytest.raises(RequestError, match="no profile is under way"):
            llm.stop_profile()
        llm.start_profile()
        with pytest.raises(RequestError, match="no step to record"):
            llm.stop_profile()
        llm.start_profile()  # a second profile has a file of its own
        llm.generate([[5, 6, 7]], GREEDY, use_tqdm=False)
        assert llm.stop_profile().trace != status.trace
    assert status.num_steps == 4
    with gzip.open(status.trace, "rt") as file:
        events = json.load(file)["traceEvents"]
    assert events == read_trace(status.trace)
    names = [e["name"] for e in events if e.get("ph") == "X"]
    for stage in ("step", "schedule", "execute", "wait", "update"):
        assert names.count(f"octavo.{stage}") == 4
    assert any(name.startswith("aten::") for name in names)
    steps = sorted((e["ts"], e["dur"]) for e in events if e.get("name") == "octavo.step")
    found = summarize_trace(events)
    assert found.steps == 4
    assert found.wall_us == pytest.approx(steps[-1][0] + steps[-1][1] - steps[0][0])
    assert sum(found.stages_us.values()) == pytest.approx(found.wall_us)
    assert sum(e.time_us for e in found.operators.values()) == pytest.approx(
        sum(d for _, d in steps), rel=0.02
    )
    with open(status.summary) as file:
        page = file.read()
    assert page == render_summary(found, page.splitlines()[0])
    assert "octavo.execute" in page


def test_without_a_folder_there_is_no_profile(model):
    with LLM(model, **SETTINGS) as llm:
        with pytest.raises(RequestError, match="torch_profiler_dir is not set"):
            llm.start_profile()


def test_a_running_engine_process_writes_a_trace(model, tmp_path):
    from octavo import AsyncLLM

    async def main():
        async with await AsyncLLM.create(model, **SETTINGS, torch_profiler_dir=str(tmp_path)) as llm:
            with pytest.raises(RequestError, match="no profile is under way"):
                await llm.stop_profile()
            await llm.start_profile()
            async for _ in llm.generate([5, 6, 7], GREEDY):
                pass
            return await llm.stop_profile()

    status = asyncio.run(main())
    assert status.num_steps == summarize_trace(read_trace(status.trace)).steps >= 12


class Recorder:
    """A profiler that notes what is asked of it."""

    def __init__(self, log):
        self.log = log

    def start(self):
        self.log.append("start")

    def range(self, name):
        import contextlib

        self.log.append(name)
        return contextlib.nullcontext()

    def stop(self, path):
        self.log.append(f"stop {path is not None}")
        if path is not None:
            raise OSError("disk full")
        return []


def test_a_core_is_left_as_it_was(tmp_path):
    log: list[str] = []
    core = make_core(torch_profiler_dir=str(tmp_path))
    plain = core._schedule
    profiling = Profiling(core, lambda: Recorder(log))
    assert profiling.start().error is None
    core.add(request("a", [1, 2, 3], 3))
    while core.has_work:
        profiling.step()
    assert log[:3] == ["start", "octavo.step", "octavo.schedule"]
    assert "disk full" in profiling.stop().error
    assert core._schedule == plain and not profiling.running
    profiling.start()
    profiling.close()
    assert log[-1] == "stop False" and core._schedule == plain
    core.add(request("b", [1, 2, 3], 3))
    assert run(core)["b"]
    assert log[-1] == "stop False"


class Failing(Recorder):
    def start(self):
        raise RuntimeError("no driver\nand more")


class Truncating(Recorder):
    """A disk that fills while the trace is written, which nobody tells."""

    def stop(self, path):
        if path is not None:
            with gzip.open(path, "wt") as file:
                file.write('{"traceEvents": [{"ph"')
        return [] if path is None else [path]


@pytest.mark.parametrize("delay", [0, 1])
def test_a_profile_that_cannot_start_harms_no_request(tmp_path, delay):
    core = make_core(torch_profiler_dir=str(tmp_path), profiler_delay_iterations=delay)
    plain = core._schedule
    profiling = Profiling(core, lambda: Failing([]))
    errors = [profiling.start().error]
    core.add(request("a", [1, 2, 3], 3))
    while core.has_work:
        profiling.step() if profiling.running else core.step()
    errors.append(profiling.stop().error)
    assert errors[delay] == "the profile cannot be started: no driver"
    assert core._schedule == plain and not profiling.running
    assert "start one first" in profiling.stop().error


def test_a_trace_that_cannot_be_read_back_ends_the_profile_alone(tmp_path):
    core = make_core(torch_profiler_dir=str(tmp_path), profiler_max_iterations=1)
    profiling = Profiling(core, lambda: Truncating([]))
    profiling.start()
    core.add(request("a", [1, 2, 3], 3))
    profiling.step()  # the last one of the profile: it is written here, amid requests
    assert not profiling.running
    assert profiling.stop().error.startswith("the profile cannot be written: ")
    assert run(core)["a"]


def test_no_second_profiler_beside_the_callers_own(model, tmp_path):
    import torch

    with LLM(model, **SETTINGS, torch_profiler_dir=str(tmp_path)) as llm:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
            with pytest.raises(RequestError, match="records this process already"):
                llm.start_profile()
        llm.start_profile()
        assert llm.generate([[5, 6, 7]], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
        assert llm.stop_profile().num_steps >= 12


def event(name, cat, ts, dur, tid=1):
    return {"ph": "X", "name": name, "cat": cat, "ts": ts, "dur": dur, "tid": tid, "pid": 1}


def test_times_of_device_and_host_are_told_apart():
    """Two steps; kernels overlap on two streams, run past the second step's end, and leave gaps."""
    events = [
        event("octavo.step", "user_annotation", 100.0, 50.0),
        event("octavo.execute", "user_annotation", 110.0, 30.0),
        event("aten::mm", "cpu_op", 115.0, 20.0),
        event("cudaLaunchKernel", "cuda_runtime", 120.0, 5.0),
        event("octavo.step", "user_annotation", 200.0, 50.0),
        event("octavo.wait", "user_annotation", 210.0, 40.0),
        event("octavo.step", "gpu_user_annotation", 120.0, 900.0, tid=7),  # no work
        event("gemm", "kernel", 125.0, 60.0, tid=7),
        event("Memcpy DtoH", "gpu_memcpy", 180.0, 20.0, tid=8),
        event("gemm", "kernel", 240.0, 40.0, tid=7),
        {"ph": "M", "name": "process_name"},
    ]
    found = summarize_trace(events)
    assert (found.steps, found.wall_us, found.device_busy_us) == (2, 180.0, 75.0 + 40.0)
    assert found.stages_us["octavo.execute"] == 30.0
    assert found.stages_us["rest of the step"] == 100.0 - 70.0
    assert found.stages_us["between steps"] == 80.0
    assert (found.kernels["gemm"].calls, found.kernels["gemm"].time_us) == (2, 100.0)
    assert {n: e.time_us for n, e in found.operators.items()} == {
        "octavo.step": 30.0, "octavo.execute": 10.0, "aten::mm": 15.0, "cudaLaunchKernel": 5.0,
        "octavo.wait": 40.0,
    }  # fmt: skip
    page = render_summary(found, "title")
    assert "63.9% of the wall time" in page
    assert page.index("gemm") < page.index("Memcpy DtoH") < page.index("aten::mm")
