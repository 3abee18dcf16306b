"""Tensors put by in other memory: values, sharing, and what a lack of memory leaves."""

from __future__ import annotations

import torch
from torch import nn

from octavo.worker.parking import ParkedTensors


def test_values_and_sharing_come_back() -> None:
    model = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 50, bias=False), nn.Linear(8, 4))
    model[1].weight = model[0].weight  # tied
    model.register_buffer("view", model[2].weight.data[1:3])
    model.register_buffer("empty", torch.zeros(0))
    tensors = [*model.parameters(), *model.buffers()]
    before = [tensor.detach().clone() for tensor in tensors]
    ids = torch.tensor([3, 7])
    want = model[1](model[0](ids))
    parked = ParkedTensors(tensors)
    assert parked.num_bytes == 4 * (50 * 8 + 8 * 4 + 4)
    assert sum(t.untyped_storage().nbytes() for t in tensors) == 0
    parked.restore()
    assert all(torch.equal(tensor, value) for tensor, value in zip(tensors, before, strict=True))
    assert torch.equal(model[1](model[0](ids)), want)
    model[0].weight.data[3] += 1
    model[2].weight.data[1] += 1
    assert torch.equal(model[1].weight, model[0].weight)
    assert torch.equal(model.view[0], model[2].weight[1])


def test_a_lack_of_memory_frees_what_was_taken(monkeypatch) -> None:
    tensors = [torch.arange(100.0), torch.arange(7)]
    parked = ParkedTensors(tensors)
    real, calls = torch.UntypedStorage.resize_, []

    def resize(storage: torch.UntypedStorage, size: int):
        calls.append(size)
        if size == 7 * 8 and calls.count(size) == 1:
            raise RuntimeError("out of memory")
        return real(storage, size)

    monkeypatch.setattr(torch.UntypedStorage, "resize_", resize)
    try:
        parked.restore()
    except RuntimeError:
        assert [t.untyped_storage().nbytes() for t in tensors] == [0, 0]
    else:
        raise AssertionError("restored without memory")
    parked.restore()
    assert tensors[0].sum() == 4950 and tensors[1].tolist() == list(range(7))
