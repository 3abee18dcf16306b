"""Pipeline stages: which layers each one has, and how rows and tokens get from one to another.

A model's layers are divided in their order among stages. A step's rows enter the first stage as tokens; each
stage hands the residual stream on to the next, and the last one samples. The tokens go back to all others,
which keep the same tables of requests.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.errors import ConfigError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Stage:
    """One stage's layers among all.

    Attributes:
        number: from 0.
        bounds: the first layer of every stage, ascending, and the number of all layers.
    """

    number: int
    bounds: tuple[int, ...]

    @property
    def layers(self) -> range:
        """The layers of this stage, by their numbers in the model."""
        return range(self.bounds[self.number], self.bounds[self.number + 1])

    @property
    def is_first(self) -> bool:
        """Whether tokens enter here."""
        return self.number == 0

    @property
    def is_last(self) -> bool:
        """Whether logits are made here."""
        return self.number == len(self.bounds) - 2

    def describe(self) -> str:
        """One line for the log, the same on every stage."""
        counts = [str(stop - first) for first, stop in itertools.pairwise(self.bounds)]
        return f"{len(counts)} ({' + '.join(counts)} layers)"


class StageGroup:
    """The stages that a replica's layers are divided among, as one of them sees the others.

    This class is the plain case, one stage, which has nobody to send to. Sending never waits for the
    receiver; what was sent arrives in order.

    Attributes:
        stage: this one's number; size: how many there are.
    """

    def __init__(self, stage: int = 0, size: int = 1):
        if not 0 <= stage < size:
            raise ValueError(f"stage {stage} is not among {size} stages")
        self.stage = stage
        self.size = size

    @property
    def is_first(self) -> bool:
        """Whether tokens enter here."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether tokens are sampled here."""
        return self.stage == self.size - 1

    def send(self, x: torch.Tensor) -> None:
        """Send rows, `[rows, hidden_size]` of any float dtype, to the next stage; `x` may be overwritten."""
        self._alone("send")

    def receive(self, into: torch.Tensor) -> None:
        """Receive what the stage before has sent, into a contiguous tensor of the same shape and dtype."""
        self._alone("receive")

    def send_tokens(self, tokens: torch.Tensor) -> None:
        """Send int32 tokens from the last stage to every other one; `tokens` may be overwritten."""
        self._alone("send_tokens")

    def receive_tokens(self, into: torch.Tensor) -> None:
        """Receive what the last stage has sent, into a contiguous int32 tensor of the same shape."""
        self._alone("receive_tokens")

    def flush(self) -> None:
        """Wait until what was sent has been taken, by stages that do so now."""

    def minimum(self, value: int) -> int:
        """The least of what all stages call this with, which they do at the same point."""
        if self.size > 1:
            self._alone("minimum")
        return value

    def everyones(self, digest: bytes) -> bytes:
        """What every stage calls this with, bytes of one length, one after the other in their order."""
        largest = 1 << 56  # more than seven bytes hold
        joined = b""
        for stage in range(self.size):
            for first in range(0, len(digest), 7):
                piece = digest[first : first + 7]
                own = int.from_bytes(piece, "big") if stage == self.stage else largest
                joined += self.minimum(own).to_bytes(len(piece), "big")
        return joined

    def _alone(self, what: str) -> None:
        raise NotImplementedError(f"{what} among {self.size} pipeline stages needs a group with a transport")


def divide_layers(costs: Sequence[float], head: float, stages: int) -> tuple[int, ...]:
    """Divide layers among stages so that the slowest stage is as quick as can be.

    Args:
        costs: of each layer, in any unit (bytes of weights, which a decode step reads).
        head: of the final norm and output head, which the last stage has besides.
        stages: how many; each gets a layer at least.

    Returns:
        `Stage.bounds`. Of equally good divisions, the one whose first stages have more layers.

    Raises:
        ConfigError: more stages than layers.
    """
    if stages > len(costs):
        raise ConfigError(
            f"pipeline_parallel_size={stages} is more than the model's {len(costs)} layers: lower it"
        )
    # What the best division of the layers from i on among s stages costs, and where its first stage ends.
    best: dict[tuple[int, int], tuple[float, int]] = {}
    for i in range(len(costs)):
        best[i, 1] = sum(costs[i:]) + head, len(costs)
    for s in range(2, stages + 1):
        for i in range(len(costs) - s + 1):
            found, own = None, 0.0
            for stop in range(i + 1, len(costs) - s + 2):
                own += costs[stop - 1]
                slowest = max(own, best[stop, s - 1][0])
                if found is None or slowest <= found[0]:
                    found = slowest, stop
            assert found is not None
            best[i, s] = found
    bounds = [0]
    for s in range(stages, 0, -1):
        bounds.append(best[bounds[-1], s][1])
    return tuple(bounds)


def read_partition(text: str, layers: int, stages: int) -> tuple[int, ...]:
    """`Stage.bounds` of a division that is given as each stage's number of layers, such as "9,7".

    Raises:
        ConfigError: it does not fit the model or the number of stages.
    """
    parts = [part.strip() for part in text.split(",")]
    counts = [int(part) for part in parts if part.isascii() and part.isdigit()]
    name = f"pp_layer_partition={text!r}"
    if len(counts) != len(parts) or min(counts) < 1:
        raise ConfigError(f"{name} is not valid: give each stage's number of layers, such as 9,7")
    if len(counts) != stages:
        raise ConfigError(
            f"{name} names {len(counts)} stages and pipeline_parallel_size={stages}: give one number for each"
        )
    if sum(counts) != layers:
        raise ConfigError(
            f"{name} has {sum(counts)} layers and the model {layers}: give numbers that add up to that"
        )
    bounds = [0]
    for count in counts:
        bounds.append(bounds[-1] + count)
    return tuple(bounds)
