"""Steps that judge drafts, and drafts, in recorded steps, which are stood in for by a replay on the CPU; real
ones run in tests/gpu. What is drafted is what is drafted eagerly, and no token changes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from octavo import SamplingParams
from octavo.worker.model_runner import ModelRunner
from octavo.worker.verdicts import Verdicts
from tests import tiny
from tests.engine.speculative_methods import METHODS, check_drafted, drafted
from tests.engine.test_eagle3 import Watch
from tests.engine.test_llm_parity import expected, generate
from tests.worker.pretended_graphs import Recordings, Replay, pretend_graphs

WORKER = ["draft_model", "pard", "eagle3"]


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recordings:
    return pretend_graphs(monkeypatch)


@pytest.mark.parametrize("method", METHODS)
def test_greedy_tokens_are_those_of_plain_decoding(method: str, recorded: Recordings):
    settings: dict[str, Any] = dict(async_scheduling=method in WORKER)
    with drafted(method, **settings) as llm:
        for _ in range(2):
            assert generate(llm) == expected("llama")
        check_drafted(llm)
    assert max(padding.most for padding in recorded.steps) == 5
    assert len(set(recorded.steps)) == len(recorded.steps)
    assert bool(recorded.works) == (method in WORKER)
    assert len(set(recorded.works)) == len(recorded.works)


@pytest.mark.parametrize("draws", [False, True])
@pytest.mark.parametrize("method", WORKER)
def test_as_many_drafts_stand_as_of_those_made_eagerly(method: str, draws: bool):
    params = [
        SamplingParams(temperature=0.8 * draws, seed=5 + i, max_tokens=40, ignore_eos=True, detokenize=False)
        for i in range(len(tiny.PROMPTS))
    ]
    found = []
    for graphs in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            recorded = pretend_graphs(patch) if graphs else None
            with drafted(method, async_scheduling=True) as llm:
                outputs = llm.generate(tiny.PROMPTS, params, use_tqdm=False)
                stats = llm.stats()
            found.append(
                ([o.outputs[0].token_ids for o in outputs], stats.spec_drafts, stats.spec_accepted_per_pos)
            )
            if recorded is not None:
                assert any(key[0] in ("chain", "at once") for key in recorded.works)
    assert found[0] == found[1]
    assert sum(found[0][2]) > 0


@pytest.mark.parametrize("head", ["speculators", "specforge"])
def test_drafts_of_a_head_equal_the_plain_implementation(
    head: str, recorded: Recordings, monkeypatch: pytest.MonkeyPatch
):
    from tests.engine.test_eagle3 import drafted as with_head

    watch = Watch(monkeypatch)
    with with_head("llama", head, async_scheduling=True) as llm:
        assert generate(llm) == expected("llama")
    assert any(key[0] == "follow" for key in recorded.works)
    watch.check(head, "llama", every=5)


@pytest.mark.parametrize(
    "settings",
    [
        dict(max_num_batched_tokens=7),
        dict(kv_cache_memory_bytes=220 << 10, block_size=8, look_ahead_admission=False, max_num_seqs=3),
    ],
)
@pytest.mark.parametrize("method", WORKER)
def test_chunks_and_preemption(method: str, settings: dict[str, Any], recorded: Recordings):
    with drafted(method, async_scheduling=True, **settings) as llm:
        for _ in range(2):
            assert generate(llm) == expected("llama")
        check_drafted(llm)
        assert ("kv_cache_memory_bytes" in settings) == (llm.stats().num_preemptions > 0)
    assert any(padding.most > 1 for padding in recorded.steps)


def test_some_draw_and_some_are_greedy_beside_what_is_penalized(recorded: Recordings):
    """Settings that recorded drafts do not mind: the verifier does."""
    settings: list[dict[str, Any]] = [
        dict(temperature=0.0), dict(temperature=0.9, seed=3), dict(temperature=0.9, seed=4, top_k=5),
        dict(temperature=0.0, repetition_penalty=1.3), dict(temperature=0.0, logprobs=2),
    ]  # fmt: skip
    params = [SamplingParams(max_tokens=30, ignore_eos=True, detokenize=False, **one) for one in settings]
    prompts = [tiny.PROMPTS[i % 3] for i in range(len(params))]
    tokens = []
    for most in (0, 3):
        with drafted("eagle3", most, async_scheduling=True) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            tokens.append([o.outputs[0].token_ids for o in outputs])
    assert tokens[0] == tokens[1]
    assert any(key[-1] is True for key in recorded.works if key[0] == "chain")


class Launches(TorchDispatchMode):
    """Counts what a device would be given: operations that are no views, those within `one` as one."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()
        self._within = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._within and not func.is_view:
            self.count[func._schema.name.removeprefix("aten::")] += 1
        return func(*args, **(kwargs or {}))

    def one(self, name: str, function: Any) -> Any:
        def counted(*args: Any) -> Any:
            self.count[name] += 1
            self._within = True
            try:
                return function(*args)
            finally:
                self._within = False

        return counted


@pytest.mark.parametrize("method, graphs", [("eagle3", 3), ("draft_model", 2), ("pard", 2)])
def test_a_step_is_a_few_launches(
    method: str, graphs: int, recorded: Recordings, monkeypatch: pytest.MonkeyPatch
):
    """But where one enters blocks into tables. Copies: tokens and their number to the host, and how many are
    known to where the next drafts begin."""
    launches, steps = Launches(), []
    monkeypatch.setattr(Replay, "replay", launches.one("replay", Replay.replay))
    make, execute = Verdicts.__init__, ModelRunner.execute

    def init(self: Verdicts, *args: Any) -> None:
        make(self, *args)
        self._judge = launches.one("judge", self._judge)

    def counted(self: ModelRunner, plan: Any) -> Any:
        launches.count.clear()
        with launches:
            launched = execute(self, plan)
        steps.append(dict(launches.count))
        return launched

    monkeypatch.setattr(Verdicts, "__init__", init)
    monkeypatch.setattr(ModelRunner, "execute", counted)
    with drafted(method, async_scheduling=True) as llm:
        for _ in range(2):
            params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, detokenize=False)
            llm.generate([tiny.PROMPTS[0]], params, use_tqdm=False)
    steady = [step for step in steps if step.get("replay") == graphs]
    want = {"replay": graphs, "judge": 1, "copy_": 3}
    if method == "pard":  # how much its cache holds
        want["index_put_"] = 1
    assert steady.count(want) > len(steady) / 3, steady[-8:]
