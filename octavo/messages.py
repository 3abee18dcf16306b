"""What passes between front end and engine core.

Plain data (msgspec structs of Python values), so that the same objects serve a thread and a process. The two
know each other only through them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import msgspec

from octavo.sampling_params import SamplingParams
from octavo.step_messages import ModelFacts, TokenLogprobs


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

# Upper bounds of the buckets of times per token, seconds (those of vLLM's metrics).
TOKEN_BOUNDS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)  # fmt: skip  # noqa: E501


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
        token_intervals: seconds between steps that yielded tokens of the same request, by `TOKEN_BOUNDS`.
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
        disk_cache_queries: tokens looked up on disk, which are those that neither device nor host had.
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
    disk_cache_queries: int = 0
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
    token_intervals: BucketCounts = msgspec.field(default_factory=BucketCounts)
    block_lifetime: BucketCounts = msgspec.field(default_factory=BucketCounts)
    block_idle: BucketCounts = msgspec.field(default_factory=BucketCounts)
    block_reuse_gap: BucketCounts = msgspec.field(default_factory=BucketCounts)


class ProfileStatus(msgspec.Struct, omit_defaults=True):
    """Answer to `StartProfile` and `StopProfile`: what was written, or why nothing was.

    Attributes:
        trace, summary: paths of the trace (gzipped Chrome JSON) and of the text beside it; None at the start.
        num_steps: steps that the trace holds.
        error: what went wrong, in one line.
        rank_traces: paths of each rank's trace, where ranks run the steps; `trace` is the engine's then.
    """

    trace: str | None = None
    summary: str | None = None
    num_steps: int = 0
    error: str | None = None
    rank_traces: list[str] = []


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
