"""Padded decode steps, with graphs stood in for by a replay on the CPU; real ones run in tests/gpu."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.layers import attention
from octavo.layers.attention import TorchAttention
from octavo.step_messages import StepPlan
from octavo.worker.graphs import DecodeGraphs, graph_sizes
from octavo.worker.input_batch import Padding, StepInputs
from tests import tiny
from tests.engine.test_eagle3 import Watch, drafted
from tests.parallel.thread_executor import thread_ranks  # noqa: F401 (a fixture)
from tests.worker.pretended_graphs import Recordings, pretend_graphs

GREEDY = SamplingParams(temperature=0.0, max_tokens=tiny.NEW_TOKENS, ignore_eos=True, detokenize=False)


@pytest.fixture
def replayed(monkeypatch) -> Recordings:
    """The engine thinks it has graphs; what was recorded."""
    return pretend_graphs(monkeypatch)


def test_sizes_are_few_and_end_at_the_most_requests():
    assert graph_sizes(1) == [1]
    assert graph_sizes(5) == [1, 2, 4, 5]
    assert graph_sizes(100) == [1, 2, 4, 8, 16, 32, 48, 64, 96, 100]
    assert graph_sizes(4096)[-1] == 512
    assert all(b <= 2 * a or b <= 16 for a, b in zip(graph_sizes(512), graph_sizes(512)[1:], strict=False))


def padding_for(rows: list[int], drafts: list[int] | None, **changes: Any) -> Padding | None:
    """What a step of requests with so many rows, of which the last compute drafts, is padded to."""
    none, n = np.zeros(0, np.int32), len(rows)
    plan = StepPlan(0, [], [], np.arange(n, dtype=np.int32), np.array(rows), none, np.ones(n, bool))
    plan.num_drafts = None if drafts is None else np.array(drafts)
    batch: Any = SimpleNamespace(device=torch.device("cpu"), max_rows=changes.pop("max_rows", 2048))
    for name, value in changes.items():
        setattr(plan, name, value)
    return DecodeGraphs(None, batch, [], 100, 4096).padding_for(plan)


def test_what_steps_are_padded_to():
    assert padding_for([1] * 5, None) == Padding(8, 8, 1)
    assert padding_for([6], [5]) == Padding(1, 6, 6)
    assert padding_for([4] * 7, [3] * 7) == Padding(8, 32, 4)  # all alike: as if there were 8
    assert padding_for([4] * 33, [3] * 33) == Padding(48, 160, 4)
    # Only one has drafts: not 64 times as many rows.
    assert padding_for([1] * 63 + [6], [0] * 63 + [5]) == Padding(64, 96, 6)
    assert padding_for([33], [32]) is None
    assert padding_for([6] * 96, [5] * 96) is None  # more than 512 rows
    assert padding_for([6] * 16, [5] * 16, max_rows=80) is None
    # Prompts, in whole or in part, and who asks for their probabilities.
    assert padding_for([6, 2], None) is None
    assert padding_for([6, 2], [5, 0]) is None
    assert padding_for([6, 1], [5, 0], samples=np.array([True, False])) is None
    assert padding_for([1], None, prompt_logprobs=np.array([1])) is None


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("variant, backend", [("qwen3", "torch"), ("qwen3", "cpu"), ("qwen2-window", "cpu")])
def test_padded_steps_change_nothing(replayed, overlap, variant, backend):
    settings = dict(
        dtype="float32", device="cpu", num_threads=1, max_model_len=tiny.CONTEXT, skip_tokenizer_init=True,
        check_invariants=True, max_num_seqs=16, kv_cache_memory_bytes=8 << 20, attention_backend=backend,
    )  # fmt: skip
    with LLM(
        str(tiny.checkpoint(variant)), async_scheduling=overlap, max_num_batched_tokens=64, **settings
    ) as llm:
        for _ in range(2):
            outputs = llm.generate(tiny.PROMPTS, GREEDY, use_tqdm=False)
            assert [o.outputs[0].token_ids for o in outputs] == [tiny.greedy(variant, i) for i in range(3)]
        # Some end early, so that batches shrink and slots change hands while others go on.
        params = [GREEDY.clone(max_tokens=5 + 7 * i) for i in range(9)]
        outputs = llm.generate([tiny.PROMPTS[i % 3] for i in range(9)], params, use_tqdm=False)
        for i, output in enumerate(outputs):
            assert output.outputs[0].token_ids == tiny.greedy(variant, i % 3)[: 5 + 7 * i]
        scored = llm.generate([tiny.PROMPTS[0]], GREEDY.clone(prompt_logprobs=1, logprobs=1), use_tqdm=False)[
            0
        ]
        assert scored.outputs[0].token_ids == tiny.greedy(variant, 0)
    assert set(replayed.sizes) == {1, 2, 4, 8, 16}
    assert len(replayed.sizes) == 5  # each recorded once, then replayed


@pytest.mark.parametrize("variant", ["qwen3", "gemma3"])
@pytest.mark.usefixtures("thread_ranks")
def test_ranks_choose_the_likeliest_token_of_parts_of_the_logits(replayed, variant):
    """And gather the logits of a step where somebody samples."""
    with LLM(
        str(tiny.checkpoint(variant)), dtype="float32", device="cpu", num_threads=1, max_num_seqs=4,
        max_model_len=tiny.CONTEXT, skip_tokenizer_init=True, check_invariants=True,
        kv_cache_memory_bytes=8 << 20, tensor_parallel_size=2,
    ) as llm:  # fmt: skip
        params = [GREEDY, GREEDY, GREEDY.clone(temperature=0.8, seed=3, max_tokens=9)]
        outputs = llm.generate(tiny.PROMPTS, params, use_tqdm=False)
    for i in range(2):
        assert outputs[i].outputs[0].token_ids == tiny.greedy(variant, i)
    assert {2, 4} <= set(replayed.sizes)
    with LLM(
        str(tiny.checkpoint(variant)), dtype="float32", device="cpu", num_threads=1, skip_tokenizer_init=True,
        max_model_len=tiny.CONTEXT, kv_cache_memory_bytes=8 << 20,
    ) as llm:  # fmt: skip
        alone = llm.generate(tiny.PROMPTS[2:], params[2:], use_tqdm=False)
    assert outputs[2].outputs[0].token_ids == alone[0].outputs[0].token_ids


def test_steps_that_share_blocks_have_graphs_of_their_own(replayed, monkeypatch):
    """Only where it pays, at the shared length of the step; padding and a change of requests do no harm."""
    monkeypatch.setattr(TorchAttention, "cascades", True)  # which minds the hint by getting it right anyway
    for name, value in [("BYTES", 0), ("REQUESTS", 3), ("TOKENS", 32)]:
        monkeypatch.setattr(attention, f"MIN_SHARED_{name}", value)
    steps: list[tuple[int, int, int]] = []
    run = DecodeGraphs.run

    def spy(self: DecodeGraphs, inputs: StepInputs) -> tuple[torch.Tensor, torch.Tensor]:
        (meta,) = inputs.meta
        table = meta.block_table[: inputs.num_requests, : meta.shared_blocks]
        result = run(self, inputs)
        assert (table == table[0]).all()
        assert meta.shared_blocks * 8 < meta.seq_lens[: inputs.num_requests].min()
        if meta.shared_blocks:
            assert int(meta.shared_len) == meta.shared_blocks * 8
        steps.append((inputs.num_requests, meta.shared_blocks, len(replayed.sizes)))
        return result

    monkeypatch.setattr(DecodeGraphs, "run", spy)
    head = [11 * i % 300 for i in range(45)]
    prompts = [{"prompt_token_ids": [*head[:length], i]} for i, length in enumerate((45, 45, 45, 36, 45))]
    params = [GREEDY.clone(max_tokens=n) for n in (30, 25, 20, 15, 10)]
    tokens = {}
    for off in (False, True):
        with LLM(
            str(tiny.checkpoint("qwen3")), dtype="float32", device="cpu", num_threads=1, max_num_seqs=16,
            max_model_len=tiny.CONTEXT, skip_tokenizer_init=True, check_invariants=True, block_size=8,
            kv_cache_memory_bytes=8 << 20, attention_backend="torch", disable_cascade_attn=off,
        ) as llm:  # fmt: skip
            outputs = llm.generate(prompts, params, use_tqdm=False)
        tokens[off] = [o.outputs[0].token_ids for o in outputs]
        pairs = [(n, shared) for n, shared, _ in steps]
        steps.clear()
        if off:
            assert not any(shared for _, shared in pairs)
        else:  # all five; without the last; without the one that shares less; two are too few
            assert [p for i, p in enumerate(pairs) if p not in pairs[:i]] == [
                (5, 4), (4, 4), (3, 5), (2, 0), (1, 0),
            ]  # fmt: skip
            # Sizes 8 and 4 where blocks are shared (twice the same graph of 4), 2 and 1 where not.
            assert replayed.sizes == [8, 4, 2, 1]
    assert tokens[False] == tokens[True]


def test_a_head_reads_the_hidden_states_of_replayed_steps(replayed, monkeypatch):
    """Prompts of one token, so that steps with rows to follow are such as have graphs."""
    watch = Watch(monkeypatch)
    params = GREEDY.clone(max_tokens=6)
    with drafted("llama", "speculators", max_num_seqs=4) as llm:
        for first in (10, 20, 30):
            llm.generate([[first], [first + 1], [first + 2]], params, use_tqdm=False)
    assert len(set(replayed.steps)) == len(replayed.steps)  # three requests, padded: recorded once
    assert {padding.requests for padding in replayed.steps} == {4}
    assert max(padding.most for padding in replayed.steps) == 5
    assert {len(tokens) for tokens, _, _ in watch.seen} >= {2, 4}
    assert len({tokens[0] for tokens, _, _ in watch.seen}) == 9
    watch.check("speculators", "llama")
