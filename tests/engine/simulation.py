"""An engine core over a pretend model: tests drive the scheduler without tensors.

The pretend model is a pure function of a request's seed and the tokens before; its KV cache is a
dictionary of what each block slot holds (for which group of layers, and the tokens up to there), so
reading a wrong, stale or freed block fails.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from octavo.config import EngineConfig
from octavo.engine.core import EngineCore
from octavo.engine.executor import Executor
from octavo.kv.format import KVFormat, KVGroup
from octavo.messages import CoreOutput, CoreRequest, ModelFacts, StepPlan, StepResult
from octavo.sampling_params import SamplingParams

VOCAB = 1000


def next_token(context: tuple[int, ...]) -> int:
    """The pretend model's greedy token after `context`."""
    digest = hashlib.blake2b(np.asarray(context, np.int32).tobytes(), digest_size=4).digest()
    return int.from_bytes(digest, "little") % VOCAB


def expected(prompt: list[int], count: int) -> list[int]:
    """The tokens that the pretend model yields after a prompt."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tuple(tokens)))
    return tokens[len(prompt) :]


@dataclass
class Done:
    """A launched step whose result is known already."""

    result: StepResult

    def wait(self) -> StepResult:
        return self.result


class PretendExecutor(Executor):
    """Keeps device tables as a worker would, and a cache that remembers what was written where."""

    def __init__(
        self,
        config: EngineConfig,
        num_blocks: int,
        max_model_len: int,
        windows: Sequence[int | None] = (None,),
    ):
        """A model with one layer per entry of `windows`, each a KV group of its own."""
        fmt = KVFormat("float32", config.block_size, 1, 1)
        self.facts = ModelFacts(
            max_model_len=max_model_len,
            vocab_size=VOCAB,
            groups=[KVGroup(f"g{g}", (g,), fmt, window) for g, window in enumerate(windows)],
            num_blocks=num_blocks,
            cache_root=b"r" * 32,
            overlap=False,
            max_num_batched_tokens=config.max_num_batched_tokens or 64,
            summary={},
        )
        self.block_size = config.block_size
        shape = (config.max_num_seqs, max_model_len)
        self.tokens = np.full(shape, -7, np.int64)
        self.computed = np.zeros(config.max_num_seqs, np.int64)
        self.windows = windows
        self.tables = [np.full(shape, -1, np.int64) for _ in windows]
        self.cache: dict[int, tuple[int, tuple[int, ...]]] = {}  # one pool for all groups
        self.fail_at: int | None = None
        self.largest = 0
        self.plans: list[StepPlan] = []

    def execute(self, plan: StepPlan) -> Done:
        self.plans.append(plan)
        self.largest = max(self.largest, plan.total_rows)
        for a in plan.admissions:
            self.tokens[a.slot, : len(a.token_ids)] = a.token_ids
            self.computed[a.slot] = a.num_computed
            for table, blocks in zip(self.tables, a.block_ids, strict=True):
                table[a.slot, : len(blocks)] = blocks
        for table, u in zip(self.tables, plan.block_updates, strict=True):
            table[u.slots, u.columns] = u.blocks
        if self.fail_at == plan.step_id:
            raise RuntimeError("pretend failure")
        assert (self.computed[plan.slots] == plan.start).all()
        if plan.shared_blocks:
            assert len(plan.slots) > 1 and (plan.num_rows == 1).all()
            assert plan.shared_blocks <= plan.start.min() // self.block_size, "shared blocks that rows are in"
            for table, window in zip(self.tables, self.windows, strict=True):
                heads = table[plan.slots, : plan.shared_blocks]
                assert window is not None or (heads == heads[0]).all(), "blocks that are not shared"
        ends = plan.start + plan.num_rows
        # As on a device: all rows are written before any is read.
        for slot, start, end in zip(plan.slots, plan.start, ends, strict=True):
            for p in range(start, end):
                held = tuple(self.tokens[slot, : p + 1])
                for group in range(len(self.tables)):
                    self.cache[self.place(group, slot, p)] = (group, held)
        out = np.full((len(plan.slots), 1), -1, np.int32)
        for i, (slot, start, end) in enumerate(zip(plan.slots, plan.start, ends, strict=True)):
            self.computed[slot] = end
            for group, window in enumerate(self.windows):
                if window is not None or plan.samples[i]:  # the whole context less often
                    for p in range(0 if window is None else max(0, start - window + 1), end):
                        held = self.cache[self.place(group, slot, p)]
                        assert held == (group, tuple(self.tokens[slot, : p + 1])), "a row read other KV"
            if plan.samples[i]:
                out[i] = next_token(tuple(self.tokens[slot, :end]))
                if end < self.tokens.shape[1]:
                    self.tokens[slot, end] = out[i, 0]
        return Done(StepResult(tokens=out, num_tokens=plan.samples.astype(np.int32)))

    def place(self, group: int, slot: int, position: int) -> int:
        """Where a token's KV lies, as the block table of the group says."""
        block = self.tables[group][slot, position // self.block_size]
        assert block >= 0, "a row read or wrote where the table has no block"
        return int(block) * self.block_size + position % self.block_size

    def close(self) -> None:
        self.plans.clear()


def make_core(
    num_blocks: int = 64, max_model_len: int = 200, windows: Sequence[int | None] = (None,), **settings
) -> EngineCore:
    """An engine core over the pretend model, every invariant checked after each step."""
    values = dict(max_num_seqs=8, max_num_batched_tokens=64, block_size=8, check_invariants=True) | settings
    config = EngineConfig(**values)
    return EngineCore(config, PretendExecutor(config, num_blocks, max_model_len, windows))


def request(name: str, prompt: list[int], max_tokens: int = 8, **fields) -> CoreRequest:
    """A request with sampling left at its defaults."""
    params = fields.pop("params", SamplingParams(max_tokens=max_tokens, temperature=0.0))
    return CoreRequest(request_id=name, prompt_token_ids=prompt, params=params, seed=0, **fields)


def run(core: EngineCore, limit: int = 10000) -> dict[str, list[CoreOutput]]:
    """Step until nothing is left; the outputs of each request in order."""
    outputs: dict[str, list[CoreOutput]] = {}
    for _ in range(limit):
        if not core.has_work:
            return outputs
        for output in core.step():
            outputs.setdefault(output.request_id, []).append(output)
    raise AssertionError(f"not finished after {limit} steps")


def tokens_of(outputs: list[CoreOutput]) -> list[int]:
    """All output tokens of a request."""
    return [token for output in outputs for token in output.new_token_ids]
