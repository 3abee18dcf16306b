"""The requests that there are at one moment, for whoever watches the engine."""

from __future__ import annotations

import itertools

from octavo.engine.scheduler import Scheduler
from octavo.messages import RequestInfo


def describe_requests(scheduler: Scheduler, most: int, tokens: int) -> list[RequestInfo]:
    """The first `most` live requests: those that run in their order, then the others by arrival.

    Args:
        tokens: how many of the last token ids of prompt and output to tell.
    """
    told = []
    for request, computed, known in itertools.islice(scheduler.live_requests(), most):
        core, length = request.core, request.prompt_len
        info = RequestInfo(
            core.request_id,
            "running" if request.slot >= 0 else "loading" if request.loading else "waiting",
            num_prompt_tokens=length,
            num_output_tokens=len(known) - length,
            max_tokens=request.max_total - length,
            num_computed_tokens=computed,
            num_cached_tokens=max(request.num_cached, 0),
            num_preemptions=request.metrics.num_preemptions,
            arrival_time=core.arrival_time,
        )
        if tokens:
            info.prompt_tail = known[max(0, length - tokens) : length].tolist()
            info.output_tail = known[length:][-tokens:].tolist()
        told.append(info)
    return told
