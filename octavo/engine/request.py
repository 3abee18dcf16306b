"""A request inside the engine core."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from octavo.engine.grammar_run import GrammarRun
from octavo.kv.keys import NO_EXTRAS, ExtraKeys
from octavo.kv.manager import Sequence
from octavo.messages import CoreRequest, RequestMetrics
from octavo.step_messages import TokenLogprobs


@dataclass(eq=False)
class Request:
    """What the scheduler keeps of one request besides its rows in the state arrays.

    While the request is in a slot, its tokens live in the scheduler's token table; otherwise
    `token_ids` (int32) holds all that are known. `order` sorts requests: lower runs first and is
    preempted last.
    """

    core: CoreRequest
    order: tuple[int, int]
    token_ids: np.ndarray
    seq: Sequence
    slot: int = -1
    num_cached: int = -1  # set at first admission
    done: bool = False
    stop_ids: frozenset[int] = frozenset()
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    pooled: bytes | None = None  # the vector of a text to embed
    grammar: GrammarRun | None = None  # what its tokens must follow
    num_reported: int = 0  # output tokens that have left the core
    last_token: float = 0.0  # when the newest token came, by the clock of `TokenIntervals`; 0: none has
    loading: bool = False  # waits for copies
    gives_way: bool = False  # and will not go on once they are through
    num_found: int = 0  # tokens that need not be computed, once they are through
    num_on_device: int = 0  # those of them that need no copy

    @property
    def prompt_len(self) -> int:
        """Tokens of the prompt."""
        return len(self.core.prompt_token_ids)

    @property
    def max_total(self) -> int:
        """Tokens of prompt and output at which the request ends."""
        assert self.core.params.max_tokens is not None
        return self.prompt_len + self.core.params.max_tokens

    @property
    def ends_at_limit(self) -> bool:
        """Whether nothing but its limit of tokens ends it (or its client)."""
        return not self.stop_ids and not self.core.params.stop

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether prompt rows still have log-probabilities to report."""
        return self.core.params.prompt_logprobs is not None and len(self.prompt_logprobs) < self.prompt_len


def extras_of(core: CoreRequest) -> ExtraKeys:
    """The prefix cache's extra keys of a request."""
    extras = ExtraKeys(
        core.lora_digest,
        tuple(core.mm_spans),
        core.cache_salt,
        core.prompt_embeds_hash,
    )
    return NO_EXTRAS if extras == NO_EXTRAS else extras
