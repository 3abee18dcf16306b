"""Taking a step's tokens in: appended to their requests, ended where they end them, told."""

from __future__ import annotations

import time
from typing import Protocol

import numpy as np

from octavo.engine.request import Request
from octavo.engine.slots import Slots
from octavo.messages import CoreOutput, CoreStats
from octavo.step_messages import StepPlan, StepResult


class Finish(Protocol):
    """Ends a request and makes its last output."""

    def __call__(
        self,
        request: Request,
        reason: str,
        stop_reason: int | None = None,
        error: str | None = None,
        error_param: str | None = None,
        complete: bool = False,
    ) -> CoreOutput: ...


def take_in(
    slots: Slots, plan: StepPlan, epochs: np.ndarray, result: StepResult, stats: CoreStats, finish: Finish
) -> list[CoreOutput]:
    """Append a step's tokens to the requests that are still in their slots; the news of these.

    Args:
        epochs: int64 `[n]`, the epochs of the plan's slots when it was made: another one means that the
            slot has changed hands since.
        finish: called for the requests that their newest token ends.
    """
    now = time.time()
    live = slots.epoch[plan.slots] == epochs
    if result.prompt_logprobs is not None:
        _collect_prompt_logprobs(slots, plan, live, result)
    outputs: list[CoreOutput] = []
    sampled = live & plan.samples
    slots.intervals.observe(plan.slots[sampled & (result.num_tokens > 0)], time.monotonic())
    for column in range(result.tokens.shape[1]):
        if column:
            sampled &= slots.epoch[plan.slots] == epochs  # not ended by an earlier column
        rows = np.flatnonzero(sampled & (result.num_tokens > column))
        outputs += _append(slots, plan.slots[rows], rows, column, result, now, stats, finish)
    return outputs if result.tokens.shape[1] == 1 else _merge(outputs)


def _merge(outputs: list[CoreOutput]) -> list[CoreOutput]:
    """One output for each request, of those that each of its tokens made."""
    merged: dict[str, CoreOutput] = {}
    for output in outputs:
        first = merged.get(output.request_id)
        if first is not None:
            output.new_token_ids = first.new_token_ids + output.new_token_ids
            if first.logprobs is not None:
                output.logprobs = first.logprobs + (output.logprobs or [])
            output.prompt_logprobs = output.prompt_logprobs or first.prompt_logprobs
            output.metrics = output.metrics or first.metrics
            output.num_cached_tokens = output.num_cached_tokens or first.num_cached_tokens
        merged[output.request_id] = output
    return list(merged.values())


def _append(
    slots: Slots,
    own: np.ndarray,
    rows: np.ndarray,
    column: int,
    result: StepResult,
    now: float,
    stats: CoreStats,
    finish: Finish,
) -> list[CoreOutput]:
    """Append one token each to the requests in slots `own`, whose places in the plan are `rows`."""
    tokens = result.tokens[rows, column]
    known = slots.num_known[own]
    slots.tokens[own, known] = tokens
    slots.num_known[own] = known + 1
    stats.generation_tokens += len(own)
    if result.logprobs is not None:
        for slot, row in zip(own.tolist(), rows.tolist(), strict=True):
            entries = result.logprobs[row]
            if entries is not None:
                slots.at(slot).logprobs.append(entries[column])
    if result.pooled is not None:
        for slot, row in zip(own.tolist(), rows.tolist(), strict=True):
            slots.at(slot).pooled = result.pooled[row]
    first = known == slots.prompt_len[own]
    for slot in own[first].tolist() if first.any() else ():
        slots.at(slot).metrics.first_token_time = now
        stats.prompt_tokens += int(slots.prompt_len[slot])
        stats.prompt_tokens_cached += max(slots.at(slot).num_cached, 0)
    may_end = (known + 1 >= slots.max_total[own]) | (slots.stop_uses[tokens] > 0) | slots.masked[own]
    outputs, news = slots.news.tell(own, tokens, may_end)
    for slot, token, ending in zip(
        own[news].tolist(), tokens[news].tolist(), may_end[news].tolist(), strict=True
    ):
        request = slots.at(slot)
        if ending and (ended := _ended(slots, request, token, finish)) is not None:
            outputs.append(ended)
        elif request.core.stream:
            outputs.append(slots.news.report(request, slots.known(request)))
    return outputs


def _ended(slots: Slots, request: Request, token: int, finish: Finish) -> CoreOutput | None:
    """The last output of a request that its newest token ends, else None."""
    known = int(slots.num_known[request.slot])
    grammar = request.grammar
    if grammar is not None and not grammar.accept(token):
        return finish(request, "error", error=grammar.error, error_param="structured_outputs")
    if token in request.stop_ids and known - request.prompt_len >= request.core.params.min_tokens:
        return finish(request, "stop", None if token in request.core.eos_token_ids else token)
    if grammar is not None and grammar.is_terminated:
        return finish(request, "stop", complete=True)
    if known >= slots.max_total[request.slot]:
        return finish(request, "length")
    return None


def _collect_prompt_logprobs(slots: Slots, plan: StepPlan, live: np.ndarray, result: StepResult) -> None:
    assert result.prompt_logprobs is not None
    for i, entries in enumerate(result.prompt_logprobs):
        if entries is not None and live[i]:
            request = slots.at(int(plan.slots[i]))
            if not request.prompt_logprobs:
                request.prompt_logprobs.append(None)  # nothing precedes the first token
            request.prompt_logprobs.extend(entries)
            slots.wants_prompt_logprobs[request.slot] = request.wants_prompt_logprobs
