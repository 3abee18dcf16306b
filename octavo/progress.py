"""The bar that `LLM`'s calls show."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from octavo.outputs import EmbeddingRequestOutput, RequestOutput


class RequestBar:
    """Progress over requests, with token rates where they make tokens; silent when not asked for."""

    def __init__(self, bar: Any):
        self._bar = bar
        self._tokens = 0

    def advance(self, output: RequestOutput | EmbeddingRequestOutput) -> None:
        """A request has finished."""
        if self._bar is None:
            return
        if isinstance(output, RequestOutput):
            self._tokens += sum(len(choice.token_ids) for choice in output.outputs)
            elapsed = self._bar.format_dict["elapsed"] or 1e-9
            self._bar.set_postfix_str(f"{self._tokens / elapsed:.1f} output tokens/s", refresh=False)
        self._bar.update()


@contextlib.contextmanager
def request_bar(show: bool, total: int) -> Iterator[RequestBar]:
    """A bar over `total` requests, if it is to be shown."""
    if not show:
        yield RequestBar(None)
        return
    from tqdm.auto import tqdm

    with tqdm(total=total, desc="Requests", unit="req", dynamic_ncols=True) as bar:
        yield RequestBar(bar)
