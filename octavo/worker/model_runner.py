"""Runs steps on one device: gather inputs, forward, sample, scatter. Never waits for the device."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from octavo.kernels.cpu.lending import Lending
from octavo.kv.format import KVGroup
from octavo.sampling.logprobs import PackedLogprobs, prompt_logprobs
from octavo.sampling.processors import upload
from octavo.sampling.sampler import RowMasks, Sampler
from octavo.sampling.state import SamplingState
from octavo.sampling.verifier import Verifier, VerifyOutput
from octavo.speculative.confidence import Drafted
from octavo.step_messages import StepPlan, StepResult, TokenLogprobs, TokenMasks
from octavo.worker.device_timer import DeviceTimer
from octavo.worker.graph_recorder import GraphRecorder
from octavo.worker.graphs import DecodeGraphs
from octavo.worker.input_batch import InputBatch, StepInputs
from octavo.worker.recorded_steps import RecordedSteps
from octavo.worker.stage_link import StageLink
from octavo.worker.transfer import TokenTransfer, event_now, to_host, wait_for
from octavo.worker.verdicts import Verdicts

# Rows from which on a CPU's step takes its tensors' memory from the step before. To see a step's operations
# takes milliseconds, a hundredth of such a step of a small model.
LENT_ROWS = 512


class StepDrafter(Protocol):
    """Follows a runner's steps on its stream, and drafts what their plans ask for.

    Attributes:
        every_step: whether it follows those that yield no token, too.
    """

    every_step: bool

    def enter(self, slots: np.ndarray) -> None:
        """Slots (int64 `[n]`) have changed hands."""

    def after_step(
        self, plan: StepPlan, inputs: StepInputs, known: torch.Tensor | None, num_tokens: torch.Tensor | None
    ) -> Drafted | None:
        """A step was launched; its tokens are in the token table.

        Args:
            known: int64 `[m]`, tokens known of the requests that yielded some; None: none did.
            num_tokens: integer `[m]`, how many these yielded; None: one each.

        Returns:
            Where drafts ended, for an order with thresholds.
        """


class ModelRunner:
    """Owns a device's model, KV cache, request tables and sampling state.

    Invariant: everything a step reads is on the device before it is launched, or was put there by a
    step before it on the same stream.

    Attributes:
        recorders: all that record work for a step or its drafts; those of drafts enter themselves.
    """

    def __init__(
        self,
        model: Any,
        groups: list[KVGroup],
        kv_caches: list[torch.Tensor],
        *,
        max_num_seqs: int,
        max_model_len: int,
        max_rows: int,
        vocab_size: int,
        device: torch.device,
        use_graphs: bool = False,
        records: bool = False,
        max_drafts: int = 0,
        synthetic_acceptance: Sequence[float] | None = None,
        link: Callable[[InputBatch], StageLink] | None = None,
    ):
        """`link` joins the last one of several pipeline stages to the others, given its tables."""
        self.model = model
        self.device = device
        self.vocab_size = vocab_size
        self.kv_caches = kv_caches
        self.batch = InputBatch(max_num_seqs, max_model_len, max_rows, groups, device, model.cascades())
        self.link = None if link is None else link(self.batch)
        self.sampling = SamplingState(max_num_seqs, vocab_size, max_model_len, device)
        self.verifier = Verifier(Sampler(self.sampling), synthetic_acceptance)
        self.recorders: list[GraphRecorder | RecordedSteps] = []
        self.graphs: DecodeGraphs | None = None
        if use_graphs:
            self.graphs = DecodeGraphs(model, self.batch, kv_caches, max_num_seqs, max_model_len)
            self.verdicts = Verdicts(self.batch, self.verifier, max_drafts)
            self.recorders.append(self.graphs.recorder)
        self.recorded = RecordedSteps(model, self.batch, kv_caches) if records else None
        if self.recorded is not None:
            self.recorders.append(self.recorded)
        self._transfer = TokenTransfer(max_num_seqs * (2 + max_drafts), device)
        self._lending = Lending() if device.type == "cpu" else None
        self.draft: StepDrafter | None = None
        self._drafting: tuple[int, DeviceTimer] | None = None  # of the last step, that the next is behind
        self.forward_seconds = 0.0  # host time inside the model's forward, for measurements

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> LaunchedStep:
        """Launch a step; its result is fetched by `LaunchedStep.wait`."""
        if self.link is None:
            return self._launch(plan)
        self.link.enter(plan)
        try:
            return self._launch(plan)
        except Exception:
            self.link.settle()
            raise

    def _launch(self, plan: StepPlan) -> LaunchedStep:
        """Launch a step, and tell of it whether anything was recorded for it or for its drafts."""
        before = self._num_recorded
        launched = self._execute(plan)
        launched.recorded = self._num_recorded > before
        return launched

    @property
    def _num_recorded(self) -> int:
        return sum(recorder.count for recorder in self.recorders)

    def _execute(self, plan: StepPlan) -> LaunchedStep:
        self.batch.apply(plan)
        for admission in plan.admissions:
            self.sampling.add(admission)
        if self.draft is not None:
            self.draft.enter(np.array([a.slot for a in plan.admissions], np.int64))
        padding = self.graphs.padding_for(plan) if self.graphs is not None else None
        inputs = self.batch.layout(plan, padding)
        hidden: torch.Tensor | None = None
        logits: torch.Tensor | None
        timer: DeviceTimer | None = None
        if self.graphs is not None and padding is not None:
            timer = self._receive()
            rows, greedy = self.graphs.run(inputs)
            if len(inputs.sample_requests) == inputs.num_requests and self.verifier.sampler.is_greedy(
                plan.slots
            ):
                if padding.most == 1 and self.draft is None:
                    chosen = VerifyOutput(greedy[: inputs.num_requests], None, None, None)
                else:
                    chosen = self.verdicts.judge(inputs, greedy)
                launched = LaunchedStep(plan, inputs.sample_requests, chosen, None, self._transfer)
                self._pass_on(chosen, launched, timer)
                self._draft_after(plan, inputs, chosen, launched)
                return launched
            logits = self.model.whole_logits(self._sampled_rows(rows, inputs))
        else:
            self.batch.fill(inputs)
            timer, begin = self._receive(), time.perf_counter()
            if self.recorded is not None and self.recorded.takes(plan, inputs):
                logits = self.recorded.run(inputs)
            else:
                hidden, logits = self._forward(plan, inputs)
            self.forward_seconds += time.perf_counter() - begin
        packed = None
        if plan.prompt_logprobs is not None:
            assert hidden is not None  # such steps are never replayed
            packed = self._prompt_logprobs(plan, inputs, hidden)
        if logits is None or not len(inputs.sample_requests):
            launched = LaunchedStep(plan, inputs.sample_requests, None, packed, self._transfer)
            self._pass_on(None, launched, timer)
            self._draft_after(plan, inputs, None, launched)
            return launched
        rows = logits
        if plan.masked is not None:

            @torch.inference_mode()
            def draw(masks: TokenMasks) -> VerifyOutput:
                before = self._num_recorded
                sampled = self._sample(plan, inputs, rows, masks)
                self._pass_on(sampled, launched, None)
                self._draft_after(plan, inputs, sampled, launched)
                launched.recorded |= self._num_recorded > before
                return sampled

            launched = LaunchedStep(plan, inputs.sample_requests, draw, packed, self._transfer)
            self._pass_on(None, launched, timer)
            return launched
        sampled = self._sample(plan, inputs, rows)
        launched = LaunchedStep(plan, inputs.sample_requests, sampled, packed, self._transfer)
        self._pass_on(sampled, launched, timer)
        self._draft_after(plan, inputs, sampled, launched)
        return launched

    def _receive(self) -> DeviceTimer | None:
        """Wait for the rows of a stage before this one; times the stage's part of the step from here on."""
        return None if self.link is None else self.link.receive()

    def _pass_on(
        self, sampled: VerifyOutput | None, launched: LaunchedStep, timer: DeviceTimer | None
    ) -> None:
        """Send the other stages the tokens; the stage's part of the step ends."""
        if self.link is None:
            return
        if timer is not None:
            launched.timer = timer.stop()
        if sampled is not None:
            self.link.send_tokens(sampled)

    def _draft_after(
        self, plan: StepPlan, inputs: StepInputs, sampled: VerifyOutput | None, launched: LaunchedStep
    ) -> None:
        """Let what drafts follow the step, and draft what the plan asks for."""
        if self.draft is None or (sampled is None and not self.draft.every_step):
            return
        known = num_tokens = None
        if sampled is not None:
            num_tokens = sampled.num_tokens
            if inputs.padding is not None and len(inputs.sample_requests) == inputs.num_requests:
                known = self.verdicts.known[: inputs.num_requests]
            else:
                known = self.batch.sample_ends(inputs) + (1 if num_tokens is None else num_tokens)
        timer = DeviceTimer(self.device)
        launched.take_drafted(self.draft.after_step(plan, inputs, known, num_tokens))
        drafting = (plan.step_id, timer.stop()) if plan.propose is not None else None
        if timer.beside_host:  # a step's tokens are there before its drafts
            drafting, self._drafting = self._drafting, drafting
        launched.drafting = drafting

    def _forward(self, plan: StepPlan, inputs: StepInputs) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Hidden states of any step, and the logits of the rows that yield a token, if any do."""
        self.model.plan_attention(inputs.meta)
        narrow = self.model.narrows and plan.prompt_logprobs is None
        inputs.meta[0].wanted_rows = inputs.wanted_rows if narrow else None
        with self._lending if self._lending and plan.total_rows >= LENT_ROWS else nullcontext():
            hidden = self.model(inputs.entering, inputs.positions, self.kv_caches, inputs.meta)
        if not len(inputs.sample_requests):
            return hidden, None
        wanted = inputs.meta[0].wanted_rows is not None
        return hidden, self.model.compute_logits(hidden if wanted else self._sampled_rows(hidden, inputs))

    def _sampled_rows(self, rows: torch.Tensor, inputs: StepInputs) -> torch.Tensor:
        """Of `[rows, …]`, those that yield a token."""
        if inputs.sample_rows is not None:
            return rows[inputs.sample_rows]
        return rows if len(rows) == inputs.num_sample_rows else rows[: inputs.num_sample_rows]

    def _sample(
        self, plan: StepPlan, inputs: StepInputs, logits: torch.Tensor, masks: TokenMasks | None = None
    ) -> VerifyOutput:
        slots, known, drafts = plan.slots, plan.start + plan.num_rows, inputs.num_drafts
        if len(inputs.sample_requests) < len(slots):
            slots, known = slots[inputs.sample_requests], known[inputs.sample_requests]
        ends = self.batch.sample_ends(inputs)
        output = self.verifier(
            logits,
            slots,
            inputs.sample_slots,
            ends,
            self.batch.token_table,
            max_known=known if drafts is None else known - drafts,
            num_drafts=drafts,
            masks=None if masks is None else self._row_masks(inputs, masks),
        )
        if output.num_tokens is None:
            self.batch.append(inputs, ends, output.tokens)
        else:
            self.batch.append_judged(inputs, ends, output.tokens, output.num_tokens)
        if self.draft is not None and inputs.padding is not None and len(ends) == inputs.num_requests:
            self.verdicts.settle(inputs, output)
        return output

    def _row_masks(self, inputs: StepInputs, masks: TokenMasks) -> RowMasks:
        """Masks by rows of logits."""
        places = np.searchsorted(inputs.sample_requests, masks.rows)
        if inputs.num_drafts is not None:
            counts = inputs.num_drafts + 1
            first, own = np.cumsum(counts) - counts, counts[places]
            places = np.repeat(first[places] - np.cumsum(own) + own, own) + np.arange(own.sum())
        return RowMasks(upload(places, self.device), upload(masks.bits, self.device))

    def _prompt_logprobs(self, plan: StepPlan, inputs: StepInputs, hidden: torch.Tensor) -> _PromptPart:
        """Rows of prompts whose next token is known and wanted: position p tells of token p + 1."""
        assert plan.prompt_logprobs is not None
        starts = np.concatenate(([0], np.cumsum(plan.num_rows)))
        rows, counts, owners = [], [], []
        for i in np.flatnonzero(plan.prompt_logprobs >= 0):
            prompt = int(self.batch.prompt_len[plan.slots[i]])
            told = min(int(plan.num_rows[i]), prompt - 1 - int(plan.start[i]))
            rows.append(np.arange(starts[i], starts[i] + max(told, 0)))
            counts.append(np.full(max(told, 0), plan.prompt_logprobs[i]))
            owners.append((int(i), max(told, 0)))
        flat = np.concatenate(rows)
        if not len(flat):
            return _PromptPart(owners, None)
        index = torch.from_numpy(flat).to(self.device)
        requests = torch.from_numpy(np.repeat([i for i, _ in owners], [told for _, told in owners])).to(
            self.device
        )
        targets = self.batch.token_table[inputs.slots[requests], inputs.positions[index] + 1]
        packed = prompt_logprobs(
            lambda lo, hi: self.model.compute_logits(hidden[index[lo:hi]]),
            targets,
            np.concatenate(counts),
            self.vocab_size,
        )
        return _PromptPart(owners, packed)


@dataclass
class _PromptPart:
    """Prompt log-probabilities of a step: (request index, rows told) in order, and the packed rows."""

    owners: list[tuple[int, int]]
    packed: PackedLogprobs | None


class LaunchedStep:
    """A step on its way: its results are being copied to the host (once `sample` has drawn them)."""

    def __init__(
        self,
        plan: StepPlan,
        sample_requests: np.ndarray,
        sampled: VerifyOutput | Callable[[TokenMasks], VerifyOutput] | None,
        prompt: _PromptPart | None,
        transfer: TokenTransfer,
    ):
        self._plan = plan
        self._sample_requests = sample_requests
        self._prompt = prompt
        self._transfer = transfer
        # Of the drafts that were made after a step: this one, or the one before.
        self.drafting: tuple[int, DeviceTimer] | None = None
        self._drafted: tuple[np.ndarray, torch.Tensor, torch.Tensor] | None = None
        self._drafted_event: torch.cuda.Event | None = None
        self.timer: DeviceTimer | None = None  # of a pipeline stage's part of the step
        self.recorded = False  # see `StepResult`
        self._draw = None
        if callable(sampled):
            self._draw = sampled
        else:
            self._fetch(sampled)

    def sample(self, masks: TokenMasks) -> None:
        """Draw the tokens of a plan with masked requests, before the next step is launched.

        Raises:
            ValueError: the plan has none, or this was done.
        """
        if self._draw is None:
            raise ValueError(f"step {self._plan.step_id} has no tokens to draw under masks")
        draw, self._draw = self._draw, None
        self._fetch(draw(masks))

    def take_drafted(self, drafted: Drafted | None) -> None:
        """Begin to copy where drafts ended."""
        if drafted is None:
            return
        self._drafted = drafted.requests, to_host(drafted.made), to_host(drafted.products)
        self._drafted_event = event_now(drafted.made.device)

    def _fetch(self, sampled: VerifyOutput | None) -> None:
        """Begin to copy what was drawn."""
        prompt = self._prompt
        self._logprobs = sampled.logprobs if sampled is not None else None
        self._row_start = sampled.row_start if sampled is not None else None
        self._logprob_data = self._prompt_data = None
        given = (None, None) if sampled is None else (sampled.tokens, sampled.num_tokens)
        (self._tokens, self._num_tokens), self._event = self._transfer.start(*given)
        if sampled is not None and sampled.logprobs is not None:
            self._logprob_data = to_host(sampled.logprobs.data)
        if prompt is not None and prompt.packed is not None:
            self._prompt_data = to_host(prompt.packed.data)
        if self._event is not None:
            self._event.record()

    def wait(self) -> StepResult:
        """Block until the results are here.

        Raises:
            EngineDeadError: the device reported an error that no later step can survive.
        """
        wait_for(self._event, self._drafted_event)
        n = len(self._plan.slots)
        if self._tokens is None:
            result = StepResult.without_tokens(n)
        else:
            tokens = self._tokens.numpy()
            result = self._spread(n, tokens.reshape(len(tokens), -1), self._num_tokens)
        if self.drafting is not None:
            step, timer = self.drafting
            result.draft_seconds = timer.seconds()
            result.draft_step = -1 if step == self._plan.step_id else step
        if self._drafted is not None:
            requests, made, products = self._drafted
            result.drafted = np.full(n, -1, np.int32)
            result.products = np.zeros((n, products.shape[1]), np.float32)
            result.drafted[requests], result.products[requests] = made.numpy(), products.numpy()
        if self.timer is not None:
            result.stage_seconds = self.timer.seconds()
        result.recorded = self.recorded
        result.logprobs = self._unpack_logprobs(n)
        result.prompt_logprobs = self._unpack_prompt(n)
        return result

    def _spread(self, n: int, sampled: np.ndarray, counted: torch.Tensor | None) -> StepResult:
        """Results of the requests that sampled, in the places of all n."""
        m = len(self._sample_requests)
        num_tokens = np.ones(m, np.int32) if counted is None else counted.numpy()
        if m == n:
            return StepResult(sampled, num_tokens)
        tokens, counts = np.zeros((n, sampled.shape[1]), np.int32), np.zeros(n, np.int32)
        tokens[self._sample_requests] = sampled
        counts[self._sample_requests] = num_tokens
        return StepResult(tokens, counts)

    def _unpack_logprobs(self, n: int) -> list[list[TokenLogprobs] | None] | None:
        if self._logprobs is None or self._logprob_data is None:
            return None
        out: list[list[TokenLogprobs] | None] = [None] * n
        rows = self._logprobs.unpack(self._logprob_data.numpy())
        requests = self._sample_requests.tolist()
        if self._row_start is None or self._num_tokens is None:
            for request, entry in zip(requests, rows, strict=True):
                out[request] = None if entry is None else [entry]
            return out
        for request, first, count in zip(
            requests, self._row_start[:-1].tolist(), self._num_tokens.tolist(), strict=True
        ):
            entries = [entry for entry in rows[first : first + count] if entry is not None]
            out[request] = entries or None
        return out

    def _unpack_prompt(self, n: int) -> list[list[TokenLogprobs] | None] | None:
        if self._prompt is None:
            return None
        out: list[list[TokenLogprobs] | None] = [None] * n
        entries: list[TokenLogprobs] = []
        if self._prompt.packed is not None and self._prompt_data is not None:
            entries = [e for e in self._prompt.packed.unpack(self._prompt_data.numpy()) if e is not None]
        begin = 0
        for request, told in self._prompt.owners:
            out[request] = entries[begin : begin + told]
            begin += told
        return out
