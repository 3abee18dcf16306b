"""Whether a waiting request can begin: will there be blocks for it and for all that run?"""

from __future__ import annotations

import numpy as np

from octavo.engine.forecast import Demand, Forecast, Part
from octavo.engine.loading import LoadingRequests
from octavo.engine.request import Request
from octavo.engine.slots import Slots
from octavo.kv.capacity import blocks_of
from octavo.kv.manager import KVManager


class Outlook:
    """Foresees, during one step's admissions, what the requests that hold blocks will need until their ends.

    That is predicted once a step, if it is asked for; where all fit at their limits, nothing is.
    """

    def __init__(self, kv: KVManager, slots: Slots, loading: LoadingRequests):
        self.forecast = Forecast(kv.groups)
        self._kv = kv
        self._slots = slots
        self._loading = loading
        self._demand: Demand | None = None
        self._at_limits = 0  # blocks of all, each at its limit
        self._weighed: tuple[Request, Part] | None = None  # the last one

    def begin(self) -> None:
        """A step's admissions begin."""
        self._demand = self._weighed = None
        slots, size = self._slots, self._kv.block_size
        running = -(-slots.max_total[slots.running] // size)
        loading = sum(blocks_of(request.max_total, size) for request in self._loading.live())
        self._at_limits = (int(running.sum()) + loading) * len(self._kv.groups)

    def fits(self, request: Request, num_used: int) -> bool:
        """Whether a request will fit beside all that hold blocks.

        Args:
            num_used: blocks that are in use once it has begun.
        """
        if self._at_limits + self._limit_of(request) <= self._kv.pool.num_blocks:
            return True
        facts = _facts([request])
        longest = self.forecast.longest(*facts[1:])
        if self._demand is None or self._demand.horizon < longest:
            self._demand = self._predict(longest)
        part = self._demand.part(*facts)
        self._weighed = (request, part)
        return self._demand.peak(num_used, part) <= self._kv.pool.num_blocks

    def add(self, request: Request) -> None:
        """A request has been given blocks."""
        self._at_limits += self._limit_of(request)
        if self._demand is not None:
            weighed = self._weighed is not None and self._weighed[0] is request
            part = self._weighed[1] if weighed and self._weighed else self._demand.part(*_facts([request]))
            self._demand.add(part)

    def _limit_of(self, request: Request) -> int:
        return blocks_of(request.max_total, self._kv.block_size) * len(self._kv.groups)

    def _predict(self, horizon: float) -> Demand:
        """What running and loading requests will need, for so many tokens from now at least."""
        slots, run = self._slots, self._slots.running
        prompts, tokens = slots.prompt_len[run], slots.num_tokens[run]
        running = (tokens, tokens - prompts, slots.max_total[run] - prompts, slots.ends_at_limit[run])
        loading = _facts(self._loading.live())
        facts = [np.concatenate(pair) for pair in zip(running, loading, strict=True)]
        demand = Demand(self.forecast, max(horizon, self.forecast.longest(*facts[1:])))
        demand.add(demand.part(*facts))
        return demand


def _facts(requests: list[Request]) -> list[np.ndarray]:
    """Of requests that are in no slot, what `Demand.part` takes."""
    rows = [(len(r.token_ids), r.prompt_len, r.max_total, r.ends_at_limit) for r in requests]
    tokens, prompts, most, certain = np.array(rows, np.int64).reshape(-1, 4).T
    return [tokens, tokens - prompts, most - prompts, certain.astype(bool)]
