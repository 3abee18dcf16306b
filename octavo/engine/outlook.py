"""Whether a waiting request can begin: will there be blocks for it and for all that run?"""

from __future__ import annotations

import numpy as np

from octavo.engine.forecast import Demand, Facts, Forecast, Part
from octavo.engine.loading import LoadingRequests
from octavo.engine.pace import Pace
from octavo.engine.request import Request
from octavo.engine.slots import Slots
from octavo.kv.capacity import blocks_of
from octavo.kv.manager import KVManager


class Outlook:
    """Foresees, during one step's admissions, what the requests that hold blocks will need until their ends.

    That is predicted once a step, if it is asked for; where all fit at their limits, nothing is.

    Attributes:
        pace: how fast requests go on.
    """

    def __init__(self, kv: KVManager, slots: Slots, loading: LoadingRequests):
        self.forecast = Forecast(kv.groups)
        self.pace = Pace(len(slots.num_tokens))
        slots.on_enter.append(lambda request: self.pace.enter(request.slot))
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
        facts = self._facts([request])
        longest = self.forecast.longest(facts)
        if self._demand is None or self._demand.horizon < longest:
            self._demand = self._predict(longest)
        part = self._demand.part(facts)
        self._weighed = (request, part)
        return self._demand.peak(num_used, part) <= self._kv.pool.num_blocks

    def add(self, request: Request) -> None:
        """A request has been given blocks."""
        self._at_limits += self._limit_of(request)
        if self._demand is not None:
            weighed, part = self._weighed or (None, None)
            if weighed is not request or part is None:
                part = self._demand.part(self._facts([request]))
            self._demand.add(part)

    def _limit_of(self, request: Request) -> int:
        return blocks_of(request.max_total, self._kv.block_size) * len(self._kv.groups)

    def _predict(self, horizon: float) -> Demand:
        """What running and loading requests will need, for so many steps from now at least."""
        slots, run = self._slots, self._slots.running
        # Of drafts that are being judged none is known to stand.
        prompts, tokens = slots.prompt_len[run], slots.num_tokens[run] - slots.in_doubt[run]
        most = slots.max_total[run] - prompts
        running = Facts(tokens, tokens - prompts, most, slots.ends_at_limit[run], *self.pace.of(run))
        loading = self._facts(self._loading.live())
        facts = Facts(*(np.concatenate(pair) for pair in zip(running, loading, strict=True)))
        demand = Demand(self.forecast, max(horizon, self.forecast.longest(facts)))
        demand.add(demand.part(facts))
        return demand

    def _facts(self, requests: list[Request]) -> Facts:
        """Of requests that are in no slot."""
        rows = [(len(r.token_ids), r.prompt_len, r.max_total, r.ends_at_limit) for r in requests]
        tokens, prompts, most, certain = np.array(rows, np.int64).reshape(-1, 4).T
        usual = self.pace.usual(len(requests))
        return Facts(tokens, tokens - prompts, most - prompts, certain.astype(bool), *usual)
