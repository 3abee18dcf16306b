"""Kernels that a start is foreseen to launch, and that it launches: `python -m tests.worker.kernel_variants`.

Takes folders of models, each with `=fp8` behind it where its weights are to become such, or with `=ranks` for
the first of two tensor-parallel ranks, and writes for each a line of JSON: `foreseen` and `launched`, lists
of variants in words. The start is an engine's own but for the device: tensors lie on the CPU, say that they
lie on a GPU of capability 9.0, and are computed by PyTorch; kernels are not run, so memory is zero from the
beginning (any token is one). A process of its own, as it leaves such tensors in caches.
"""

from __future__ import annotations

import contextlib
import functools
import json
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from octavo.config import EngineConfig
from octavo.engine.core import EngineCore
from octavo.engine.executor import UniprocExecutor
from octavo.kernels.triton import launch, workspace
from octavo.messages import CoreRequest
from octavo.sampling_params import SamplingParams
from octavo.worker import graphs, worker
from octavo.worker.dry_group import DryGroup
from octavo.worker.dry_worker import DryWorker
from octavo.worker.pretended_gpu import pretended_gpu

H200 = {
    "name": "NVIDIA H200",
    "major": 9,
    "minor": 0,
    "multi_processor_count": 132,
    "shared_memory_per_multiprocessor": 228 << 10,
    "index": 0,
}
MEMORY = {
    "mem_get_info": lambda device=None: (1 << 30, 1 << 30),
    "memory_allocated": lambda device=None: 0,
    "max_memory_allocated": lambda device=None: 0,
    "memory_reserved": lambda device=None: 0,
    "reset_peak_memory_stats": lambda device=None: None,
    "empty_cache": lambda: None,
}


def config(model: str) -> EngineConfig:
    """Small, with a largest step beyond the rows that kernels for few rows take."""
    folder, _, quantization = model.partition("=")
    return EngineConfig(
        model=folder,
        quantization=None if quantization == "ranks" else quantization or None,
        tensor_parallel_size=2 if quantization == "ranks" else 1,
        load_format="dummy",
        device="cuda",
        dtype="bfloat16",
        max_model_len=200,
        max_num_seqs=2,
        max_num_batched_tokens=260,
        kv_cache_memory_bytes=1 << 20,
        async_scheduling=False,
    )


def variants(run: Callable[[str], None], model: str) -> list[str]:
    """What is launched while `run(model)` runs."""
    seen: set[str] = set()

    def launched(
        self: Any, grid: Any, tensors: Any, integers: Any, scalars: Any, constants: Any, warps: int
    ) -> None:
        kinds = [f"{t.dtype}{'' if t.data_ptr() % 16 == 0 else ' unaligned'}" for t in tensors]
        seen.add(f"{self.kernel.__name__}({', '.join(kinds)}; {integers}; {constants}; {warps} warps)")

    workspace.workspace.cache_clear()
    with mock.patch.object(launch.Launcher, "__call__", launched):
        run(model)
    return sorted(seen)


def zeroed(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`make`, but for the memory's content."""
    return lambda *args, **kwargs: make(*args, **kwargs).zero_()


def dry(model: str) -> None:
    """The first steps as they are foreseen."""
    with pretended_gpu(H200) as device:
        for _ in DryWorker(config(model), device).first_steps():
            pass


def start(model: str) -> None:
    """A start and a request of 16 tokens, to its second token."""
    with contextlib.ExitStack() as stack:
        for name in ("empty", "empty_like"):
            stack.enter_context(mock.patch.object(torch, name, zeroed(getattr(torch, name))))
        for name, answer in MEMORY.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, answer))
        stack.enter_context(
            mock.patch.object(
                graphs.DecodeGraphs, "_record", lambda *_: graphs.Recorded(None, None, None, ())
            )
        )
        device = stack.enter_context(pretended_gpu(H200, place="cpu"))
        settings = config(model)
        if settings.tensor_parallel_size > 1:  # whose kernels write into memory of others: none is run here
            group = DryGroup(settings.tensor_parallel_size, device, use_peers=True)
            stack.enter_context(
                mock.patch.object(worker, "Worker", functools.partial(worker.Worker, group=group))
            )
        core = EngineCore(settings, UniprocExecutor(settings))
        params = SamplingParams(temperature=0.0, max_tokens=2)
        core.add(CoreRequest(request_id="a", prompt_token_ids=[*range(16)], params=params, seed=0))
        outputs = []
        while core.has_work:
            outputs += core.step()
        assert sum(len(output.new_token_ids) for output in outputs) == 2, outputs


if __name__ == "__main__":
    for folder in sys.argv[1:]:
        found = {"launched": variants(start, folder), "foreseen": variants(dry, folder)}
        print(json.dumps(found), flush=True)
