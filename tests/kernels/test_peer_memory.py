"""How ranks come by memory that all of them write, on pretended GPUs; real ones run in tests/gpu.

Ranks are processes whose memory was made before they were, so that it lies at the same address in each; the
driver's handle of a tensor is its address.
"""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from octavo.kernels import ops
from octavo.parallel import peer_memory
from octavo.parallel.process_group import DistributedGroup
from octavo.worker.pretended_gpu import pretended_gpu

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("tests/gpu has it on GPUs", allow_module_level=True)

RANKS, ROW_BYTES = 2, 512


def _share(memory: torch.Tensor) -> bytes:
    return memory.data_ptr().to_bytes(peer_memory._HANDLE_BYTES + 8, "little")


def _open(told: bytes) -> int:
    return int.from_bytes(told, "little")


def _rank(rank: int, folder: Path, memories: list[torch.Tensor], lacks: str, results: Any) -> None:
    torch.set_num_threads(1)
    facts = dict(name="pretended", major=8, minor=0, multi_processor_count=4, index=rank)
    empty = torch.empty

    def own_memory(*shape: Any, **options: Any) -> torch.Tensor:
        found = memories[rank] if options.get("dtype") is torch.uint8 and len(shape) == 2 else None
        return empty(*shape, **options) if found is None else found

    def refuse(told: bytes) -> int:
        raise peer_memory.PeerError("CUDA error 1 from cuIpcOpenMemHandle")

    def refuses(what: str) -> bool:
        return lacks == what and rank == 1

    try:
        store = dist.FileStore(str(folder / "store"), RANKS)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
        group = DistributedGroup(rank, RANKS, dist.group.WORLD)
        with (
            pretended_gpu(facts, place="cpu") as device,
            mock.patch.object(torch.cuda, "device_count", lambda: RANKS),
            mock.patch.object(torch.cuda, "can_device_access_peer", lambda a, b: not refuses("access")),
            mock.patch.object(peer_memory, "ROW_BYTES", ROW_BYTES),
            mock.patch.object(peer_memory, "share", _share),
            mock.patch.object(peer_memory, "open_shared", refuse if refuses("open") else _open),
            mock.patch.object(torch, "empty", own_memory),
        ):
            group.join_peers(device, few_rows=lacks != "wish")
            g = torch.Generator().manual_seed(1)
            parts = torch.randn(RANKS, 3, 40, generator=g)
            stream, weight = torch.randn(3, 40, generator=g), torch.randn(40, generator=g)
            found = [
                group.all_reduce(parts[rank].clone()),
                group.all_reduce(parts[rank, :, :1].bfloat16()).float(),
                *group.add_rms_norm(parts[rank].clone(), stream.clone(), weight, 1e-5),
                group.argmax(parts[rank], 40 * rank).long(),
                group.all_reduce(torch.full((2, 200), float(rank))),  # wider than a row of the box
                group.all_reduce(torch.full((520, 2), float(rank))),  # more rows than places
            ]
        results.put((rank, group.transport, [tensor.tolist() for tensor in found]))
    except Exception as error:
        results.put((rank, "failed", repr(error)))
    results.close()
    results.join_thread()
    os._exit(0)  # nobody waits for libraries of the parent


def run(folder: Path, lacks: str = "") -> list[tuple[int, str, Any]]:
    """What both ranks found, where one lacks something."""
    shape = (2, 2 * RANKS * 512 * ROW_BYTES)
    memories = [torch.zeros(shape, dtype=torch.uint8).share_memory_() for _ in range(RANKS)]
    fork = multiprocessing.get_context("fork")
    results = fork.Queue()
    processes = [
        fork.Process(target=_rank, args=(rank, folder, memories, lacks, results), daemon=True)
        for rank in range(RANKS)
    ]
    for process in processes:
        process.start()
    told = sorted((results.get(timeout=120) for _ in processes), key=lambda entry: entry[0])
    for process in processes:
        process.join(30)
    return told


@pytest.mark.parametrize("lacks", ["", "access", "open", "wish"])
def test_sums_are_right_whatever_way_they_go(tmp_path, lacks):
    told = run(tmp_path, lacks)
    way = "NCCL" if lacks else "peer memory"
    assert [transport for _, transport, _ in told] == [way, way], told
    assert told[0][2] == told[1][2]
    g = torch.Generator().manual_seed(1)
    parts = torch.randn(RANKS, 3, 40, generator=g)
    stream, weight = torch.randn(3, 40, generator=g), torch.randn(40, generator=g)
    total = parts[0] + parts[1]
    normed, stream = ops.add_rms_norm(total, stream, weight, 1e-5)
    want = [
        total,
        (parts[0, :, :1].bfloat16() + parts[1, :, :1].bfloat16()).float(),
        normed,
        stream,
        torch.cat((parts[0], parts[1]), dim=1).argmax(1),
        torch.ones(2, 200),
        torch.ones(520, 2),
    ]
    for got, expected in zip(told[0][2], want, strict=True):
        torch.testing.assert_close(torch.tensor(got), expected, rtol=1.6e-2, atol=1e-5)
