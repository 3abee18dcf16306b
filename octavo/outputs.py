"""What a user gets back from a request, with vLLM's field names."""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.messages import RequestMetrics


@dataclass
class Logprob:
    """Log-probability (natural) of one token at one position, its rank (1: likeliest) and its text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


PositionLogprobs = dict[int, Logprob]


@dataclass
class CompletionOutput:
    """One choice of a request.

    `token_ids` are all output ids (or, when streaming deltas, the new ones), stop token included;
    `text` never holds half a character. `finish_reason` is None, "stop", "length", "abort" or
    "error"; `stop_reason` the stop string or stop token id that ended it, None for EOS.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        """Whether this choice is complete."""
        return self.finish_reason is not None


@dataclass
class RequestOutput:
    """One request's prompt and its choices so far.

    `num_cached_tokens` counts prompt tokens that the prefix cache served at admission.
    `synthetic_acceptance` says by which rates drafts stood in a benchmark, and that the text is not the
    model's; None: it is.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    num_cached_tokens: int = 0
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    synthetic_acceptance: list[float] | None = None


@dataclass
class EmbeddingOutput:
    """One text's embedding: float32 values as Python numbers."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """How many numbers it has."""
        return len(self.embedding)


@dataclass
class EmbeddingRequestOutput:
    """One text and its embedding.

    `num_cached_tokens` counts tokens that the prefix cache served.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: EmbeddingOutput
    finished: bool = True
    num_cached_tokens: int = 0
