"""Which waiting requests begin: the first ones, while slots, blocks and the step's rows last."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from octavo.engine.followers import Followers
from octavo.engine.limits import SchedulerLimits
from octavo.engine.loading import LoadingRequests
from octavo.engine.outlook import Outlook
from octavo.engine.request import Request
from octavo.engine.slots import Slots
from octavo.engine.trials import TrialQueue
from octavo.kv.draft_blocks import DraftBlocks
from octavo.kv.manager import KVManager, Prefix
from octavo.messages import CoreStats
from octavo.step_messages import Admission

_LOOK_AGAIN = 16  # steps, while drafts hold blocks
_NOBODY = ((0, -1), 0, 0, 0)


class AdmissionControl:
    """Takes requests out of the waiting queue: into slots, or among those that wait for copies or for
    another's rows.

    Attributes:
        outlook: what those that hold blocks will need.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        kv: KVManager,
        slots: Slots,
        waiting: TrialQueue,
        loading: LoadingRequests,
        followers: Followers,
        draft_blocks: DraftBlocks | None,
        give_back_drafts: Callable[[int, bool], int],
        stats: CoreStats,
    ):
        """
        Args:
            give_back_drafts: as `Drafting.give_back`.
            stats: counts what is found in the caches.
        """
        self._limits, self._kv, self._slots = limits, kv, slots
        self._waiting, self._loading, self._followers = waiting, loading, followers
        self._draft_blocks, self._give_back_drafts = draft_blocks, give_back_drafts
        self._stats = stats
        self.outlook = Outlook(kv, slots, loading)
        # The first waiting request that found no room, and `_room` then.
        self._refused = _NOBODY
        # New requests leave a little room, so that running ones need not be preempted at once.
        self._watermark = max(1, kv.pool.num_blocks // 100)

    def look_again(self) -> None:
        """Room may have been made otherwise than by requests that ended."""
        self._refused = _NOBODY

    def admit(self, budget: int, step_id: int) -> list[tuple[Admission, int]]:
        """Move waiting requests into slots, in order, while slots, blocks and budget last."""
        admitted: list[tuple[Admission, int]] = []
        most = self._limits.most_rows
        size = self._kv.block_size
        self.outlook.begin()
        while budget > 0 and self._slots.num_free > self._loading.num_live and len(self._waiting):
            request = self._waiting.peek()
            if self._still_refused(request, step_id):
                break
            known = len(request.token_ids)
            alone = not (len(self._slots.running) or self._loading.num_live)
            if request.wants_prompt_logprobs:
                prefix = self._kv.no_prefix()
            elif self._kv.fetch(request.seq, request.token_ids, self._stats):
                self._begin_loading(request, 0, 0)
                continue
            else:
                prefix = self._kv.find_prefix(request.seq, request.token_ids, busy=not alone)
            cached = prefix.num_blocks * size
            if (
                self._kv.shares
                and not request.wants_prompt_logprobs
                and self._followers.take(request, cached)
            ):
                self._waiting.pop()
                continue
            count = min(known - cached, budget, most)
            spare = 0 if alone else self._watermark
            free = self._kv.num_free_after(prefix) - spare
            lacking = self._kv.missing_at_most(prefix, known, count) - free
            if lacking > 0 and (alone or self._foresees_room(request, prefix, count)):
                free += self._give_back_drafts(lacking, True)
            while count and self._kv.missing_at_most(prefix, known, count) > free:
                count //= 2  # windows need less room in smaller steps
            if not count or not (alone or self._foresees_room(request, prefix, count)):
                self._refused = (request.order, *self._room())
                break
            self.outlook.add(request)
            self._kv.adopt(request.seq, prefix)
            self._kv.grow(request.seq, cached + count, known)
            if request.seq.waiter:
                self._begin_loading(request, cached, prefix.on_device * size)
                continue
            self._waiting.pop()
            admitted.append(self._take_in(request, cached, cached, count, step_id))
            budget -= count
        return admitted

    def admit_loaded(self, budget: int, step_id: int) -> list[tuple[Admission, int]]:
        """Move requests into slots whose blocks have been copied; they hold all that they need for that."""
        admitted: list[tuple[Admission, int]] = []
        most = self._limits.most_rows
        for request in self._loading.ready() if len(self._loading) else ():
            found = request.num_found
            count = min(len(request.token_ids) - found, budget, most)
            if count <= 0:
                break
            end = self._kv.fit(request.seq, found + count)  # windows may get less, but what they began with
            self._kv.grow(request.seq, end)
            count = end - found
            self._loading.remove(request)
            admitted.append(self._take_in(request, found, request.num_on_device, count, step_id))
            budget -= count
        return admitted

    def _take_in(
        self, request: Request, cached: int, on_device: int, count: int, step_id: int
    ) -> tuple[Admission, int]:
        """Enter a request into a slot and give it its first `count` rows, behind `cached` tokens."""
        stats = self._stats
        copied = cached - on_device
        if request.num_cached >= 0:  # back after preemption, which is no hit
            stats.resumed_by_copy += copied > 0
            stats.resumed_by_compute += copied == 0
        else:
            request.num_cached = cached
            request.metrics.scheduled_time = time.time()
            if not request.wants_prompt_logprobs and self._kv.shares:
                known = len(request.token_ids)
                stats.prefix_cache_queries += known
                stats.prefix_cache_hits += on_device
                if self._kv.offloading is not None:
                    stats.host_cache_queries += known - on_device
                    stats.host_cache_hits += copied
        admission = self._slots.enter(request, cached)
        self._slots.register(np.array([admission.slot]), np.array([cached + count]), step_id)
        return admission, count

    def _still_refused(self, request: Request, step_id: int) -> bool:
        """Whether a request found no room before, and nothing has made any since."""
        drafts, again = self._draft_blocks, step_id % _LOOK_AGAIN == 0
        if again and drafts is not None and drafts.num_held:
            return False  # those of requests that are drafted for no more would be given back
        order, *before, num_free = self._refused
        *now, free = self._room()
        return request.order == order and now == before and free <= num_free

    def _room(self) -> tuple[int, int, int]:
        """What tells when room is made: requests that have left slots, and that are loading; free blocks."""
        return self._slots.num_left, self._loading.num_live, self._kv.pool.num_free

    def _foresees_room(self, request: Request, prefix: Prefix, count: int) -> bool:
        """Whether the blocks of all running requests and this one will fit until they end, as expected."""
        if not self._limits.look_ahead:
            return True
        taken = self._kv.pool.num_free - self._kv.num_free_after(prefix)
        taken += self._kv.missing_at_most(prefix, len(request.token_ids), count)
        return self.outlook.fits(request, self.num_used() + taken)

    def num_used(self) -> int:
        """Blocks that requests hold, but for their drafts."""
        offloading, drafts = self._kv.offloading, self._draft_blocks
        copied = 0 if offloading is None else offloading.num_held()
        return self._kv.pool.num_used - copied - (0 if drafts is None else drafts.num_held)

    def _begin_loading(self, request: Request, found: int, on_device: int) -> None:
        """The first waiting request waits for copies from here on (`found` 0: for reads from disk)."""
        self._waiting.pop()
        request.num_found, request.num_on_device = found, on_device
        self._loading.add(request)
