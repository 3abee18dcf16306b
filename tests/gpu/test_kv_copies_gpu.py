"""Host and disk tier on a GPU: ways to copy, order against steps, rates, an engine that swaps.

`pytest tests/gpu/test_kv_copies_gpu.py -s` prints the rates.
"""

# Without a device nothing may be imported that defines kernels (tests/kernels interprets them).
# ruff: noqa: E402

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

from octavo import LLM, SamplingParams
from octavo.errors import ConfigError
from octavo.kernels.block_copy import PlainBlockCopier
from octavo.kernels.cuda_block_copy import BatchedBlockCopier, driver_call
from octavo.kernels.triton.block_copy import KernelBlockCopier
from octavo.kv.format import KVFormat
from octavo.kv.groups import group_layers, page_bytes
from octavo.step_messages import BlockCopies
from octavo.worker.host_cache import HostCache
from octavo.worker.host_memory import HostMemory
from octavo.worker.kv_cache import allocate_caches
from tests import tiny
from tests.kernels.block_copy_cases import SHAPES, check

DEVICE = torch.device("cuda")
CYCLES = 100_000_000  # some 50 ms


def batched(buffers, host) -> BatchedBlockCopier:
    call = driver_call()
    if call is None:
        pytest.skip("the driver is older than CUDA 12.8")
    return BatchedBlockCopier(buffers, host, call, lambda: torch.cuda.current_stream().cuda_stream)


WAYS = {"plain": PlainBlockCopier, "kernel": KernelBlockCopier, "copy engines": batched}


def registered(host: torch.Tensor) -> torch.Tensor:
    """Its contents in memory as the host tier has it."""
    memory = HostMemory(host.numel(), DEVICE)
    KEPT.append(memory)
    return memory.tensor.view(host.shape).copy_(host)


KEPT: list[HostMemory] = []


@pytest.mark.parametrize("pin", [torch.Tensor.pin_memory, registered], ids=["pinned", "registered"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shape", [*SHAPES, (32, 65536, 80, 90, 70)])
def test_every_way_copies_what_it_should(way, shape, pin):
    with torch.cuda.stream(torch.cuda.Stream()):
        check(WAYS[way], shape, "cuda", torch.cuda.synchronize, pin)


def make_cache(dtype: str = "bfloat16", layers: int = 4, blocks: int = 64, slots: int = 64, **more):
    groups = group_layers([(None, KVFormat(dtype, 16, 8, 128, **more))] * layers)
    caches = allocate_caches(groups, blocks, DEVICE)
    return caches, HostCache(caches, slots * page_bytes(groups))


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


NONE = ids()


def finish(host: HostCache, *numbers: int) -> None:
    ended: list[int] = []
    limit = time.monotonic() + 30
    while sorted(ended) != sorted(numbers):
        assert time.monotonic() < limit
        done, failed = host.poll()
        assert not failed
        ended += done
    assert not host.busy


@pytest.mark.parametrize(
    "fmt", [("float32",), ("bfloat16",), ("fp8",), ("fp8_e5m2",), ("int8",), ("int8", "offset")]
)
def test_blocks_of_every_format_return_bit_by_bit(fmt):
    groups = group_layers(
        [(window, KVFormat(fmt[0], 16, 3, 64, offset=len(fmt) > 1)) for window in (64, 64, None, 64)]
    )
    caches = allocate_caches(groups, 9, DEVICE)
    for cache in caches:
        cache.view(torch.uint8).random_(0, 256)
    before = [cache.view(torch.uint8).clone() for cache in caches]
    host = HostCache(caches, 5 * page_bytes(groups))
    host.launch(BlockCopies(0, ids(8, 0, 3), ids(4, 0, 2), NONE, NONE))
    finish(host, 0)
    for cache in caches:
        cache.view(torch.uint8).fill_(255)
    host.launch(BlockCopies(1, NONE, NONE, ids(4, 2, 0), ids(1, 5, 7)))
    finish(host, 1)
    for cache, old in zip(caches, before, strict=True):
        now = cache.view(torch.uint8)
        assert all(torch.equal(now[a], old[b]) for a, b in ((1, 8), (5, 3), (7, 0)))
        assert bool((now[[0, 2, 3, 4, 6, 8]] == 255).all())
    host.close()


def test_urgent_copies_out_precede_the_steps_that_reuse_their_blocks():
    caches, host = make_cache()
    for round_ in range(3):
        torch.cuda._sleep(CYCLES)
        for cache in caches:
            cache[:32].fill_(round_ + 1)  # written late
        blocks = np.arange(32, dtype=np.int32)
        host.launch(BlockCopies(round_, blocks, blocks[::-1].copy(), NONE, NONE, urgent=True))
        for cache in caches:
            cache[:32].fill_(float("nan"))
        finish(host, round_)
        values = host.slots.view(torch.bfloat16)
        assert bool((values[:32] == round_ + 1).all())
    host.close()


def test_urgent_copies_in_precede_the_steps_that_read_them():
    caches, host = make_cache()
    for cache in caches:
        cache.fill_(float("nan"))
    host.slots.view(torch.bfloat16).fill_(5)
    slots = np.arange(48, dtype=np.int32)
    host.launch(BlockCopies(0, NONE, NONE, slots, slots, urgent_into=True))
    seen = torch.stack([cache[:48] for cache in caches])
    assert bool((seen == 5).all())
    finish(host, 0)
    host.close()


def test_copies_in_follow_the_last_readers_and_no_step_waits_for_them():
    caches, host = make_cache()
    for cache in caches:
        cache.fill_(1)
    host.slots.view(torch.bfloat16).fill_(5)
    torch.cuda._sleep(CYCLES)
    seen = torch.stack([cache[:8] for cache in caches])
    host.launch(BlockCopies(0, NONE, NONE, np.arange(8, dtype=np.int32), np.arange(8, dtype=np.int32)))
    assert host.poll() == ([], [])
    finish(host, 0)
    assert bool((seen == 1).all()) and all(bool((cache[:8] == 5).all()) for cache in caches)
    host.close()


def test_random_messages_end_as_if_run_one_by_one():
    blocks = slots = 12
    caches, host = make_cache(layers=3, blocks=blocks, slots=slots)
    rng = np.random.default_rng(0)
    for block in range(blocks):
        for cache in caches:
            cache[block].fill_(block)
    host.slots.view(torch.bfloat16).fill_(99)
    device, memory = np.arange(blocks, dtype=np.float32), np.full(slots, 99, np.float32)
    for number in range(200):
        sizes = rng.integers(0, 6, 2)
        out, to = (rng.permutation(blocks)[: sizes[0]].astype(np.int32) for _ in range(2))
        source, into = (rng.permutation(blocks)[: sizes[1]].astype(np.int32) for _ in range(2))
        memory[to] = device[out]
        device[into] = memory[source]
        host.launch(BlockCopies(number, out, to, source, into, urgent=True, urgent_into=True))
        value, place = float(rng.integers(256)), int(rng.integers(blocks))
        device[place] = value
        if number % 7 == 0:
            torch.cuda._sleep(CYCLES // 100)
        for cache in caches:
            cache[place].fill_(value)
    finish(host, *range(200))
    torch.cuda.synchronize()
    for layer, cache in enumerate(caches):
        assert all(bool((cache[b] == device[b]).all()) for b in range(blocks))
        kept = host.slots[:, layer].view(torch.bfloat16)
        assert all(bool((kept[s] == memory[s]).all()) for s in range(slots))
    host.close()


def test_rates_are_those_of_the_bus(capsys):
    caches, host = make_cache(layers=32, blocks=256, slots=256)
    size = 256 << 20
    pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    large = torch.zeros(size, dtype=torch.uint8, device=DEVICE)
    rates = []
    for to, source in ((pinned, large), (large, pinned)):
        to.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        to.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        rates.append(size / (time.perf_counter() - begin))
    with capsys.disabled():
        print(f"\nhost tier: {host.describe()}; bus {rates[0] / 1e9:.1f} GB/s out, {rates[1] / 1e9:.1f} in")
    # Less than the bus could do, so that steps go on beside the copies; other work of the host's shows, too.
    assert host.rate_out >= 0.6 * rates[0] and host.rate_into >= 0.6 * rates[1]
    host.close()


def test_more_swap_than_the_machine_has_is_refused():
    caches = allocate_caches(group_layers([(None, KVFormat("bfloat16", 16, 8, 128))]), 8, DEVICE)
    with pytest.raises(ConfigError, match="swap_space=.*more host memory than is free"):
        HostCache(caches, 1 << 50)


def likelihood(llm: LLM, prompts: list[list[int]], answers: list[list[int]]) -> float:
    """Mean log-probability of the answers' tokens."""
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    texts = [{"prompt_token_ids": p + a} for p, a in zip(prompts, answers, strict=True)]
    found = []
    for prompt, text, output in zip(prompts, texts, llm.generate(texts, params, use_tqdm=False), strict=True):
        ids = text["prompt_token_ids"]
        found += [output.prompt_logprobs[i][ids[i]].logprob for i in range(len(prompt), len(ids))]
    return sum(found) / len(found)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8", "int8"])
def test_an_engine_that_swaps_says_the_same(kv_cache_dtype, tmp_path):
    """Greedy tokens with few blocks and the host tier are those with many and none; over int8, whose products
    are rounded to 16 bits, and otherwise in other company, tokens may part where two are about as likely."""
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True, detokenize=False)
    prompts = [[7 + (i * j) % 200 for j in range(1, 60)] for i in range(1, 17)]
    settings = dict(
        device="cuda", dtype="float32", max_model_len=tiny.CONTEXT, skip_tokenizer_init=True,
        max_num_seqs=16, check_invariants=True, kv_cache_dtype=kv_cache_dtype,
    )  # fmt: skip
    outputs: list[list[list[int]]] = []

    def answer(llm: LLM) -> None:
        for _ in range(2):  # again with what is cached
            got = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
            outputs.append([list(o.outputs[0].token_ids) for o in got])

    model = str(tiny.checkpoint("llama"))
    with LLM(model, kv_cache_memory_bytes=64 << 20, **settings) as plain:
        page = page_bytes(plain.facts.groups)
        answer(plain)
        with LLM(model, kv_cache_memory_bytes=40 * page, swap_space=0.05, **settings) as llm:
            answer(llm)
            stats = llm.stats()
        if kv_cache_dtype == "int8":
            own, *others = (likelihood(plain, prompts, answers) for answers in outputs)
            assert all(other > own - 0.02 for other in others), (own, others)
        else:
            assert all(each == outputs[0] for each in outputs)
    assert stats.host_blocks_out > 0  # whether any comes back is for the rates to decide
