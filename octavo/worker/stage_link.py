"""One of several pipeline stages among the others: rows in and out, tokens in or out."""

from __future__ import annotations

import collections
from dataclasses import dataclass

import numpy as np
import torch

from octavo.parallel.stages import StageGroup
from octavo.sampling.processors import upload
from octavo.sampling.verifier import VerifyOutput
from octavo.step_messages import StepPlan
from octavo.worker.device_timer import DeviceTimer
from octavo.worker.input_batch import InputBatch


@dataclass
class _Expected:
    """Tokens that the last stage samples in a step: whose they are, and where they will stand.

    Attributes:
        slots: int64 `[m]`; known: int64 `[m]`, tokens before the first one.
        drafts: int64 `[m]`, drafts that the step judges; None: nobody's.
        live: bool `[m]`, those whose slot has not changed hands since.
    """

    step_id: int
    slots: np.ndarray
    known: np.ndarray
    drafts: np.ndarray | None
    live: np.ndarray


class StageLink:
    """Keeps a stage's runner in step with the other stages'.

    A runner calls, for every plan: `enter`, `receive` once the inputs are laid out, then `send` with what its
    layers made, or `send_tokens` on the last stage. If a step fails in between, `settle` does what the
    others wait for, so that the next one finds them where it should.
    """

    def __init__(
        self,
        group: StageGroup,
        batch: InputBatch,
        rows: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
    ):
        """`rows`: most rows of a step, and the hidden size."""
        self._group = group
        self._batch = batch
        self._device = device
        # Zeros, since rows that only pad a step are computed on, too.
        self._rows_in = torch.zeros(rows if not group.is_first else (0, rows[1]), dtype=dtype, device=device)
        if not group.is_first:
            batch.stream = self._rows_in
        self._expected: collections.deque[_Expected] = collections.deque()  # tokens, in the order of steps
        self._num_rows = 0  # of the step that is being launched, while others wait for it here
        self._receives = False
        self._owed: tuple[int, ...] | None = None  # the shape of tokens that are not sent yet

    def enter(self, plan: StepPlan) -> None:
        """A step begins: the tokens that its rows read are taken in. Call it before the plan is applied."""
        self._num_rows = plan.total_rows
        self._receives = self._num_rows > 0 and not self._group.is_first
        shape = _token_shape(plan)
        if self._group.is_last:
            self._send_owed()  # of a masked step that was never drawn
            self._owed = shape
            return
        # The older ones are on their way anyway: with P stages, no more than P steps are under way.
        while self._expected and (
            self._expected[0].step_id <= plan.tokens_through or len(self._expected) > self._group.size
        ):
            self._take_in(self._expected.popleft())
        entered = np.array([admission.slot for admission in plan.admissions], np.int64)
        for expected in self._expected:
            expected.live &= ~np.isin(expected.slots, entered)
        if shape is not None:
            drafts = None if plan.num_drafts is None else plan.num_drafts[plan.samples].astype(np.int64)
            known = (plan.start + plan.num_rows)[plan.samples].astype(np.int64)
            slots = plan.slots[plan.samples].astype(np.int64)
            known = known if drafts is None else known - drafts
            self._expected.append(_Expected(plan.step_id, slots, known, drafts, np.ones(len(slots), bool)))

    def receive(self) -> DeviceTimer:
        """Wait for the step's rows, which come into the batch's `stream`; times what follows."""
        if self._receives:
            self._group.receive(self._rows_in[: self._num_rows])
            self._receives = False
        return DeviceTimer(self._device)

    def send(self, x: torch.Tensor) -> None:
        """Hand on the step's rows, the first ones of `x`."""
        if self._num_rows:
            self._group.send(x[: self._num_rows])
            self._num_rows = 0

    def send_tokens(self, sampled: VerifyOutput) -> None:
        """Tell the other stages what the last one has drawn."""
        assert self._owed is not None
        tokens = sampled.tokens.view(self._owed[0], -1)
        if sampled.num_tokens is not None:
            tokens = torch.cat((tokens, sampled.num_tokens[:, None]), dim=1)
        assert tokens.shape == self._owed
        self._owed = None
        self._group.send_tokens(tokens)

    def settle(self) -> None:
        """The step that was entered last has failed here: the others are owed rows or tokens all the same."""
        if self._receives:
            self.receive()
        if self._group.is_last:
            self._send_owed()
        else:
            self.send(self._rows_in.new_zeros(self._num_rows, self._rows_in.shape[1]))

    def drain(self) -> None:
        """Take in all that is under way: no step follows for now."""
        if self._group.is_last:
            self._send_owed()
        while self._expected:
            self._take_in(self._expected.popleft())

    def _send_owed(self) -> None:
        if self._owed is not None:
            self._group.send_tokens(torch.zeros(self._owed, dtype=torch.int32, device=self._device))
            self._owed = None

    def _take_in(self, expected: _Expected) -> None:
        shape = _shape(len(expected.slots), expected.drafts)
        received = torch.empty(shape, dtype=torch.int32, device=self._device)
        self._group.receive_tokens(received)
        if not expected.live.all():
            received = received[upload(np.flatnonzero(expected.live), self._device)]
        slots, known = expected.slots[expected.live], expected.known[expected.live]
        drafts = None if expected.drafts is None else expected.drafts[expected.live]
        self._batch.take_in(slots, known, received, drafts if shape[1] > 1 else None)


def _token_shape(plan: StepPlan) -> tuple[int, int] | None:
    """The shape of what is sent of a plan's tokens; None: it has none."""
    if not plan.samples.any():
        return None
    return _shape(int(plan.samples.sum()), None if plan.num_drafts is None else plan.num_drafts[plan.samples])


def _shape(requests: int, drafts: np.ndarray | None) -> tuple[int, int]:
    """A token for each request; with drafts as many as there may be, and how many stand."""
    most = 0 if drafts is None else int(drafts.max())
    return (requests, most + 2) if most else (requests, 1)
