"""An engine core over a pretend model: tests drive the scheduler without tensors.

The pretend model is a pure function of a request's seed and the tokens before; its KV cache is a
dictionary of what each block slot holds (for which group of layers, and the tokens up to there), so
reading a wrong, stale or freed block fails. Host memory remembers likewise: a copy reads its source as late
as it may, after checking that nobody has changed it since, and its target is spoilt until it is through.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from octavo.config import EngineConfig
from octavo.engine.core import EngineCore
from octavo.engine.executor import Executor
from octavo.errors import EngineDeadError
from octavo.kv.format import KVFormat, KVGroup
from octavo.kv.keys import NO_EXTRAS
from octavo.kv.manager import KVManager
from octavo.kv.tiers import StoreStats
from octavo.messages import CoreOutput, CoreRequest
from octavo.sampling_params import SamplingParams
from octavo.speculative.proposer import HostProposer, Proposal
from octavo.step_messages import BlockCopies, ModelFacts, StepPlan, StepResult

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
    """A launched step whose result is known already; what copies have ended is told by whoever waits."""

    result: StepResult
    host: PretendHost
    waited: Callable[[], None]

    def wait(self) -> StepResult:
        self.waited()
        self.host.report(self.result)
        return self.result


Content = list[
    "tuple[int, tuple[int, ...]] | None"
]  # of a block: per place, KV group and the tokens up to it
_SPOILT: tuple[int, tuple[int, ...]] = (-1, ())


@dataclass
class _Copying:
    """A copy under way: when it will be through, how, and what its sources held when it was issued."""

    copies: BlockCopies
    due: int
    ok: bool
    sources: list[Content]


class PretendHost:
    """Host memory and the copies into and out of it, through when `delay` says, and well unless `fails` says.

    Attributes:
        delay: for each copy, how many steps later it is through (0: with its own).
        fails: for each copy, whether it fails.
    """

    def __init__(self, cache: dict[int, tuple[int, tuple[int, ...]]], block_size: int):
        self._cache = cache
        self._size = block_size
        self.slots: dict[int, Content] = {}
        self.delay: Callable[[], int] = lambda: 0
        self.fails: Callable[[], bool] = lambda: False
        self._under_way: list[_Copying] = []
        self._step = 0
        self.done: list[int] = []
        self.failed: list[int] = []
        self.step_failed = False  # since the last empty one, which settles the copies that rested on it

    def block(self, block: int) -> Content:
        """What a device block holds."""
        return [self._cache.get(block * self._size + i) for i in range(self._size)]

    def run(self, plan: StepPlan) -> None:
        """Take in a step's copies, and end those that are due."""
        self._step += 1
        for copies in plan.copies:
            assert len(copies.out_blocks) == len(copies.out_slots)
            assert len(copies.into_blocks) == len(copies.into_slots)
            sources = [self.block(int(b)) for b in copies.out_blocks]
            sources += [list(self.slots[int(s)]) for s in copies.into_slots]
            for slot in copies.out_slots.tolist():
                self.slots[slot] = [_SPOILT] * self._size
            for block in copies.into_blocks.tolist():
                self._fill(block, [_SPOILT] * self._size)
            copying = _Copying(copies, self._step + self.delay(), not self.fails(), sources)
            if copies.urgent:
                copying.due = self._step
                self._end(copying)
            else:
                self._under_way.append(copying)
        ending = [c for c in self._under_way if c.due <= self._step]
        if not len(plan.slots) and not plan.copies:
            news = self._under_way or self.done or self.failed or self.step_failed
            assert news, "a step that waits for nothing"
            self.step_failed = False
            if not ending and self._under_way:
                ending = self._under_way[:1]
        for copying in ending:
            self._under_way.remove(copying)
            self._end(copying)

    def report(self, result: StepResult) -> None:
        """Tell what has ended since the last report."""
        result.copies_done, result.copies_failed = self.done, self.failed
        self.done, self.failed = [], []

    def _end(self, copying: _Copying) -> None:
        copies = copying.copies
        sources = iter(copying.sources)
        for block, slot in zip(copies.out_blocks.tolist(), copies.out_slots.tolist(), strict=True):
            content = next(sources)
            assert self.block(block) == content, "a block changed while it was copied out"
            if copying.ok:
                self.slots[slot] = content
        for slot, block in zip(copies.into_slots.tolist(), copies.into_blocks.tolist(), strict=True):
            content = next(sources)
            assert self.slots[slot] == content, "a host slot changed while it was copied"
            assert self.block(block) == [_SPOILT] * self._size, "a block was written while it was copied into"
            if copying.ok:
                self._fill(block, content)
        (self.done if copying.ok else self.failed).append(copies.number)

    def _fill(self, block: int, content: Content) -> None:
        for i, held in enumerate(content):
            if held is None:
                self._cache.pop(block * self._size + i, None)
            else:
                self._cache[block * self._size + i] = held


class PretendStore:
    """A disk tier; reads and writes end when `delay` says, and well unless `fails` says."""

    def __init__(self, host: PretendHost, capacity: int = 1 << 30):
        self._host = host
        self._capacity = capacity
        self.blocks: dict[tuple[int, bytes], Content] = {}
        self.ranks: dict[tuple[int, bytes], int | None] = {}
        self.delay: Callable[[], int] = lambda: 0
        self.fails: Callable[[], bool] = lambda: False
        self._under_way: dict[int, tuple[int, bool, tuple[int, bytes], int]] = {}
        self._tickets = 0
        self._polls = 0
        self.num_read = 0

    @property
    def num_blocks(self) -> int:
        return self._capacity

    def contains(self, group: int, key: bytes) -> bool:
        return (group, key) in self.blocks

    def read(self, group: int, key: bytes, slot: int) -> int:
        self._host.slots[slot] = [_SPOILT] * self._host._size
        return self._begin(True, (group, key), slot)

    def write(self, group: int, key: bytes, slot: int, rank: int | None = None) -> int:
        self.ranks[group, key] = rank
        return self._begin(False, (group, key), slot)

    def _begin(self, reads: bool, entry: tuple[int, bytes], slot: int) -> int:
        self._tickets += 1
        self._under_way[self._tickets] = (self._polls + self.delay(), reads, entry, slot)
        return self._tickets

    def poll(self) -> list[tuple[int, bool]]:
        self._polls += 1
        ended = [ticket for ticket, (due, *_) in self._under_way.items() if due < self._polls]
        return [(ticket, self._end(*self._under_way.pop(ticket)[1:])) for ticket in ended]

    def _end(self, reads: bool, entry: tuple[int, bytes], slot: int) -> bool:
        if self.fails() or (reads and entry not in self.blocks):
            self.blocks.pop(entry, None)
            return False
        if reads:
            self._host.slots[slot] = self.blocks[entry]
            self.num_read += 1
        else:
            self.blocks[entry] = list(self._host.slots[slot])
            while len(self.blocks) > self._capacity:
                del self.blocks[next(iter(self.blocks))]
        return True

    def wait(self, timeout: float) -> None:
        del timeout

    def stats(self) -> StoreStats:
        return StoreStats(blocks=len(self.blocks))

    def close(self) -> None:
        self._under_way.clear()


class PretendExecutor(Executor):
    """Keeps device tables as a worker would, and a cache that remembers what was written where."""

    def __init__(
        self,
        config: EngineConfig,
        num_blocks: int,
        max_model_len: int,
        windows: Sequence[int | None] = (None,),
        num_host_blocks: int = 0,
        disk: bool = False,
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
            num_host_blocks=num_host_blocks,
        )
        self.block_size = config.block_size
        shape = (config.max_num_seqs, max_model_len)
        self.tokens = np.full(shape, -7, np.int64)
        self.computed = np.zeros(config.max_num_seqs, np.int64)
        self.in_doubt = np.zeros(config.max_num_seqs, np.int64)  # drafts of a slot's last step
        self.windows = windows
        self.tables = [np.full(shape, -1, np.int64) for _ in windows]
        self.cache = self.make_cache()  # one pool for all groups
        self.host = PretendHost(self.cache, config.block_size)
        self.disk = PretendStore(self.host) if disk else None
        self.block_store = self.disk
        self.stages = config.pipeline_parallel_size
        # By slot, the step that samples for it last; those whose results have been waited for.
        self.sampled_in: dict[int, int] = {}
        self.waited: set[int] = set()
        self.fail_at: int | None = None
        self.largest = 0
        self.plans: list[StepPlan] = []

    def make_cache(self) -> dict[int, tuple[int, tuple[int, ...]]]:
        return {}

    def execute(self, plan: StepPlan) -> Done:
        try:
            return self._execute(plan)
        except AssertionError as error:  # no failure of a step, with which an engine would go on
            raise EngineDeadError(f"the pretend model found an error: {error}") from error

    def _execute(self, plan: StepPlan) -> Done:
        self._check_stages(plan)
        self.plans.append(plan)
        self.largest = max(self.largest, plan.total_rows)
        for a in plan.admissions:
            self.tokens[a.slot, : len(a.token_ids)] = a.token_ids
            self.computed[a.slot] = a.num_computed
            for table, blocks in zip(self.tables, a.block_ids, strict=True):
                table[a.slot, : len(blocks)] = blocks
        for table, u in zip(self.tables, plan.block_updates, strict=True):
            table[u.slots, u.columns] = u.blocks
        self.host.run(plan)
        if self.fail_at == plan.step_id:
            self.host.step_failed = True
            raise RuntimeError("pretend failure")
        drafts = np.zeros(len(plan.slots), np.int32) if plan.num_drafts is None else plan.num_drafts
        starts = self.computed[plan.slots]
        assert (starts <= plan.start).all()
        assert self.in_doubt[plan.slots].any() or (starts == plan.start).all()
        if plan.shared_blocks:
            assert len(plan.slots) > 1 and (plan.num_rows == 1).all()
            assert plan.shared_blocks <= starts.min() // self.block_size, "shared blocks that rows are in"
            for table, window in zip(self.tables, self.windows, strict=True):
                heads = table[plan.slots, : plan.shared_blocks]
                assert window is not None or (heads == heads[0]).all(), "blocks that are not shared"
        ends = starts + plan.num_rows
        for i, (slot, end) in enumerate(zip(plan.slots, ends, strict=True)):
            if drafts[i]:
                assert plan.samples[i] and plan.num_rows[i] > drafts[i]
                if plan.draft_tokens is None:
                    continue  # they are in the table
                assert (starts[i] == plan.start[i]).all(), "drafts behind tokens that nobody knew"
                before = int(drafts[:i].sum())
                self.tokens[slot, end - drafts[i] : end] = plan.draft_tokens[before : before + drafts[i]]
        # As on a device: all rows are written before any is read.
        for slot, start, end in zip(plan.slots, starts, ends, strict=True):
            text = tuple(self.tokens[slot, :end].tolist())
            for group in range(len(self.tables)):
                for p, place in self.places(group, slot, start, end):
                    self.cache[place] = (group, text[: p + 1])
        out = np.full((len(plan.slots), 1 + drafts.max(initial=0)), -1, np.int32)
        counts = np.zeros(len(plan.slots), np.int32)
        for i, (slot, start, end) in enumerate(zip(plan.slots, starts, ends, strict=True)):
            text = tuple(self.tokens[slot, :end].tolist())
            for group, window in enumerate(self.windows):
                if window is not None or plan.samples[i]:  # the whole context less often
                    first = 0 if window is None else max(0, start - window + 1)
                    for p, place in self.places(group, slot, first, end):
                        assert self.cache[place] == (group, text[: p + 1]), "a row read other KV"
            self.computed[slot] = end
            if plan.samples[i]:
                known = end - drafts[i]
                for column in range(1 + drafts[i]):
                    token = out[i, column] = next_token(text[: known + column])
                    counts[i] += 1
                    if known + column < self.tokens.shape[1]:
                        self.tokens[slot, known + column] = token
                    if column == drafts[i] or token != text[known + column]:
                        break
                self.computed[slot] = known - 1 + counts[i]
            self.in_doubt[slot] = drafts[i]
        result = StepResult(tokens=out, num_tokens=counts)
        return Done(result, self.host, lambda: self.waited.add(plan.step_id))

    def _check_stages(self, plan: StepPlan) -> None:
        """With pipeline stages, a token is read by a step that says so, and by none that is under way with
        the one that samples it."""
        for admission in plan.admissions:
            self.sampled_in.pop(admission.slot, None)
        for slot in plan.slots.tolist():
            sampled = self.sampled_in.get(slot)
            if sampled is None:
                continue
            assert sampled <= plan.tokens_through, "a token is read before the first stage has it"
            assert sampled in self.waited or plan.step_id - sampled >= self.stages, "in two steps at once"
        for slot in plan.slots[plan.samples].tolist():
            self.sampled_in[slot] = plan.step_id

    def places(self, group: int, slot: int, start: int, end: int) -> list[tuple[int, int]]:
        """Positions `start .. end - 1`, and where their KV lies, as the block table of the group says."""
        size = self.block_size
        blocks = self.tables[group][slot, : -(-end // size)].tolist()
        assert min(blocks[start // size :]) >= 0, "a row read or wrote where the table has no block"
        return [(p, blocks[p // size] * size + p % size) for p in range(start, end)]

    def close(self) -> None:
        self.plans.clear()


def make_core(
    num_blocks: int = 64,
    max_model_len: int = 200,
    windows: Sequence[int | None] = (None,),
    num_host_blocks: int = 0,
    disk: bool = False,
    **settings,
) -> EngineCore:
    """An engine core over the pretend model, every invariant checked after each step.

    It admits what fits at the moment, unless told otherwise, so that preemption is common.
    """
    values = dict(max_num_seqs=8, max_num_batched_tokens=64, block_size=8, check_invariants=True)
    config = EngineConfig(**values | dict(look_ahead_admission=False) | settings)
    executor = PretendExecutor(config, num_blocks, max_model_len, windows, num_host_blocks, disk)
    return EngineCore(config, executor)


def check_contents(kv: KVManager, executor: PretendExecutor, salts: Sequence[str | None] = (None,)) -> int:
    """Verify that every block that can be found holds what its key says, in the pool, in host memory and on
    disk; returns how many were looked at. No step may be in flight."""
    assert kv.hasher is not None and kv.offloading is not None
    found = [((g, key), executor.host.block(b)) for b, (g, key) in kv.pool.cached()]
    tier = kv.offloading.tier
    found += [(entry, executor.host.slots[slot]) for entry, slot in tier.findable()]
    if executor.disk is not None:
        found += list(executor.disk.blocks.items())
    for (group, key), content in found:
        assert [held and held[0] for held in content] == [group] * kv.block_size, "a block of another group"
        tokens = content[-1][1]
        assert all(held[1] == tokens[: len(held[1])] for held in content), "a block of several texts"
        assert len(tokens) % kv.block_size == 0 and len(content[0][1]) == len(tokens) - kv.block_size + 1
        chains = []
        for salt in salts:
            chains.append([])
            extras = NO_EXTRAS if salt is None else replace(NO_EXTRAS, cache_salt=salt)
            kv.hasher.extend(chains[-1], np.asarray(tokens, np.int32), len(tokens) // kv.block_size, extras)
        assert key in [chain[-1] for chain in chains], "a block holds what another key says"
    return len(found)


class Guesser(HostProposer):
    """Knows the pretend model, and errs at random; drafts anything from none to all that it may."""

    def __init__(self, right: float, seed: int = 0):
        self._right, self._draw = right, random.Random(seed)
        self.in_slots: set[int] = set()

    def enter(self, slot: int) -> None:
        assert slot not in self.in_slots
        self.in_slots.add(slot)

    def leave(self, slot: int, tokens: np.ndarray, prompt_len: int, lasting: bool) -> None:
        assert slot in self.in_slots and len(tokens) >= prompt_len
        self.in_slots.remove(slot)

    def propose(self, slot: int, tokens: np.ndarray, most: int) -> Proposal:
        assert slot in self.in_slots and most >= 1
        text, drafts = tokens.tolist(), []
        for _ in range(self._draw.randint(0, most)):
            right = self._draw.random() < self._right
            drafts.append(next_token(tuple(text)) if right else self._draw.randrange(VOCAB))
            text.append(drafts[-1])
        return Proposal(np.array(drafts, np.int32), 0)


def draft(core: EngineCore, proposer: HostProposer) -> HostProposer:
    """Let another proposer draft for a core that was made with a speculative_config."""
    assert core.scheduler.drafting is not None
    core.scheduler.drafting._proposer = proposer
    return proposer


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
