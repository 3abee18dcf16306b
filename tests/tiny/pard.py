"""Tiny draft models with a mask token, and drafting with them by its definition: no cache, no batch.

Nothing of Octavo is used here. A draft has random weights, or was taught on a target's greedy continuations
to go on with several tokens at once, so that some of its drafts are right.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import torch

from tests.tiny.models import NEW_TOKENS, build, greedy, root
from tests.tiny.tokenizer import save_tokenizer
from tests.tiny.variants import PROMPTS

MASK = 3
_MOST, _STEPS, _BATCH = 6, 60, 12  # masks of a lesson; lessons; texts of each


@functools.cache
def model(variant: str, target: str | None = None) -> Any:
    """The Transformers model of a variant; taught to go on as `target` does, if one is named."""
    made = build(variant)
    if target is not None:
        _teach(made, [p + greedy(target, i) for i, p in enumerate(PROMPTS)])
    return made


def _teach(made: Any, texts: list[list[int]]) -> None:
    """Beginnings of the texts, and masks behind them: rows from the last known token on tell what follows."""
    threads, generator = torch.get_num_threads(), torch.Generator().manual_seed(0)
    torch.set_num_threads(1)
    optimizer = torch.optim.Adam(made.parameters(), lr=2e-3)
    for step in range(_STEPS):
        text = texts[step % len(texts)]
        ends = torch.randint(len(text) - NEW_TOKENS, len(text) - _MOST, (_BATCH,), generator=generator)
        width = int(ends.max()) + _MOST - 1
        ids = torch.full((_BATCH, width), MASK)
        labels = torch.full((_BATCH, width), -100)
        for row, end in enumerate(ends.tolist()):
            ids[row, :end] = torch.tensor(text[:end])
            labels[row, end - 1 : end - 1 + _MOST] = torch.tensor(text[end : end + _MOST])
        logits = made(ids).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    made.requires_grad_(False)
    torch.set_num_threads(threads)


@functools.cache
def checkpoint(variant: str, target: str | None = None, **changes: Any) -> Path:
    """The folder of a draft, written once; `changes` of its config.json."""
    folder = root() / "-".join(["pard", variant, str(target), *map(str, changes.values())])
    model(variant, target).save_pretrained(folder)
    save_tokenizer(folder)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "pard_token": MASK, **changes}))
    return folder


@torch.no_grad()
def drafts(made: Any, tokens: list[int], count: int) -> tuple[list[int], float]:
    """The drafts behind some tokens, and the smallest lead of one over the next likely token."""
    ids = torch.tensor([[*tokens, *[MASK] * (count - 1)]])
    rows = made(ids).logits[0, -count:]
    best = rows.topk(2).values
    return rows.argmax(-1).tolist(), float((best[:, 0] - best[:, 1]).min())
