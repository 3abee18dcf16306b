"""From the engine core's news to what the user gets: text, log-probabilities, choices put together."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from octavo.engine.embedding_output import EmbeddingOutputs
from octavo.engine.input_processor import InputProcessor, PreparedRequest
from octavo.errors import OctavoError, RequestError, RequestFailedError
from octavo.messages import CoreOutput, CoreRequest, RequestMetrics
from octavo.outputs import CompletionOutput, Logprob, PositionLogprobs, RequestOutput
from octavo.sampling_params import RequestOutputKind
from octavo.step_messages import TokenLogprobs
from octavo.tokenization.stop import TextStream
from octavo.tokenization.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class _Choice:
    """One choice as it grows."""

    index: int
    core_id: str
    stream: TextStream
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] | None = None
    cumulative_logprob: float | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    terse: bool = False  # whether a delta of it is text and tokens alone


@dataclass(eq=False)
class _Live:
    """A request under way."""

    prepared: PreparedRequest
    choices: list[_Choice]
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    num_cached_tokens: int = 0
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    error: OctavoError | None = None


def _error_of(output: CoreOutput) -> OctavoError | None:
    """What a request's user is told of its end by an error."""
    if output.error is None:
        return None
    if output.error_param is not None:
        return RequestError(output.error, output.error_param)
    return RequestFailedError(output.error)


class OutputProcessor:
    """Owns the requests under way on the front end's side. Not safe for threads: one caller at a time."""

    def __init__(self, tokenizer: Tokenizer | None, synthetic_acceptance: list[float] | None = None):
        """`synthetic_acceptance`: what every output is marked with."""
        self._tokenizer, self._synthetic = tokenizer, synthetic_acceptance
        self._by_core_id: dict[str, tuple[_Live, _Choice]] = {}
        self._live: dict[str, _Live] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._live

    def __len__(self) -> int:
        return len(self._live)

    def add(self, prepared: PreparedRequest) -> None:
        """Expect the outputs of a request's choices."""
        choices = []
        for index, core in enumerate(prepared.choices):
            stream = TextStream(self._tokenizer, prepared.prompt_token_ids, prepared.params)
            logprobs: list[PositionLogprobs] | None = [] if prepared.params.logprobs is not None else None
            choices.append(
                _Choice(
                    index,
                    core.request_id,
                    stream,
                    logprobs=logprobs,
                    cumulative_logprob=None if logprobs is None else 0.0,
                    terse=logprobs is None
                    and not prepared.params.stop
                    and prepared.params.output_kind == RequestOutputKind.DELTA,
                )
            )
        live = self._live[prepared.request_id] = _Live(prepared, choices)
        for choice in choices:
            self._by_core_id[choice.core_id] = (live, choice)

    def discard(self, request_id: str) -> list[str]:
        """Forget a request; returns the core's ids that may still run, for the core to abort."""
        live = self._live.pop(request_id, None)
        if live is None:
            return []
        return [c.core_id for c in live.choices if self._by_core_id.pop(c.core_id, None)]

    def untouched(self, request_id: str) -> list[CoreRequest]:
        """What the core was sent for a request of which it has told nothing yet; empty if it has."""
        live = self._live.get(request_id)
        if live is None or any(c.token_ids or c.finish_reason for c in live.choices):
            return []
        return live.prepared.choices

    def process(
        self, outputs: Iterable[CoreOutput]
    ) -> tuple[list[tuple[RequestOutput, OctavoError | None]], list[str]]:
        """Digest news from the core.

        Returns:
            (output, error) of each request with something to tell, and the core's ids of choices that
            a stop string ended, for the core to abort.
        """
        results: list[tuple[RequestOutput, OctavoError | None]] = []
        stopped: list[str] = []
        for output in outputs:
            entry = self._by_core_id.get(output.request_id)
            if entry is None:  # ended by a stop string, or given up by the user
                continue
            live, choice = entry
            try:
                new = output.new_token_ids
                result: RequestOutput | None
                if choice.terse and new and output.finish_reason is None and output.metrics is None:
                    result = self._lengthen(live, choice, new)
                else:
                    result = self._digest(live, choice, output, stopped)
            except Exception as error:  # of its tokenizer, say; the others' news are as good as ever
                logger.exception("the news of request %s cannot be taken in", live.prepared.request_id)
                stopped += self.discard(live.prepared.request_id)
                failed = RequestFailedError(f"the text could not be made: {type(error).__name__}: {error}")
                results.append((self._output(live, [], True), failed))
                continue
            if result is not None:
                results.append((result, live.error))
        return results, stopped

    def _lengthen(self, live: _Live, choice: _Choice, new: list[int]) -> RequestOutput:
        """What `_digest` makes of tokens, and nothing else, of a terse choice: the common case by far."""
        choice.token_ids += new
        part = CompletionOutput(choice.index, choice.stream.lengthen(new), new)
        prepared = live.prepared
        return RequestOutput(
            prepared.request_id,
            prepared.prompt,
            prepared.prompt_token_ids,
            [part],
            False,
            live.prompt_logprobs,
            live.num_cached_tokens,
            live.metrics,
            self._synthetic,
        )

    def _digest(
        self, live: _Live, choice: _Choice, output: CoreOutput, stopped: list[str]
    ) -> RequestOutput | None:
        if output.metrics is not None:
            live.metrics = output.metrics
            if choice.index == 0:
                live.num_cached_tokens = output.num_cached_tokens
        if output.prompt_logprobs is not None:
            live.prompt_logprobs = [self._position(entry) for entry in output.prompt_logprobs]
        kind = live.prepared.params.output_kind
        ended = output.finish_reason
        new = output.new_token_ids
        delta = choice.stream.push(
            new, finished=ended is not None, ended_by_token=ended == "stop" and not output.complete
        )
        if delta.num_tokens_used < len(new):
            new = new[: delta.num_tokens_used]
        choice.token_ids.extend(new)
        logprobs = self._collect_logprobs(choice, output.logprobs, len(new), kind)
        if delta.stop is not None:
            choice.finish_reason, choice.stop_reason = "stop", delta.stop
            if ended is None:
                stopped.append(choice.core_id)
                live.metrics.last_token_time = live.metrics.finished_time = time.time()
        elif ended is not None:
            choice.finish_reason, choice.stop_reason = ended, output.stop_reason
            live.error = _error_of(output) or live.error
        if choice.finish_reason is not None:
            self._by_core_id.pop(choice.core_id, None)
        finished = choice.finish_reason is not None and all(c.finish_reason is not None for c in live.choices)
        if finished:
            self._live.pop(live.prepared.request_id, None)
        if kind == RequestOutputKind.FINAL_ONLY and not finished:
            return None
        if kind == RequestOutputKind.DELTA:
            if not new and not delta.text and choice.finish_reason is None:
                return None
            part = self._snapshot(choice, delta.text, list(new), logprobs)
            return self._output(live, [part], finished)
        parts = [self._snapshot(c, c.stream.text, list(c.token_ids), c.logprobs) for c in live.choices]
        return self._output(live, parts, finished)

    def _collect_logprobs(
        self, choice: _Choice, entries: list[TokenLogprobs] | None, count: int, kind: RequestOutputKind
    ) -> list[PositionLogprobs] | None:
        if choice.logprobs is None or entries is None:
            return None if choice.logprobs is None else []
        new = []
        for entry in entries[:count]:
            position = self._position(entry)
            assert position is not None and choice.cumulative_logprob is not None
            choice.cumulative_logprob += entry.values[0]
            new.append(position)
        if kind != RequestOutputKind.DELTA:  # whose results tell what is new
            choice.logprobs.extend(new)
        return new

    def _position(self, entry: TokenLogprobs | None) -> PositionLogprobs | None:
        if entry is None:
            return None
        tokenizer = self._tokenizer
        out: PositionLogprobs = {}
        for place, (token, value) in enumerate(zip(entry.ids, entry.values, strict=True)):
            if token not in out:
                text = None if tokenizer is None else tokenizer.decode([token], skip_special_tokens=False)
                out[token] = Logprob(value, entry.rank if place == 0 else place, text)
        return out

    def _snapshot(
        self, choice: _Choice, text: str, token_ids: list[int], logprobs: list[PositionLogprobs] | None
    ) -> CompletionOutput:
        return CompletionOutput(
            index=choice.index,
            text=text,
            token_ids=token_ids,
            cumulative_logprob=choice.cumulative_logprob,
            logprobs=None if logprobs is None else list(logprobs),
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
        )

    def _output(self, live: _Live, parts: list[CompletionOutput], finished: bool) -> RequestOutput:
        return RequestOutput(
            request_id=live.prepared.request_id,
            prompt=live.prepared.prompt,
            prompt_token_ids=live.prepared.prompt_token_ids,
            outputs=parts,
            finished=finished,
            prompt_logprobs=live.prompt_logprobs,
            num_cached_tokens=live.num_cached_tokens,
            metrics=live.metrics,
            synthetic_acceptance=self._synthetic,
        )


def outputs_for(processor: InputProcessor) -> OutputProcessor | EmbeddingOutputs:
    """What takes in the core's news: texts or embeddings, by what the model makes."""
    if processor.pooling is not None:
        return EmbeddingOutputs()
    return OutputProcessor(processor.tokenizer, processor.config.synthetic_acceptance)
