"""Decode steps that are recorded on the CPU and run again, in engines whose batches grow, shrink and mix."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.kernels.cpu import lending, ops
from octavo.kernels.cpu.lending import Lending
from octavo.kernels.cpu.recording import Recording
from octavo.kernels.cpu.step_memory import StepMemory
from octavo.models.llama import LlamaForCausalLM
from octavo.step_messages import StepPlan, StepResult
from octavo.structured_outputs import StructuredOutputsParams
from octavo.worker import model_runner, recorded_steps
from octavo.worker.model_runner import LaunchedStep, ModelRunner
from octavo.worker.recorded_steps import RecordedSteps
from tests import tiny
from tests.engine.speculative_methods import drafted

if not ops.available():
    pytest.skip("no CPU kernels", allow_module_level=True)

GREEDY = SamplingParams(temperature=0.0, max_tokens=tiny.NEW_TOKENS, ignore_eos=True, detokenize=False)
SETTINGS = dict(
    dtype="float32", device="cpu", max_model_len=tiny.CONTEXT, skip_tokenizer_init=True,
    check_invariants=True, kv_cache_memory_bytes=8 << 20,
)  # fmt: skip


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Requests of each step that was run again."""
    sizes: list[int] = []
    run, replay = RecordedSteps.run, Recording.replay
    running: list[int] = []

    def spy_run(self: RecordedSteps, inputs: object) -> torch.Tensor:
        running.append(inputs.num_requests)  # type: ignore[attr-defined]
        return run(self, inputs)  # type: ignore[arg-type]

    def spy_replay(self: Recording) -> None:
        sizes.append(running[-1])
        replay(self)

    monkeypatch.setattr(RecordedSteps, "run", spy_run)
    monkeypatch.setattr(Recording, "replay", spy_replay)
    return sizes


@pytest.mark.parametrize("variant", ["qwen3", "qwen2-window"])
def test_tokens_are_those_of_unrecorded_steps(
    replays: list[int], variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorded_steps, "MOST_ROWS", 16)
    with LLM(str(tiny.checkpoint(variant)), num_threads=1, max_num_seqs=20, **SETTINGS) as llm:
        for _ in range(2):
            outputs = llm.generate(tiny.PROMPTS, GREEDY, use_tqdm=False)
            assert [o.outputs[0].token_ids for o in outputs] == [tiny.greedy(variant, i) for i in range(3)]
        assert set(replays) == {3}
        # Some end early, so that batches shrink, past the largest that is recorded, and slots change hands.
        lengths = [3] * 4 + [6] * 8 + [9, 12, 15, 15, 18, 21, 24, 27]
        params = [GREEDY.clone(max_tokens=n) for n in lengths]
        outputs = llm.generate([tiny.PROMPTS[i % 3] for i in range(20)], params, use_tqdm=False)
        for i, output in enumerate(outputs):
            assert output.outputs[0].token_ids == tiny.greedy(variant, i % 3)[: lengths[i]]
        assert max(replays) == 16 and min(replays) == 1
        scored = llm.generate([tiny.PROMPTS[0]], GREEDY.clone(prompt_logprobs=1, logprobs=1), use_tqdm=False)
        assert scored[0].outputs[0].token_ids == tiny.greedy(variant, 0)


def test_all_sizes_take_the_memory_of_the_largest(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[RecordedSteps] = []
    init = RecordedSteps.__init__
    monkeypatch.setattr(RecordedSteps, "__init__", lambda s, *args: (made.append(s), init(s, *args))[1])

    def size_after(counts: list[int]) -> int:
        with LLM(str(tiny.checkpoint("qwen3")), num_threads=1, **SETTINGS) as llm:
            for n in counts:
                llm.generate([tiny.PROMPTS[i % 3] for i in range(n)], GREEDY, use_tqdm=False)
            steps = made.pop()
            assert sorted(steps._recorded) == sorted(counts)
            assert llm.stats().graph_bytes == steps.num_bytes
            return steps.num_bytes

    together = size_after([2, 7, 1, 16, 4])
    assert 0 < size_after([1]) < size_after([16]) == together


@pytest.mark.parametrize("variant", ["qwen3", "gemma2", "mixtral", "qwen2-window"])
def test_large_steps_on_lent_memory_yield_the_same_tokens(
    variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lenders: list[Lending] = []
    init = Lending.__init__
    monkeypatch.setattr(Lending, "__init__", lambda s: (lenders.append(s), init(s))[1])
    monkeypatch.setattr(model_runner, "LENT_ROWS", 1)
    monkeypatch.setattr(lending, "_LEAST", 1)
    with LLM(str(tiny.checkpoint(variant)), num_threads=1, **SETTINGS | {"enforce_eager": True}) as llm:
        for _ in range(2):
            outputs = llm.generate(tiny.PROMPTS, GREEDY, use_tqdm=False)
            assert [o.outputs[0].token_ids for o in outputs] == [tiny.greedy(variant, i) for i in range(3)]
    assert len(lenders) == 1 and lenders[0].memory.num_bytes


def test_a_model_that_cannot_be_recorded_runs_on(replays: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    variant, told = "qwen3", []
    monkeypatch.setattr(recorded_steps.logger, "info", lambda text, *args: told.append(text % args))
    plain = LlamaForCausalLM.compute_logits
    monkeypatch.setattr(LlamaForCausalLM, "compute_logits", lambda s, h: plain(s, h[h.abs().sum(1) >= 0]))
    with LLM(str(tiny.checkpoint(variant)), num_threads=1, **SETTINGS) as llm:
        outputs = llm.generate(tiny.PROMPTS, GREEDY, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in outputs] == [tiny.greedy(variant, i) for i in range(3)]
    assert not replays
    assert told == ["decode steps run unrecorded: aten.abs.default"]


def test_enforce_eager_records_nothing(replays: list[int]) -> None:
    with LLM(str(tiny.checkpoint("qwen3")), num_threads=1, enforce_eager=True, **SETTINGS) as llm:
        outputs = llm.generate(tiny.PROMPTS[:1], GREEDY, use_tqdm=False)
    assert outputs[0].outputs[0].token_ids == tiny.greedy("qwen3", 0) and not replays


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_results_tell_of_recordings(method: str, masked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the target's and of the draft's, whose times say little of later steps; also where drafts are made
    with a step's masks, after it was launched."""
    launch, wait, record = ModelRunner.execute, LaunchedStep.wait, recorded_steps.record
    step, told = 0, set()
    owners: dict[int, set[StepMemory]] = {}  # of what was recorded in each step

    def launching(self: ModelRunner, plan: StepPlan) -> LaunchedStep:
        nonlocal step
        step = plan.step_id
        return launch(self, plan)

    def waiting(self: LaunchedStep) -> StepResult:
        result = wait(self)
        told.update([self._plan.step_id] if result.recorded else [])
        return result

    def recording(work: Callable[[], torch.Tensor], memory: StepMemory) -> tuple[torch.Tensor, Recording]:
        owners.setdefault(step, set()).add(memory)
        return record(work, memory)

    monkeypatch.setattr(ModelRunner, "execute", launching)
    monkeypatch.setattr(LaunchedStep, "wait", waiting)
    monkeypatch.setattr(recorded_steps, "record", recording)
    params = [GREEDY.clone(max_tokens=16)] * 3
    if masked:  # nothing is drafted for it, but for the others
        form = StructuredOutputsParams(regex="[a-z ]{30,60}")
        params[0] = params[0].clone(ignore_eos=False, structured_outputs=form)
    with drafted(method, num_threads=1, skip_tokenizer_init=False) as llm:
        llm.generate(tiny.PROMPTS, params, use_tqdm=False)
    assert told == set(owners) and step > len(told) > 1
    assert len(set.union(*owners.values())) == (2 if method == "draft_model" else 1)
