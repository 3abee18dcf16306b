"""What passes between scheduler and workers: plans of steps, and what came of them.

Plain data (Python and NumPy values), so that the same objects serve a thread, a process or a rank. The two
know each other only through them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import numpy as np

from octavo.kv.capacity import token_capacity
from octavo.kv.format import KVGroup
from octavo.sampling_params import SamplingParams


class TokenLogprobs(msgspec.Struct, array_like=True):
    """Log-probabilities at one position: the token that stands there first, then the likeliest.

    `ids` and `values` (natural logarithm) have equal length; `rank` (from 1) is the first's.
    """

    ids: list[int]
    values: list[float]
    rank: int


@dataclass
class Admission:
    """A request enters a slot of the device tables (first time, or again after preemption).

    Attributes:
        slot: row of the device tables, `0 <= slot < max_num_seqs`.
        token_ids: int32, all known tokens (prompt, then what was generated before preemption).
        prompt_len: how many of them are the prompt.
        num_computed: tokens whose KV the cache already holds.
        block_ids: per KV group, the entries of the request's block table; -1 where it holds no block,
            since no row to come reads that far back.
        params, seed, eos_token_ids, bad_words_ids: as in `CoreRequest`.
    """

    slot: int
    token_ids: np.ndarray
    prompt_len: int
    num_computed: int
    block_ids: list[list[int]]
    params: SamplingParams
    seed: int
    eos_token_ids: list[int]
    bad_words_ids: list[list[int]]


@dataclass
class BlockUpdate:
    """Entries that change in one KV group's block table: `table[slots, columns] = blocks` (int32 `[m]`)."""

    slots: np.ndarray
    columns: np.ndarray
    blocks: np.ndarray


@dataclass(frozen=True)
class BlockCopies:
    """Whole blocks (a block id's pages of all layers) that move between device and host memory.

    The executor runs them in this order, beside the step where it can: `out` reads what all earlier steps
    wrote; `urgent` ones are through before the step's kernels write anything (their blocks may be in use
    again already); `into` are through before the step's kernels read anything if `urgent_into`, else at
    some later time that `StepResult.copies_done` tells. Blocks of copies that are not urgent stay held
    by the engine until then.

    Attributes:
        number: counts from 0; results name it.
        out_blocks, out_slots: int32 `[m]`, device blocks and the host slots that they are copied to.
        into_slots, into_blocks: int32 `[k]`, host slots and the device blocks that they are copied to.
        urgent: whether `out` must be through before the step.
        urgent_into: whether `into` must be through before the step.
    """

    number: int
    out_blocks: np.ndarray
    out_slots: np.ndarray
    into_slots: np.ndarray
    into_blocks: np.ndarray
    urgent: bool = False
    urgent_into: bool = False


@dataclass
class DraftOrder:
    """What the workers draft after a step.

    Attributes:
        counts: int32 `[n]`, tokens for each request of the plan.
        updates: new entries of the draft's block tables, by its KV groups.
        catch_up: tokens of the requests' texts that the draft has to compute before.
        follows: bool `[n]`, the requests whose rows a head takes in; None: what drafts reads tokens alone.
        thresholds: a request's draft ends before the token with which the product of the draft's
            probabilities falls below the first, and behind one with which it falls below the second; the
            result tells where. None: drafts are as long as `counts` says.
    """

    counts: np.ndarray
    updates: list[BlockUpdate]
    catch_up: int = 0
    follows: np.ndarray | None = None
    thresholds: tuple[float, float] | None = None


@dataclass
class StepPlan:
    """One step of one replica: which requests get how many rows, and what changed since the last.

    Attributes:
        step_id: counts from 0.
        admissions: requests that enter a slot with this step.
        block_updates: per KV group, new table entries of requests already in a slot.
        slots: int32 `[n]`, the requests of the step by slot.
        num_rows: int32 `[n]`, rows (tokens computed) of each; >= 1.
        start: int32 `[n]`, tokens computed before this step (host's upper bound).
        samples: bool `[n]`, whether the request's last row yields a token.
        prompt_logprobs: int32 `[n]`, -1 none, else how many top tokens each prompt row reports.
        shared_blocks: in a step of one row per request, with how many of the same blocks all requests begin,
            in every KV group without a window; these are full, and computed before the step. Always 0
            elsewhere: a hint that may be too low.
        copies: blocks to move between device and host memory; a step may have these and no rows. One that
            has neither asks for news of copies: its result waits until one of those under way is through.
        masked: int32 `[m]`, ascending: requests of the step (indexes into `slots`) whose tokens are drawn
            under a mask, or None. Such a step draws nothing before its `TokenMasks` have come.
        num_drafts: int32 `[n]`, how many of a request's last rows compute drafts: each of these, and the row
            before them, yields a token, which stands if all drafts before it do. None: nobody has drafts.
        draft_tokens: int32 `[sum of num_drafts]`, those of one request after another; None: the workers made
            them, and they stand behind the known tokens in their token table.
        propose: what the workers draft once the step's tokens are known there; None: nothing.
        in_doubt: int32 `[n]`, by how much `start` may be too high: drafts that steps in flight judge.
        tokens_through: the last step whose tokens this one's rows read (-1: of none that is in flight): with
            pipeline stages, those that have not sampled them take them in before.
    """

    step_id: int
    admissions: list[Admission]
    block_updates: list[BlockUpdate]
    slots: np.ndarray
    num_rows: np.ndarray
    start: np.ndarray
    samples: np.ndarray
    prompt_logprobs: np.ndarray | None = None
    shared_blocks: int = 0
    copies: list[BlockCopies] = field(default_factory=list)
    masked: np.ndarray | None = None
    num_drafts: np.ndarray | None = None
    draft_tokens: np.ndarray | None = None
    propose: DraftOrder | None = None
    in_doubt: np.ndarray | None = None
    tokens_through: int = -1

    @property
    def total_rows(self) -> int:
        """Tokens computed by the step."""
        return int(self.num_rows.sum())


@dataclass(frozen=True)
class TokenMasks:
    """Which tokens may be drawn in a step that was launched.

    Attributes:
        rows: int32 `[m]`, ascending: the plan's `masked`.
        bits: int32 `[k, ceil(vocab_size / 32)]`, bit v % 32 of word v // 32 for token v; at least one is set.
            One mask after another for each row of a request that yields a token: one and one per draft.
    """

    rows: np.ndarray
    bits: np.ndarray


@dataclass
class StepResult:
    """What a step yielded, on the host.

    Attributes:
        tokens: int32 `[n, k + 1]`, sampled tokens of each request in plan order (k drafts; plain
            decoding has one column); rows of requests that did not sample are arbitrary.
        num_tokens: int32 `[n]`, how many leading entries of each row count (0: did not sample).
        logprobs: per request in plan order, one entry per token, or None.
        prompt_logprobs: per request in plan order, entries of the step's prompt rows, or None.
        pooled: per request in plan order, its text's vector as native float32, or None.
        copies_done: numbers of `BlockCopies` that are through since the last result.
        drafted: int32 `[n]`, how many tokens the workers drafted for each request after the step; -1: none
            were asked for. None: as many as were ordered, for an order without thresholds.
        products: float32 `[n, k]`, of each draft's probability and those before it, with `drafted`.
        draft_seconds: that the workers took to draft, and the step with it (0: they did not, or it isn't
            known): after this step, or, beside the host, after the one before it.
        draft_step: the step after which they did; -1: this one.
        stage_seconds: that the pipeline's stages took to compute the step, waiting apart, all of them
            together; a worker tells its own (0: there is one stage, or it isn't known).
        recorded: whether the step took longer than others of its size, because it or its drafts were recorded
            for them.
        copies_failed: numbers of those whose host blocks could not be read or written; they touch no block
            any more. Every number is named once in either list, also if its step failed (then by a later
            step's result): until then its blocks stay held.
    """

    tokens: np.ndarray
    num_tokens: np.ndarray
    logprobs: list[list[TokenLogprobs] | None] | None = None
    prompt_logprobs: list[list[TokenLogprobs] | None] | None = None
    pooled: list[bytes | None] | None = None
    copies_done: list[int] = field(default_factory=list)
    copies_failed: list[int] = field(default_factory=list)
    draft_seconds: float = 0.0
    draft_step: int = -1
    drafted: np.ndarray | None = None
    products: np.ndarray | None = None
    stage_seconds: float = 0.0
    recorded: bool = False

    @classmethod
    def without_tokens(cls, n: int) -> StepResult:
        """Of n requests, none of which sampled."""
        return cls(np.zeros((n, 1), np.int32), np.zeros(n, np.int32))


@dataclass(frozen=True)
class ModelFacts:
    """What the engine must know of the loaded model; found by the workers, equal on all of them but for what
    is measured.

    Attributes:
        max_model_len: longest context served, tokens.
        vocab_size: token ids are below it.
        groups: the KV groups.
        num_blocks: blocks of the pool.
        cache_root: 32-byte root of the block keys.
        overlap: whether steps run beside the host, so that scheduling ahead pays.
        max_num_batched_tokens: most rows of a step.
        summary: start-up figures for the log, by name.
        pooling_type: LAST, MEAN or CLS of an engine that makes embeddings, else None.
        step_weight_bytes: bytes of weights that a step reads, at most (0: not known).
        draft_groups: KV groups of the draft model, [] without one.
        draft_max_model_len: tokens of the longest text that it drafts for.
        num_host_blocks: slots of the host tier, each for one block (0: there is none).
        host_copy_rate: bytes per second that blocks are copied at between host and device, measured at start.
        prefill_rate: tokens per second that a long prompt is computed at, measured or estimated at start.
        memory: bytes by what holds them, as measured after loading (`octavo.planning.ledger.KINDS`).
        rank_memory: the same of each parallel rank, [] where there is one.
    """

    max_model_len: int
    vocab_size: int
    groups: list[KVGroup]
    num_blocks: int
    cache_root: bytes
    overlap: bool
    max_num_batched_tokens: int
    summary: dict[str, str]
    pooling_type: str | None = None
    step_weight_bytes: int = 0
    num_host_blocks: int = 0
    host_copy_rate: float = 0.0
    prefill_rate: float = 0.0
    memory: dict[str, int] = field(default_factory=dict)
    rank_memory: list[dict[str, int]] = field(default_factory=list)
    draft_groups: list[KVGroup] = field(default_factory=list)
    draft_max_model_len: int = 0

    @property
    def kv_capacity(self) -> int:
        """Tokens of the longest context, at most `max_model_len`, that the KV cache holds."""
        return token_capacity(self.groups, self.num_blocks, self.max_model_len)
