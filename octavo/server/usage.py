"""Counts tokens of an answer, and tells why it ended."""

from __future__ import annotations

from octavo.outputs import CompletionOutput, RequestOutput
from octavo.server.protocol.answers import PromptTokensDetails, Usage
from octavo.server.protocol.requests import StreamOptions


def stream_usage(options: StreamOptions | None, forced: bool) -> tuple[bool, bool]:
    """Whether a stream tells its usage, and whether each chunk does.

    Args:
        forced: the server's settings say that it does (`enable_force_include_usage`).
    """
    told = forced or (options is not None and bool(options.include_usage))
    return told, told and options is not None and bool(options.continuous_usage_stats)


class UsageCount:
    """Tokens so far; each prompt counts once, whatever the number of its choices and results."""

    def __init__(self) -> None:
        self._prompts: dict[int, tuple[int, int]] = {}
        self._completion = 0

    def prompt(self, index: int, out: RequestOutput) -> None:
        """Take note of the prompt of a result; what was cached is known once choice 0 has reported."""
        self._prompts[index] = (len(out.prompt_token_ids), out.num_cached_tokens)

    def add(self, tokens: int) -> None:
        """Count output tokens."""
        self._completion += tokens

    def total(self) -> Usage:
        """The usage so far."""
        prompt = sum(length for length, _ in self._prompts.values())
        cached = sum(hit for _, hit in self._prompts.values())
        return Usage(prompt, self._completion, prompt + self._completion, PromptTokensDetails(cached))


def stop_cause(output: CompletionOutput) -> int | str | None:
    """The stop string or token id that ended a choice; None while it runs and for its end of text."""
    return output.stop_reason if output.finish_reason == "stop" else None
