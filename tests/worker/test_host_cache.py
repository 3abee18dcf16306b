"""The host tier and the disk behind it on a CPU: every KV format, several groups, steps that only copy."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from octavo.config import EngineConfig
from octavo.errors import ConfigError, EngineDeadError
from octavo.kv.format import KVFormat
from octavo.kv.groups import group_layers, page_bytes
from octavo.sampling_params import SamplingParams
from octavo.step_messages import Admission, BlockCopies, BlockUpdate, StepPlan, StepResult
from octavo.worker import host_cache, host_memory, kv_tiers
from octavo.worker.host_cache import HostCache
from octavo.worker.kv_cache import allocate_caches
from octavo.worker.kv_tiers import KVTiers, prefill_rate

CPU = torch.device("cpu")
GIB = 1 << 30
PLAIN = KVFormat("float32", 8, 2, 8)
FORMATS = {
    "float32": PLAIN,
    "bfloat16": replace(PLAIN, dtype="bfloat16"),
    "fp8": replace(PLAIN, dtype="fp8"),
    "fp8_e5m2": replace(PLAIN, dtype="fp8_e5m2"),
    "int8": replace(PLAIN, dtype="int8"),
    "int8 with offsets": replace(PLAIN, dtype="int8", offset=True),
    "latent": replace(PLAIN, num_kv_heads=1, head_dim=12, latent=True),
}
WINDOWS = {"one group": (None,) * 3, "three groups": (4, 4, None, 4, 4, None, 4)}


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


NONE = ids()


def out(number: int, blocks, slots, **more) -> BlockCopies:
    return BlockCopies(number, ids(*blocks), ids(*slots), NONE, NONE, **more)


def into(number: int, slots, blocks, **more) -> BlockCopies:
    return BlockCopies(number, NONE, NONE, ids(*slots), ids(*blocks), **more)


def random_caches(groups, num_blocks: int) -> list[torch.Tensor]:
    caches = allocate_caches(groups, num_blocks, CPU)
    generator = torch.Generator().manual_seed(0)
    for cache in caches:  # those that share a buffer overwrite each other, as they do
        flat = cache.view(torch.uint8)
        flat.copy_(torch.randint(0, 256, flat.shape, generator=generator, dtype=torch.uint8))
    return caches


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("kind", FORMATS)
def test_blocks_return_to_another_place_bit_by_bit(kind, windows):
    groups = group_layers([(window, FORMATS[kind]) for window in WINDOWS[windows]])
    caches = random_caches(groups, 6)
    before = [cache.view(torch.uint8).clone() for cache in caches]
    host = HostCache(caches, 4 * page_bytes(groups) + 1)
    assert (host.num_slots, host.page_bytes) == (4, page_bytes(groups))
    # Finding the rates left the caches as they were.
    assert all(torch.equal(c.view(torch.uint8), b) for c, b in zip(caches, before, strict=True))
    host.launch(out(0, (5, 0), (3, 1)))
    assert host.busy and host.poll() == ([0], []) and not host.busy and host.poll() == ([], [])
    for cache in caches:
        cache.view(torch.uint8).fill_(255)  # NaN in every format but int8
    host.launch(into(1, (1, 3), (2, 4)))
    assert host.poll() == ([1], [])
    for cache, old in zip(caches, before, strict=True):
        now = cache.view(torch.uint8)
        assert torch.equal(now[2], old[0]) and torch.equal(now[4], old[5])
        assert all(bool((now[block] == 255).all()) for block in (0, 1, 3, 5))
    assert bytes(host.page(3)[:8]) == before[groups[0].layers[0]][5].numpy().tobytes()[:8]
    assert len(host.page(0)) == host.page_bytes
    with pytest.raises(IndexError):
        host.page(4)
    host.close()


def test_a_message_copies_out_before_it_copies_in():
    groups = group_layers([(None, PLAIN)] * 2)
    caches = random_caches(groups, 3)
    old = [cache.clone() for cache in caches]
    host = HostCache(caches, 2 * page_bytes(groups))
    host.launch(out(0, (0,), (1,)))
    host.launch(BlockCopies(1, ids(2), ids(0), ids(1), ids(2), urgent=True, urgent_into=True))
    host.launch(into(2, (0,), (0,)))
    assert host.poll() == ([0, 1, 2], [])
    for cache, before in zip(caches, old, strict=True):
        assert torch.equal(cache[2].view(torch.uint8), before[0].view(torch.uint8))
        assert torch.equal(cache[0].view(torch.uint8), before[2].view(torch.uint8))


def test_rates_are_measured_quickly():
    groups = group_layers([(None, replace(PLAIN, head_dim=128))] * 8)
    caches = random_caches(groups, 40)
    begin = time.perf_counter()
    host = HostCache(caches, 100 * page_bytes(groups))
    seconds = time.perf_counter() - begin
    assert seconds < 2  # 50 ms on an idle machine
    assert 1e6 < host.rate_out < 1e13 and 1e6 < host.rate_into < 1e13
    assert "100 blocks" in host.describe() and "GB/s out and" in host.describe()


def test_a_quicker_way_is_taken_only_if_it_is_worth_it():
    ways = ["engines", "kernel"]
    assert host_cache._choose(ways, [50.0, 60.0]) == ("engines", 50.0)
    assert host_cache._choose(ways, [5.0, 50.0]) == ("kernel", 50.0)
    assert host_cache._choose(ways, [50.0, 5.0]) == ("engines", 50.0)


def test_more_swap_than_is_free_is_refused_in_one_line(monkeypatch):
    groups = group_layers([(None, PLAIN)])
    caches = random_caches(groups, 3)
    with pytest.raises(ConfigError, match=r"swap_space=1\.04858e\+06 GiB is more host memory") as caught:
        HostCache(caches, 1 << 50)
    assert "\n" not in str(caught.value)
    memory = replace(host_memory.detect_memory(), available=10 * page_bytes(groups))
    monkeypatch.setattr(host_memory, "detect_memory", lambda: memory)
    HostCache(caches, 7 * page_bytes(groups)).close()
    with pytest.raises(ConfigError, match=f"{7 * page_bytes(groups)} free"):  # the CPU's KV cache counts
        HostCache(caches, 8 * page_bytes(groups))
    # So do those of other ranks, and their host tiers.
    agreed: list[int] = []
    ranks = dict(ranks=2, agree=lambda value: agreed.append(value) or value)
    HostCache(caches, 2 * page_bytes(groups), **ranks).close()
    with pytest.raises(ConfigError, match=f"asked by each of 2 ranks, {4 * page_bytes(groups)} free"):
        HostCache(caches, 3 * page_bytes(groups), **ranks)
    assert agreed == 2 * [4 * page_bytes(groups)]


def test_less_swap_than_a_block_is_refused():
    groups = group_layers([(None, PLAIN)])
    with pytest.raises(ConfigError, match="less than a block of 1024 bytes"):
        HostCache(random_caches(groups, 3), 1023)


# ---- steps that copy ----------------------------------------------------------------------------


class Step:
    """What a runner launched: its result is that of the plan's number."""

    def __init__(self, plan: StepPlan):
        self.plan = plan

    def wait(self) -> StepResult:
        n = len(self.plan.slots)
        return StepResult(np.full((n, 1), self.plan.step_id, np.int32), np.ones(n, np.int32))


def plan(number: int, rows: int, *copies: BlockCopies, admissions=(), updates=0) -> StepPlan:
    return StepPlan(
        step_id=number,
        admissions=list(admissions),
        block_updates=[BlockUpdate(*[np.zeros(updates, np.int32)] * 3)],
        slots=np.arange(rows, dtype=np.int32),
        num_rows=np.ones(rows, np.int32),
        start=np.zeros(rows, np.int32),
        samples=np.ones(rows, bool),
        copies=list(copies),
    )


@pytest.fixture
def tiers(tmp_path):
    groups = group_layers([(None, PLAIN)] * 2)
    settings = {
        "kv_disk_path": str(tmp_path / "kv"),
        "kv_disk_size": 64 * page_bytes(groups) / GIB,
        "swap_space": 8 * page_bytes(groups) / GIB,
    }
    made = KVTiers(EngineConfig(**settings), random_caches(groups, 8))
    made.open_store(b"r" * 32)
    yield made
    made.close()


def test_results_of_steps_and_copies_come_in_order_and_tell_each_number_once(tiers):
    launched = [
        tiers.execute(plan(0, 2, out(0, (1,), (0,))), Step),
        tiers.execute(plan(1, 0, out(1, (2,), (1,)), out(2, (3,), (2,))), Step),
        tiers.execute(plan(2, 1), Step),
    ]
    results = [step.wait() for step in launched]
    assert [r.tokens.tolist() for r in results] == [[[0], [0]], [], [[2]]]
    assert [r.copies_done for r in results] == [[0, 1, 2], [], []]
    assert all(r.copies_failed == [] for r in results)


def test_copies_of_a_step_that_failed_are_told_by_a_later_one(tiers):
    def fail(_):
        raise torch.OutOfMemoryError("no memory")

    with pytest.raises(torch.OutOfMemoryError):
        tiers.execute(plan(0, 1, out(0, (1,), (0,), urgent=True)), fail)
    assert tiers.execute(plan(1, 0), Step).wait().copies_done == [0]


def test_a_step_without_rows_enters_nothing_into_the_tables(tiers):
    admission = Admission(0, np.zeros(1, np.int32), 1, 0, [[0]], SamplingParams(), 0, [], [])
    for bad in (plan(3, 0, admissions=[admission]), plan(3, 0, updates=1)):
        with pytest.raises(ValueError, match="step 3"):
            tiers.execute(bad, Step)


class SlowHost:
    """Copies that are through after some looks."""

    def __init__(self, looks: int):
        self.looks = looks

    @property
    def busy(self) -> bool:
        return self.looks > 0

    def launch(self, copies: BlockCopies) -> None:
        pass

    def poll(self) -> tuple[list[int], list[int]]:
        self.looks -= 1
        return ([5], []) if self.looks == 0 else ([], [])

    def close(self) -> None:
        pass


@pytest.mark.parametrize("with_store", [False, True])
def test_a_step_of_copies_alone_waits_for_news_but_not_forever(tiers, with_store, monkeypatch):
    real = tiers.host
    if not with_store:
        tiers.store.close()
        tiers.store = None
    tiers.host = SlowHost(4)
    with monkeypatch.context() as patience:
        patience.setattr(kv_tiers, "_LONGEST_WAIT", 10.0)
        assert tiers.execute(plan(0, 0), Step).wait().copies_done == [5]
    tiers.host = SlowHost(10**9)
    begin = time.monotonic()
    assert tiers.execute(plan(1, 0), Step).wait().copies_done == []
    assert 0.005 < time.monotonic() - begin < 1
    tiers.host = real


def test_news_of_the_disk_end_a_wait(tiers):
    ticket = tiers.store.write(0, b"k" * 32, 0)
    for number in range(1000):
        tiers.execute(plan(number, 0), Step).wait()
        if ended := tiers.store.poll():
            break
    assert ended == [(ticket, True)]


def test_a_block_goes_through_all_tiers_and_back(tiers, tmp_path):
    caches = random_caches(group_layers([(None, PLAIN)] * 2), 8)
    host, store = HostCache(caches, 4 * tiers.host.page_bytes), tiers.store
    store._page = host.page
    old = [cache[3].view(torch.uint8).clone() for cache in caches]
    host.launch(out(0, (3,), (2,)))
    store.write(1, b"k" * 32, 2)
    while not store.poll():
        store.wait(1)
    host.slots.fill_(255)
    assert store.contains(1, b"k" * 32)
    store.read(1, b"k" * 32, 0)
    while not (ended := store.poll()):
        store.wait(1)
    assert ended[0][1]
    host.launch(into(1, (0,), (6,)))
    assert all(torch.equal(c[6].view(torch.uint8), o) for c, o in zip(caches, old, strict=True))
    assert set(tiers.describe()) == {"host tier", "disk tier"}


def test_a_device_that_died_is_told_so(tiers):
    class Dead(SlowHost):
        def poll(self):
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    real, tiers.host = tiers.host, Dead(1)
    for rows in (0, 1):
        with pytest.raises(EngineDeadError, match="illegal memory access"):
            tiers.execute(plan(0, rows), Step).wait()
    tiers.host = real


def test_the_rate_of_prefill_is_that_of_a_run_without_the_first_ones_cost():
    pauses = [0.2, 0.02]

    def execute(step: StepPlan) -> Step:
        time.sleep(pauses.pop(0))
        return Step(step)

    assert 10 / 0.2 < prefill_rate(execute, plan(0, 10), enough=9) < 10 / 0.02 and not pauses
    pauses = [0.05, 0.05]
    assert prefill_rate(execute, plan(0, 10), enough=0.01) < 10 / 0.05
    assert len(pauses) == 1
