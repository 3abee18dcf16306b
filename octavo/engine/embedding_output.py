"""From the engine core's pooled vectors to the embeddings that the user gets."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from octavo.errors import OctavoError, RequestFailedError
from octavo.messages import CoreOutput, CoreRequest
from octavo.outputs import EmbeddingOutput, EmbeddingRequestOutput
from octavo.pooling_params import PoolingParams


@dataclass(eq=False)
class PreparedEmbedding:
    """A checked text: what the user gave, and the core's request for it."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: PoolingParams
    normalize: bool
    core: CoreRequest

    @property
    def choices(self) -> list[CoreRequest]:
        """The core's requests."""
        return [self.core]


class EmbeddingOutputs:
    """Owns the texts under way on the front end's side. Not safe for threads: one caller at a time."""

    def __init__(self) -> None:
        self._by_core_id: dict[str, PreparedEmbedding] = {}
        self._live: dict[str, PreparedEmbedding] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._live

    def __len__(self) -> int:
        return len(self._live)

    def add(self, prepared: PreparedEmbedding) -> None:
        """Expect a text's vector."""
        self._live[prepared.request_id] = prepared
        self._by_core_id[prepared.core.request_id] = prepared

    def discard(self, request_id: str) -> list[str]:
        """Forget a text; returns the core's ids that may still run, for the core to abort."""
        prepared = self._live.pop(request_id, None)
        if prepared is None or self._by_core_id.pop(prepared.core.request_id, None) is None:
            return []
        return [prepared.core.request_id]

    def untouched(self, request_id: str) -> list[CoreRequest]:
        """What the core was sent for a text; empty if it has ended."""
        prepared = self._live.get(request_id)
        return [] if prepared is None else prepared.choices

    def process(
        self, outputs: Iterable[CoreOutput]
    ) -> tuple[list[tuple[EmbeddingRequestOutput, OctavoError | None]], list[str]]:
        """Digest news from the core: (output, error) of each text that has ended, and nothing to abort."""
        results: list[tuple[EmbeddingRequestOutput, OctavoError | None]] = []
        for output in outputs:
            prepared = self._by_core_id.get(output.request_id)
            if prepared is None or output.finish_reason is None:
                continue
            del self._by_core_id[output.request_id], self._live[prepared.request_id]
            error = output.error
            if output.pooled is None:
                error = error or f"the text was ended by {output.finish_reason}"
            results.append(
                (_finished(prepared, output), None if error is None else RequestFailedError(error))
            )
        return results, []


def _finished(prepared: PreparedEmbedding, output: CoreOutput) -> EmbeddingRequestOutput:
    vector = np.frombuffer(output.pooled or b"", np.float32)[: prepared.params.dimensions]
    if prepared.normalize:
        # As PyTorch's normalize does: a vector of zeros stays one.
        vector = vector / max(float(np.linalg.norm(vector.astype(np.float64))), 1e-12)
    return EmbeddingRequestOutput(
        request_id=prepared.request_id,
        prompt=prepared.prompt,
        prompt_token_ids=prepared.prompt_token_ids,
        outputs=EmbeddingOutput(vector.astype(np.float32).tolist()),
        num_cached_tokens=output.num_cached_tokens,
    )
