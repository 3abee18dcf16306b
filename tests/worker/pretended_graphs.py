"""Engines on the CPU that record what they would on a GPU: a replay is the recorded work again."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from octavo.models.interface import CausalLM
from octavo.worker import model_runner, worker
from octavo.worker.graph_recorder import GraphRecorder
from octavo.worker.graphs import DecodeGraphs
from octavo.worker.input_batch import Padding, StepInputs


@dataclass
class Recordings:
    """Paddings of steps, and keys of other work, in the order in which they were recorded."""

    steps: list[Padding]
    works: list[Any]

    @property
    def sizes(self) -> list[int]:
        return [padding.requests for padding in self.steps]


@dataclass
class Replay:
    """What a graph does: the recorded work again, on the same buffers."""

    graphs: DecodeGraphs
    inputs: StepInputs | None  # of a step; others make theirs
    work: Callable[[], Any]
    places: list[torch.Tensor]

    def replay(self) -> None:
        for meta in (
            () if self.inputs is None else self.inputs.meta
        ):  # a graph keeps the bounds that it was recorded with
            meta.max_seq_len, meta.plan = self.graphs._max_model_len, None
        model = self.graphs._model
        given = model.aux_states  # a replay runs no Python: where states lie the graph's owner knows
        for place, computed in zip(self.places, tensors(self.work()), strict=True):
            place.copy_(computed)
        model.aux_states = given


def tensors(result: Any) -> list[torch.Tensor]:
    """Those of a work's result, in order."""
    if isinstance(result, (tuple, list)):
        return [tensor for part in result for tensor in tensors(part)]
    return [] if result is None else [result]


def void(result: Any) -> Any:
    """A result of the same form, of tensors of which nothing is computed yet."""
    if isinstance(result, (tuple, list)):
        return type(result)(void(part) for part in result)
    if result is None:
        return None
    return torch.full_like(result, float("nan") if result.is_floating_point() else -1)


def pretend_graphs(monkeypatch: pytest.MonkeyPatch) -> Recordings:
    """From here on engines do; what they have recorded."""
    found = Recordings([], [])
    owners: dict[int, DecodeGraphs] = {}
    local = threading.local()  # ranks are threads of one process

    def changed(graphs: DecodeGraphs) -> list[torch.Tensor]:
        batch = graphs._batch
        filled = [batch._token_ids, batch._positions, batch._ends, batch._seq_lens]
        filled += [*batch._slot_mappings, *batch._block_rows]
        return [batch.token_table, batch.num_computed, *filled, *graphs._kv_caches]

    def record(self: GraphRecorder, work: Callable[[], Any]) -> tuple[Any, Any]:
        graphs = owners[id(self)]
        # A recording executes nothing: what the work would change is put back.
        kept = [tensor.clone() for tensor in changed(graphs)]
        empty = void(work())
        for tensor, old in zip(changed(graphs), kept, strict=True):
            tensor.copy_(old)
        inputs, local.inputs = getattr(local, "inputs", None), None
        return Replay(graphs, inputs, work, tensors(empty)), empty

    def record_step(self: DecodeGraphs, inputs: StepInputs) -> Any:
        local.inputs = inputs
        return record_other(self, inputs)

    def run(self: DecodeGraphs, inputs: StepInputs) -> Any:
        before, owners[id(self.recorder)] = len(self._graphs), self
        result = run_step(self, inputs)
        if len(self._graphs) > before:
            assert inputs.padding is not None
            found.steps.append(inputs.padding)
        return result

    def run_work(self: GraphRecorder, key: Any, work: Callable[[], None]) -> None:
        if key not in self._works:
            found.works.append(key)
        run_other(self, key, work)

    class Graphed(model_runner.ModelRunner):
        def __init__(self, *args: Any, **settings: Any):
            super().__init__(*args, **(settings | {"use_graphs": True}))
            assert self.graphs is not None
            owners[id(self.graphs.recorder)] = self.graphs

    run_step, run_other, record_other = DecodeGraphs.run, GraphRecorder.run, DecodeGraphs._record
    monkeypatch.setattr(DecodeGraphs, "_record", record_step)
    monkeypatch.setattr(GraphRecorder, "record", record)
    monkeypatch.setattr(GraphRecorder, "run", run_work)
    monkeypatch.setattr(DecodeGraphs, "run", run)
    for name, instead in [("prepare_replay", None), ("prepare_capture", None)]:
        monkeypatch.setattr(CausalLM, name, lambda self, meta, instead=instead: instead)
    monkeypatch.setattr(CausalLM, "why_no_graphs", lambda self, dtype, device: None)
    monkeypatch.setattr(worker, "ModelRunner", Graphed)
    return found
