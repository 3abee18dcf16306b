"""Runs a built model over ragged batches through a paged cache, as the worker does."""

from __future__ import annotations

from dataclasses import replace

import torch

from octavo.layers.attention import AttentionMetadata
from octavo.models.interface import CausalLM


class PagedRun:
    """A cache whose blocks are handed out in scrambled order, and what each request has computed."""

    def __init__(self, model: CausalLM, requests: int, max_len: int, seed: int = 0):
        self.model = model
        layers = model.attention_layers()
        fmt = layers[0].fmt
        self.block_size = fmt.block_size
        per_request = -(-max_len // self.block_size)
        num_blocks = requests * per_request + 1
        dtype = getattr(torch, fmt.dtype)
        self.device = next(model.parameters()).device
        # NaN: a row that is read before it is written shows.
        self.caches = [
            torch.full(
                (num_blocks, *layer.fmt.layer_block_shape()), float("nan"), dtype=dtype, device=self.device
            )
            for layer in layers
        ]
        order = torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(seed)) + 1
        self.tables = order.view(requests, per_request).int()
        self.done = [0] * requests

    def step(self, rows: dict[int, list[int]], padding: int = 0) -> dict[int, torch.Tensor]:
        """Compute the next tokens of some requests in one batch; their logits, float32 `[n, vocab]`."""
        starts, lens, positions, slots, tokens = [0], [], [], [], []
        for request, ids in rows.items():
            first = self.done[request]
            for position in range(first, first + len(ids)):
                block = int(self.tables[request, position // self.block_size])
                slots.append(block * self.block_size + position % self.block_size)
                positions.append(position)
            tokens += ids
            starts.append(starts[-1] + len(ids))
            self.done[request] = first + len(ids)
            lens.append(self.done[request])
        to = {"device": self.device}
        meta = AttentionMetadata(
            query_start=torch.tensor(starts, dtype=torch.int32, **to),
            seq_lens=torch.tensor(lens, dtype=torch.int32, **to),
            block_table=self.tables[list(rows)].contiguous().to(**to),
            slot_mapping=torch.tensor(slots + [-1] * padding, **to),
            num_requests=len(rows),
            num_rows=len(tokens),
            max_query_len=max(map(len, rows.values())),
            max_seq_len=max(lens),
        )
        metas = [replace(meta) for _ in self.model.kv_groups()]
        with torch.inference_mode():
            self.model.plan_attention(metas)
            hidden = self.model(
                torch.tensor(tokens + [0] * padding, **to),
                torch.tensor(positions + [0] * padding, **to),
                self.caches,
                metas,
            )
            logits = self.model.compute_logits(hidden)[: len(tokens)].float().cpu()
        return dict(zip(rows, logits.split([len(ids) for ids in rows.values()]), strict=True))

    def prompts(self, prompts: list[list[int]], chunk: int) -> list[torch.Tensor]:
        """Logits at every position of several prompts, computed together in chunks of `chunk` tokens."""
        parts: list[list[torch.Tensor]] = [[] for _ in prompts]
        while any(self.done[i] < len(p) for i, p in enumerate(prompts)):
            rows = {
                i: p[self.done[i] : self.done[i] + chunk]
                for i, p in enumerate(prompts)
                if self.done[i] < len(p)
            }
            for i, logits in self.step(rows).items():
                parts[i].append(logits)
        return [torch.cat(x) for x in parts]
