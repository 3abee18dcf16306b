"""What passes between the parts: front end to engine core, scheduler to worker, and back.

These are plain data (msgspec structs of Python and NumPy values), so that the same objects serve
a thread, a process or a rank. Layers above and below know each other only through them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from octavo.kv.capacity import token_capacity
from octavo.kv.format import KVGroup
from octavo.sampling_params import SamplingParams


class CoreRequest(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A request as the engine core takes it: checked, tokenized, one choice.

    Attributes:
        request_id: unique among live requests.
        prompt_token_ids: at least one id, each within the vocabulary.
        params: `n` is 1, `max_tokens` is set (clamped to the context).
        seed: 64-bit seed of this choice (drawn by the front end when the user gave none).
        eos_token_ids: ids that end the text, empty under `ignore_eos`.
        bad_words_ids: tokenized `params.bad_words`, each a non-empty list.
        arrival_time: `time.time()` at the front end, seconds.
        priority: lower runs first (policy "priority" only).
        cache_salt, lora_digest, mm_spans, prompt_embeds_hash: extra keys of the prefix cache.
        stream: whether tokens are reported step by step or only once finished.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    eos_token_ids: list[int] = []
    bad_words_ids: list[list[int]] = []
    arrival_time: float = 0.0
    priority: int = 0
    cache_salt: str | None = None
    lora_digest: bytes | None = None
    mm_spans: list[tuple[int, int, bytes]] = []
    prompt_embeds_hash: bytes | None = None
    stream: bool = True


class TokenLogprobs(msgspec.Struct, array_like=True):
    """Log-probabilities at one position: the token that stands there first, then the likeliest.

    `ids` and `values` (natural logarithm) have equal length; `rank` (from 1) is the first's.
    """

    ids: list[int]
    values: list[float]
    rank: int


class RequestMetrics(msgspec.Struct):
    """Times of one request, `time.time()` seconds (0: not reached), and its counters."""

    arrival_time: float = 0.0
    scheduled_time: float = 0.0
    first_token_time: float = 0.0
    last_token_time: float = 0.0
    finished_time: float = 0.0
    num_preemptions: int = 0


class CoreOutput(msgspec.Struct, omit_defaults=True, gc=False):  # hundreds a step, and never in a cycle
    """News of one request after a step.

    `finish_reason` is None while it runs, then one of stop, length, abort, error;
    `stop_reason` the stop token's id, if one ended it (the front end fills in stop strings).
    `error` says what went wrong when the reason is error. `pooled` is a text's vector, native float32,
    where the engine makes embeddings. `error_param` names the request's field that is at fault, where the
    error is the user's and not a failure. `complete`: the last token ended the request as its form's end, and
    belongs to the text, unlike a stop token.
    """

    request_id: str
    new_token_ids: list[int] = []
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish_reason: str | None = None
    stop_reason: int | None = None
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = None
    error: str | None = None
    pooled: bytes | None = None
    error_param: str | None = None
    complete: bool = False


# Upper bounds of the buckets of `CoreStats.iteration_tokens` (those of vLLM's metric).
ITERATION_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class BucketCounts(msgspec.Struct, array_like=True):
    """Values counted by bucket: `counts[i]` are those above bound i - 1 and up to bound i of the bounds that
    `add` was called with (always the same), the last those above all bounds; `total` is their sum. Empty
    before the first."""

    counts: list[int] = []
    total: float = 0.0

    def add(self, bounds: Sequence[float], value: float) -> None:
        """Count a value."""
        if not self.counts:
            self.counts = [0] * (len(bounds) + 1)
        self.counts[bisect_left(bounds, value)] += 1
        self.total += value


class CoreStats(msgspec.Struct):
    """Gauges and counters of the engine core; counters only grow.

    Attributes:
        prompt_tokens, prompt_tokens_cached: of requests that yielded a token, and those of them that were not
            computed, whatever cache they came from.
        iteration_tokens: tokens computed by a step, by `ITERATION_BOUNDS`; `num_steps` are counted.
        spec_drafts, spec_draft_tokens, spec_accepted_tokens: drafts that were verified, their tokens, and how
            many of these were accepted; `spec_accepted_per_pos[i]` of those stood at place i of their draft.
        draft_blocks: blocks of the pool that hold KV of a draft model or head; they are among those used.
        draft_blocks_given_back: those that were taken from drafts because blocks were short.

    Attributes of the host tier (0 without one):
        host_blocks_total, host_blocks_used: its slots, and those that hold a block.
        host_cache_queries: tokens looked up in it, which are those that the device's blocks did not have.
        host_cache_hits: tokens of them that were copied back.
        host_bytes_out, host_bytes_in: copied from the device, and to it.
        host_blocks_out, host_blocks_in: the same in blocks.
        host_evictions: blocks that gave up their slot to another.
        host_loads_failed: requests whose copies failed, so that they were computed.
        disk_cache_hits: tokens that were read from disk into the host tier for a request.
        disk_blocks_out, disk_blocks_in, disk_failures: blocks written, read, and neither for an error.
        resumed_by_copy, resumed_by_compute: preempted requests by how they came back: with blocks copied
            from the host, or with what the device still had and the rest computed.

    Attributes of memory:
        prefix_cache_evictions: device blocks that lost their key because they were reused.
        graph_bytes: device memory that recorded steps hold.
        pipeline_bubble: of the last steps, the share of the pipeline stages' time in which they waited, 0
            to 1.
        pipeline_stage_seconds, pipeline_total_seconds: that the stages computed, and that they could have
            while steps were under way, each all stages together.
        block_lifetime, block_idle, block_reuse_gap: of sampled blocks, from allocation to eviction, from
            the last use to eviction, and between uses, by `octavo.kv.residency.BOUNDS`.
    """

    num_running: int = 0
    num_waiting: int = 0
    kv_blocks_total: int = 0
    kv_blocks_used: int = 0
    kv_cache_usage: float = 0.0
    num_preemptions: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    prompt_tokens: int = 0
    prompt_tokens_cached: int = 0
    generation_tokens: int = 0
    num_steps: int = 0
    host_blocks_total: int = 0
    host_blocks_used: int = 0
    host_cache_queries: int = 0
    host_cache_hits: int = 0
    host_bytes_out: int = 0
    host_bytes_in: int = 0
    host_blocks_out: int = 0
    host_blocks_in: int = 0
    host_evictions: int = 0
    host_loads_failed: int = 0
    disk_cache_hits: int = 0
    disk_blocks_out: int = 0
    disk_blocks_in: int = 0
    disk_failures: int = 0
    resumed_by_copy: int = 0
    resumed_by_compute: int = 0
    prefix_cache_evictions: int = 0
    graph_bytes: int = 0
    pipeline_bubble: float = 0.0
    pipeline_stage_seconds: float = 0.0
    pipeline_total_seconds: float = 0.0
    draft_blocks: int = 0
    draft_blocks_given_back: int = 0
    spec_drafts: int = 0
    spec_draft_tokens: int = 0
    spec_accepted_tokens: int = 0
    spec_accepted_per_pos: list[int] = []
    iteration_tokens: BucketCounts = msgspec.field(default_factory=BucketCounts)
    block_lifetime: BucketCounts = msgspec.field(default_factory=BucketCounts)
    block_idle: BucketCounts = msgspec.field(default_factory=BucketCounts)
    block_reuse_gap: BucketCounts = msgspec.field(default_factory=BucketCounts)


class ProfileStatus(msgspec.Struct, omit_defaults=True):
    """Answer to `StartProfile` and `StopProfile`: what was written, or why nothing was.

    Attributes:
        trace, summary: paths of the trace (gzipped Chrome JSON) and of the text beside it; None at the start.
        num_steps: steps that the trace holds.
        error: what went wrong, in one line.
    """

    trace: str | None = None
    summary: str | None = None
    num_steps: int = 0
    error: str | None = None


class RequestInfo(msgspec.Struct):
    """One request at one moment, as the engine core knows it.

    Attributes:
        request_id: the choice's id.
        state: "running" (in the batch), "loading" (its KV is on its way) or "waiting".
        num_prompt_tokens, num_output_tokens, max_tokens: its lengths, and the most it may generate.
        num_computed_tokens: tokens whose rows are scheduled; 0 unless it runs.
        num_cached_tokens: tokens of the prompt that the prefix cache served.
        num_preemptions: how often it gave way.
        arrival_time: `time.time()` at the front end, seconds.
        prompt_tail, output_tail: the last token ids of both; empty unless asked for.
    """

    request_id: str
    state: str
    num_prompt_tokens: int
    num_output_tokens: int
    max_tokens: int
    num_computed_tokens: int
    num_cached_tokens: int
    num_preemptions: int
    arrival_time: float
    prompt_tail: list[int] = []
    output_tail: list[int] = []


class KVMap(msgspec.Struct):
    """Answer to `DescribeKV`: what each block of the pool is at this moment.

    Attributes:
        cells: a byte per cell, in the order of block ids: the state (an index into `octavo.kv.map.STATES`)
            that most blocks of the cell have.
        blocks_per_cell: blocks that a cell stands for (the last one's may be fewer).
        num_blocks: blocks of the pool.
        block_tokens, block_bytes: what one block holds.
        counts: blocks by state, exact; a block has one state.
        host_copies: device blocks whose contents are in the host tier too.
        host_cells, host_blocks_per_cell, host_blocks: the same of the host tier's slots: 1 where most hold
            a block, else 0; empty without a host tier.
        num_running, num_waiting: requests.
        requests: the first of these, as many as were asked for: those that run in their order, then the
            others by arrival (without those whose grammar is being compiled).
    """

    cells: bytes
    blocks_per_cell: int
    num_blocks: int
    block_tokens: int
    block_bytes: int
    counts: dict[str, int]
    host_copies: int = 0
    host_cells: bytes = b""
    host_blocks_per_cell: int = 1
    host_blocks: int = 0
    num_running: int = 0
    num_waiting: int = 0
    requests: list[RequestInfo] = []


class SleepStatus(msgspec.Struct, omit_defaults=True):
    """Answer to `Sleep` and `WakeUp`.

    Attributes:
        level: at which the engine sleeps now; 0: it is awake.
        freed_bytes: memory that was given back.
        seconds: what it took.
        error: why nothing was done, in one line.
    """

    level: int = 0
    freed_bytes: int = 0
    seconds: float = 0.0
    error: str | None = None


class CoreOutputs(msgspec.Struct, tag="outputs", omit_defaults=True):
    """Everything a step (or a batch of them) has to report; `profile` answers a profile's message, `kv_map`
    a `DescribeKV`, `sleep` a `Sleep` or `WakeUp`."""

    outputs: list[CoreOutput]
    stats: CoreStats
    profile: ProfileStatus | None = None
    kv_map: KVMap | None = None
    sleep: SleepStatus | None = None


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


class AddRequests(msgspec.Struct, tag="add"):
    """Front end to core: queue these."""

    requests: list[CoreRequest]


class AbortRequests(msgspec.Struct, tag="abort"):
    """Front end to core: end these."""

    request_ids: list[str]


class ResetPrefixCache(msgspec.Struct, tag="reset_prefix_cache"):
    """Front end to core: forget all cached blocks."""


class StartProfile(msgspec.Struct, tag="start_profile"):
    """Front end to core: record the steps from here on."""


class StopProfile(msgspec.Struct, tag="stop_profile"):
    """Front end to core: end the profile and write it."""


class DescribeKV(msgspec.Struct, tag="describe_kv"):
    """Front end to core: tell what the blocks of the KV pool are, in at most `cells` cells, and what at most
    `requests` of the requests are, with the last `tokens` token ids of their prompts and outputs."""

    cells: int
    requests: int = 0
    tokens: int = 0


class Sleep(msgspec.Struct, tag="sleep"):
    """Front end to core: give memory back (level 1: the weights stay in host memory; 2: they go too)."""

    level: int


class WakeUp(msgspec.Struct, tag="wake_up"):
    """Front end to core: take the memory again."""


class AskPulse(msgspec.Struct, tag="ask_pulse"):
    """Front end to core process: tell where the loop is (`Pulse`); answered beside the loop."""


class Shutdown(msgspec.Struct, tag="shutdown"):
    """Front end to core: free everything and return."""


ToCore = (
    AddRequests
    | AbortRequests
    | ResetPrefixCache
    | StartProfile
    | StopProfile
    | DescribeKV
    | Sleep
    | WakeUp
    | AskPulse
    | Shutdown
)


class Ready(msgspec.Struct, tag="ready"):
    """Core process to front end: the model is loaded."""

    facts: ModelFacts


class Pulse(msgspec.Struct, tag="pulse"):
    """Answer to `AskPulse`: how often the loop has gone round; whether it waits for a message; whether it
    does what it has not done before (a step of a new size may compile); seconds that it took at most so far.
    """

    turn: int
    idle: bool
    first: bool = False
    longest: float = 0.0


class Fatal(msgspec.Struct, tag="fatal"):
    """Core process to front end: it cannot start or go on. `kind` is the error class's name."""

    kind: str
    message: str


FromCore = CoreOutputs | Ready | Pulse | Fatal
