"""The seeded work of the CPU page, in token ids of SmolLM2's vocabulary; standard library only."""

from __future__ import annotations

import random
from dataclasses import dataclass

Request = tuple[list[int], int]
"""Prompt token ids, and how many tokens to make."""

SEED = 20261129
VARIANTS = 4  # 0 warms up, the others are measured
START_INPUT = 16  # tokens of the prompt whose first token ends a start


@dataclass(frozen=True)
class Sizes:
    """How much of everything; the defaults are the page's."""

    input: int = 128
    output: int = 128
    prefill: int = 2048
    batch: int = 32
    batch_lengths: tuple[int, int] = (64, 256)
    shared: int = 16
    prefix: int = 1024
    own: int = 32
    shared_output: int = 16
    sweep_input: int = 128
    sweep_output: int = 64
    concurrencies: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)


QUICK = Sizes(16, 6, 64, 3, (6, 12), 3, 48, 8, 3, 8, 4, (1, 3))
"""Enough to see that everything runs; its figures mean nothing."""


def cpu_work(sizes: Sizes) -> dict[str, list[list[Request]]]:
    """Requests by row (single, prefill, batch, shared, sweep-1, …) and variant.

    Each variant has prompts of its own, so that no engine finds one in its prefix cache.
    """
    rng = random.Random(SEED)

    def ids(count: int) -> list[int]:
        return [rng.randrange(100, 49000) for _ in range(count)]

    shape = [
        (rng.randint(*sizes.batch_lengths), rng.randint(*sizes.batch_lengths)) for _ in range(sizes.batch)
    ]
    work: dict[str, list[list[Request]]] = {
        "single": [[(ids(sizes.input), sizes.output)] for _ in range(VARIANTS)],
        "prefill": [[(ids(sizes.prefill), 1)] for _ in range(VARIANTS)],
        "batch": [[(ids(p), n) for p, n in shape] for _ in range(VARIANTS)],
        "shared": [],
    }
    for _ in range(VARIANTS):
        prefix = ids(sizes.prefix)
        work["shared"].append([(prefix + ids(sizes.own), sizes.shared_output) for _ in range(sizes.shared)])
    for count in sizes.concurrencies:
        work[f"sweep-{count}"] = [
            [(ids(sizes.sweep_input), sizes.sweep_output) for _ in range(count)] for _ in range(VARIANTS)
        ]
    return work
