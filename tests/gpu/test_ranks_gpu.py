"""Ranks on two GPUs: sums over them in every way, and engines that say what one rank says."""

from __future__ import annotations

import os
import random
import tempfile
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.kernels import ops, reference_peers
from octavo.parallel.process_group import DistributedGroup, choose_rank_device, join_ranks
from tests import tiny

pytestmark = pytest.mark.gpu
if torch.cuda.device_count() < 2:
    pytest.skip("needs two NVIDIA GPUs", allow_module_level=True)

# NVLink's multicast is not used, and stays off where it is not to be touched.
os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")

GREEDY = SamplingParams(temperature=0.0, max_tokens=tiny.NEW_TOKENS, ignore_eos=True, detokenize=False)
ROUNDS = 1000
SHAPES = [
    (1, 4096, torch.bfloat16), (1500, 2048, torch.bfloat16), (32, 4096, torch.bfloat16),
    (512, 4096, torch.bfloat16), (3, 577, torch.bfloat16), (5, 4097, torch.bfloat16),
    (64, 8192, torch.float16),
    (7, 2048, torch.float32), (2, 1, torch.float32), (1, 4096, torch.float32),
]  # fmt: skip


class Case:
    """One shape: what ranks add up, what must come out, and a graph of it."""

    def __init__(self, number: int, group: DistributedGroup, device: torch.device):
        rows, size, dtype = SHAPES[number]
        g = torch.Generator().manual_seed(number)
        parts = [torch.randn(rows, size, generator=g).to(dtype) for _ in range(2)]
        stream = torch.randn(rows, size, generator=g).to(dtype)
        self.weight = torch.randn(size, generator=g).to(device, dtype)
        self.parts = [part.to(device) for part in parts]
        self.stream = stream.to(device)
        self.total = reference_peers.sum_over_ranks(self.parts)
        self.group = group
        self.x = self.parts[group.rank].clone()
        self.residual = self.stream.clone()
        self.run()  # compiles
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            self.out = self.run()

    def run(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum, and the normalized sum of that and the stream, which is overwritten."""
        total = self.group.all_reduce(self.x)
        normed, _ = self.group.add_rms_norm(self.x, self.residual, self.weight, 1e-5)
        return total, normed

    def once(self, scale: float, replay: bool) -> torch.Tensor:
        """Run it with inputs times a power of two, so that sums are exactly so much larger; how many elements
        of the sum are wrong, or of the others far off."""
        self.x.copy_(self.parts[self.group.rank] * scale)
        self.residual.copy_(self.stream * scale)
        if replay:
            for out in self.out:
                out.fill_(float("nan"))
            self.graph.replay()
            total, normed = self.out
        else:
            poison = torch.full_like(self.x, float("nan"))
            del poison  # its memory is what the next result gets
            total, normed = self.run()
        want = self.total * scale
        residual = self.stream * scale
        expected, _ = ops.add_rms_norm(want, residual, self.weight, 1e-5)
        bound = 1e-5 if normed.dtype is torch.float32 else 2e-2
        near = (normed - expected).abs().float() <= bound * (1 + expected.abs().float())
        return (total != want).sum() + (~near).sum() + (self.residual != residual).sum()


def _rounds(rank: int, rendezvous: str, results: Any) -> None:
    device = choose_rank_device("cuda", rank, 2)
    group = join_ranks(rank, 2, 1, rendezvous, device, 60.0).tensor
    group.join_peers(device, few_rows=True, any_rows=True)
    assert group.transport.startswith("peer memory"), group.transport
    with torch.inference_mode():
        cases = [Case(number, group, device) for number in range(len(SHAPES))]
        order, pause = random.Random(5), random.Random(rank)
        wrong, digest = [], 0
        for n in range(ROUNDS):
            case = order.choice(cases)
            bad = case.once(2.0 ** order.randint(0, 3), replay=order.random() < 0.6)
            if pause.random() < 0.02:
                torch.cuda._sleep(pause.randint(1, 2_000_000))  # on the device
            if n % 100 == 99:
                wrong.append(int(bad))
                last = torch.cat([out.flatten().float() for out in case.run()])
                digest = zlib.crc32(last.cpu().numpy().tobytes(), digest)
            elif n % 7 == 0:
                wrong.append(int(bad))
        logits = torch.randn(40, 2, 1000, generator=torch.Generator().manual_seed(9)).to(device)
        logits[3] = 0.0
        token = group.argmax(logits[:, rank], 1000 * rank)
        whole = ops.argmax(logits.flatten(1).contiguous())
        wrong.append(int((token != whole).sum()))
        big = torch.full((3, 5000), rank + 1.0, device=device)  # too long rows: NCCL
        wrong.append(int((group.all_reduce(big) != 3.0).sum()))
    results.put((rank, sum(wrong), len(wrong), digest))
    group.minimum(0)
    os._exit(0)


def test_sums_in_graphs_and_outside(tmp_path: Path) -> None:
    """A thousand rounds of changing shapes: exact on both ranks, and the same bits."""
    spawn = torch.multiprocessing.get_context("spawn")
    results = spawn.SimpleQueue()
    with tempfile.NamedTemporaryFile(dir=tmp_path) as rendezvous:
        given = (rendezvous.name, results)
        processes = [spawn.Process(target=_rounds, args=(rank, *given), daemon=True) for rank in range(2)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(240)
    assert [process.exitcode for process in processes] == [0, 0]
    told = sorted(results.get() for _ in processes)
    assert [wrong for _, wrong, _, _ in told] == [0, 0]
    assert all(count > 100 for _, _, count, _ in told)
    assert told[0][3] == told[1][3]


def make(variant: str, **settings: Any) -> LLM:
    values = dict(
        device="cuda", dtype="float32", max_model_len=tiny.CONTEXT, skip_tokenizer_init=True,
        max_num_seqs=16, kv_cache_memory_bytes=64 << 20, max_num_batched_tokens=256,
    ) | settings  # fmt: skip
    return LLM(str(tiny.checkpoint(variant)), **values)


@pytest.mark.parametrize(
    ("variant", "settings"),
    [
        ("llama", dict(tensor_parallel_size=2)),
        ("llama", dict(tensor_parallel_size=2, disable_custom_all_reduce=True)),
        ("llama", dict(pipeline_parallel_size=2)),
        pytest.param("qwen3", dict(tensor_parallel_size=2, enforce_eager=True), marks=pytest.mark.slow),
        pytest.param("gemma2", dict(tensor_parallel_size=2), marks=pytest.mark.slow),
        pytest.param("qwen3-moe", dict(tensor_parallel_size=2), marks=pytest.mark.slow),
    ],
)
def test_ranks_say_what_transformers_says(variant: str, settings: dict[str, Any]) -> None:
    with make(variant, **settings) as llm:
        way = llm.facts.summary.get("sums over ranks", "")
        if "tensor_parallel_size" in settings:
            assert way.startswith("NCCL" if "disable_custom_all_reduce" in settings else "peer memory"), way
        for _ in range(2):
            outputs = llm.generate(tiny.PROMPTS, GREEDY, use_tqdm=False)
            assert [o.outputs[0].token_ids for o in outputs] == [
                tiny.greedy(variant, i) for i in range(len(tiny.PROMPTS))
            ]
        # Some end early, so that graphs of other sizes follow each other; one is sampled.
        params = [GREEDY.clone(max_tokens=3 + 5 * i) for i in range(8)]
        params.append(GREEDY.clone(temperature=0.8, seed=3))
        outputs = llm.generate([tiny.PROMPTS[i % 3] for i in range(9)], params, use_tqdm=False)
        for i, output in enumerate(outputs[:8]):
            assert output.outputs[0].token_ids == tiny.greedy(variant, i % 3)[: 3 + 5 * i]
        assert len(outputs[8].outputs[0].token_ids) == tiny.NEW_TOKENS


@pytest.mark.slow
def test_a_large_model_runs() -> None:
    shape = Path(__file__).parents[2] / "benchmarks" / "shapes" / "llama-8b"
    with LLM(
        str(shape), load_format="dummy", skip_tokenizer_init=True, tensor_parallel_size=2, max_model_len=2048,
        max_num_seqs=64,
    ) as llm:  # fmt: skip
        params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, detokenize=False)
        prompts = [[1 + i, 2, 3 + i] * 40 for i in range(40)]
        for _ in range(2):
            outputs = llm.generate(prompts, params, use_tqdm=False)
            assert [len(o.outputs[0].token_ids) for o in outputs] == [20] * 40
            assert all(0 <= token < 128256 for o in outputs for token in o.outputs[0].token_ids)
