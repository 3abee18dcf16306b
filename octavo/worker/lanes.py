"""A decode step as two half batches beside each other on the device.

Attention is bound by memory, products by launches and latency, at least in a small model: with two streams
one half's products run while the other half attends. Weights are read twice for it, so it pays only where
they are few beside the KV cache.
"""

from __future__ import annotations

from typing import Any

import torch

from octavo.kernels.workspace import lane
from octavo.layers.attention import AttentionMetadata
from octavo.worker.input_batch import StepInputs
from octavo.worker.weight_bytes import step_weight_bytes

# Rows from which, and bytes of weights up to which halves are faster than the whole.
MIN_ROWS = 96
MAX_WEIGHT_BYTES = 2 << 30


class Lanes:
    """Runs a model's decode steps in two halves, on the current stream and on one of its own."""

    def __init__(self, model: Any, kv_caches: list[torch.Tensor]):
        self._model = model
        self._kv_caches = kv_caches
        self._stream: Any = None

    def forward(self, inputs: StepInputs) -> torch.Tensor:
        """Hidden states `[rows, hidden_size]` of a step in which every request has one row or none."""
        rows = len(inputs.slots)
        halves = (0, rows // 2), (rows // 2, rows)
        main = torch.cuda.current_stream()
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        self._stream.wait_stream(main)
        with lane(0):
            first = self._half(inputs, *halves[0])
        with torch.cuda.stream(self._stream), lane(1):
            second = self._half(inputs, *halves[1])
        main.wait_stream(self._stream)
        return torch.cat((first, second))

    def _half(self, inputs: StepInputs, begin: int, end: int) -> torch.Tensor:
        metas = [part(meta, begin, end) for meta in inputs.meta]
        self._model.plan_attention(metas)
        return self._model(inputs.token_ids[begin:end], inputs.positions[begin:end], self._kv_caches, metas)


def lanes_for(model: Any, kv_caches: list[torch.Tensor], device: torch.device) -> Lanes | None:
    """What runs a model's decode steps in halves, where that pays."""
    if device.type != "cuda" or step_weight_bytes(model) > MAX_WEIGHT_BYTES:
        return None
    return Lanes(model, kv_caches)


def part(meta: AttentionMetadata, begin: int, end: int) -> AttentionMetadata:
    """The batch of requests `begin .. end` (exclusive), of one row each but for those at the end that have
    none; nothing is shared any more."""
    starts = meta.query_start[begin : end + 1]
    return AttentionMetadata(
        query_start=starts - begin if begin else starts,
        seq_lens=meta.seq_lens[begin:end],
        block_table=meta.block_table[begin:end],
        slot_mapping=meta.slot_mapping[begin:end],
        num_requests=end - begin,
        num_rows=end - begin,
        max_query_len=1,
        max_seq_len=meta.max_seq_len,
        num_decodes=end - begin,
    )
