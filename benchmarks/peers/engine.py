"""What the peers' files are made of. Standard library only: these run in the peers' own environments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

Tokens = list[list[int]]


@dataclass(frozen=True)
class EngineSpec:
    """How to load an engine.

    Attributes:
        model: file or folder of the model in the peer's own format.
        weights: one of the peer's names of weight formats.
        threads: of the model's computation.
        capacity: tokens that the KV cache is to hold, where that can be said.
        max_seqs: most requests that run at once.
    """

    model: str
    weights: str
    threads: int
    capacity: int
    max_seqs: int


class Engine(Protocol):
    """A loaded model. Making one is part of what the row "start to first token" measures."""

    def generate(self, prompts: Sequence[list[int]], lengths: Sequence[int]) -> Tokens:
        """Greedy tokens after each prompt, as many as asked for, ends of text ignored; all given at once."""
        ...


@dataclass(frozen=True)
class Peer:
    """An engine that is measured.

    Attributes:
        key: its module in this package, and its environment's folder.
        name: as the page calls it.
        requirements: what pip installs; nothing for the environment that runs the benchmark.
        weights: names of the weight formats that are measured.
        note: how it is used, for the page.
        build: installs what pip alone does not; (the environment's folder, run a command there).
        variables: environment variables of its process, by number of threads.
    """

    key: str
    name: str
    requirements: tuple[str, ...]
    weights: tuple[str, ...]
    note: str = ""
    build: Callable[[Path, Callable[..., None]], None] | None = None
    variables: Callable[[int], dict[str, str]] = field(default=lambda threads: {})
