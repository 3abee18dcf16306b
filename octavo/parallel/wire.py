"""What passes between the engine and its ranks, and how it is written: msgpack, arrays as their bytes.

Every message to the ranks is encoded once and sent to all of them. Nothing is pickled.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from octavo.step_messages import ModelFacts, StepPlan, StepResult, TokenMasks


class RankSetup(msgspec.Struct):
    """Engine to rank, first of all: who it is, and what it loads.

    Attributes:
        config: the engine's settings (`EngineConfig`) by name.
        rank: among all ranks: stage * tensor + rank within the stage.
        tensor, pipeline: ranks that share each layer, and stages that share the layers in turn.
        rendezvous: path of an open file of this process, through which the ranks find each other.
        log_level: of the engine's process, as the logging module numbers it.
    """

    config: dict[str, Any]
    rank: int
    tensor: int
    pipeline: int
    rendezvous: str
    log_level: int


class RunStep(msgspec.Struct, tag="run"):
    """Engine to rank: launch a step. `number` counts the steps that were sent, from 0."""

    number: int
    plan: StepPlan


class DrawTokens(msgspec.Struct, tag="draw"):
    """Engine to rank: the masks of a step with masked requests, sent before the next step."""

    number: int
    masks: TokenMasks


class SleepRank(msgspec.Struct, tag="sleep"):
    """Engine to rank: give memory back (`Executor.sleep`)."""

    level: int


class WakeRank(msgspec.Struct, tag="wake"):
    """Engine to rank: take it again."""


class StartTrace(msgspec.Struct, tag="start_trace"):
    """Engine to rank: record the steps that follow, for a profile."""


class StopTrace(msgspec.Struct, tag="stop_trace"):
    """Engine to rank: end the profile, if one is under way.

    Attributes:
        paths: by rank, where its trace goes; empty: it is dropped.
    """

    paths: list[str] = []


class CloseRank(msgspec.Struct, tag="close"):
    """Engine to rank: free everything and end."""


ToRank = RunStep | DrawTokens | SleepRank | WakeRank | StartTrace | StopTrace | CloseRank


class RankReady(msgspec.Struct, tag="ready"):
    """Rank to engine: its part of the model is loaded."""

    facts: ModelFacts


class RankFatal(msgspec.Struct, tag="fatal"):
    """Rank to engine: it cannot start, or go on. `kind` is the error class's name."""

    kind: str
    message: str


class StepDone(msgspec.Struct, tag="done"):
    """Rank to engine: a step is through.

    Attributes:
        number: the step's.
        digest: of its tokens, which every rank of a stage draws for itself: equal on all of them (only the
            last stage has any).
        result: what it yielded, from one rank of the last stage.
        copies_done, copies_failed: as in `StepResult`, of this rank.
        graph_bytes: `Executor.graph_bytes`, of this rank.
        stage_seconds: as in `StepResult`, of this rank.
    """

    number: int
    digest: int
    result: StepResult | None = None
    copies_done: list[int] = []
    copies_failed: list[int] = []
    graph_bytes: int = 0
    stage_seconds: float = 0.0


class StepFailed(msgspec.Struct, tag="failed"):
    """Rank to engine: a step raised an error; the rank goes on if all raised alike."""

    number: int
    kind: str
    message: str


class Answer(msgspec.Struct, tag="answer"):
    """Rank to engine: what it was asked for, other than a step, is through, or raised the error `kind`."""

    value: int = 0
    kind: str | None = None
    message: str = ""


class Beat(msgspec.Struct, tag="beat"):
    """Rank to engine, every second: it is alive."""


FromRank = RankReady | RankFatal | StepDone | StepFailed | Answer | Beat


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, np.ascontiguousarray(value).data.cast("B") if value.size else b""
    if isinstance(value, np.generic):
        return value.item()
    raise NotImplementedError(f"{type(value).__name__} is no part of a message")


def _array(kind: type, value: Any) -> Any:
    if kind is not np.ndarray:
        raise NotImplementedError(f"{kind.__name__} is no part of a message")
    dtype, shape, data = value
    # Of its own, since what came is read-only.
    return np.frombuffer(data, np.dtype(dtype)).reshape(shape).copy()


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
encode = _encoder.encode
"""A message, or the first one (`RankSetup`), as bytes."""

decode_setup = msgspec.msgpack.Decoder(RankSetup).decode
decode_to_rank = msgspec.msgpack.Decoder(ToRank, dec_hook=_array).decode
decode_from_rank = msgspec.msgpack.Decoder(FromRank, dec_hook=_array).decode
