"""Copies beside steps on pretended streams: whatever their pace, memory ends as if all went in order."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch

from octavo.step_messages import BlockCopies
from octavo.worker.copy_queue import CopyQueue
from tests.worker.fake_cuda import FakeCuda

BLOCKS, SLOTS = 6, 6
CPU = torch.device("cpu")


class Memory:
    """Blocks and slots of one number each, and a copier that moves them when its stream gets there."""

    name = "fake"

    def __init__(self, cuda: FakeCuda):
        self.cuda = cuda
        self.device, self.host = np.arange(BLOCKS), -np.ones(SLOTS, np.int64)

    def _give(self, to: np.ndarray, places: np.ndarray, source: np.ndarray, origins: np.ndarray) -> None:
        assert self.cuda.current_stream(CPU) is not self.cuda.compute
        for place, origin in zip(places.tolist(), origins.tolist(), strict=True):
            self.cuda.current_stream(CPU).give(lambda p=place, o=origin: to.__setitem__(p, source[o]))

    def out(self, blocks, slots):
        self._give(self.host, slots, self.device, blocks)

    def into(self, slots, blocks):
        self._give(self.device, blocks, self.host, slots)


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def copies(number, out=(), to=(), slots=(), into=(), **urgent) -> BlockCopies:
    return BlockCopies(number, ids(*out), ids(*to), ids(*slots), ids(*into), **urgent)


class Run:
    def __init__(self, seed: int = 0):
        self.cuda = FakeCuda(seed)
        self.memory = Memory(self.cuda)
        self.queue = CopyQueue(self.memory, self.memory, CPU, self.cuda)
        self.ended: list[int] = []
        self.failed: list[int] = []

    def step(self, work) -> None:
        self.cuda.compute.give(work)

    def poll(self) -> list[int]:
        done, failed = self.queue.poll()
        self.ended += done
        self.failed += failed
        return done

    def finish(self) -> None:
        limit = time.monotonic() + 10
        while self.queue.busy:
            assert time.monotonic() < limit
            if not self.cuda.advance():
                time.sleep(1e-4)  # the thread has not submitted yet
            self.poll()
        while self.cuda.advance():
            pass
        self.queue.close()


@pytest.mark.parametrize("seed", range(10))
def test_copies_out_follow_the_steps_before_and_urgent_ones_precede_the_next(seed):
    run = Run(seed)
    device, host = run.memory.device, run.memory.host
    run.step(lambda: device.__setitem__(0, 100))
    run.queue.launch(copies(0, out=(0, 1), to=(3, 4), urgent=True))
    run.step(lambda: device.__setitem__(slice(0, 2), 200))  # the blocks are in use again
    run.finish()
    assert host[3:5].tolist() == [100, 1] and device[:2].tolist() == [200, 200]
    assert run.ended == [0] and not run.failed


@pytest.mark.parametrize("seed", range(10))
def test_what_a_step_reads_is_there_before_it_if_urgent(seed):
    run = Run(seed)
    seen = []
    run.memory.host[2] = 55
    run.queue.launch(copies(7, slots=(2,), into=(4,), urgent_into=True))
    run.step(lambda: seen.append(int(run.memory.device[4])))
    run.finish()
    assert seen == [55] and run.ended == [7]


@pytest.mark.parametrize("seed", range(10))
def test_copies_in_follow_the_last_readers_of_their_blocks(seed):
    run = Run(seed)
    seen = []
    run.memory.host[2] = 55
    run.step(lambda: seen.append(int(run.memory.device[4])))
    run.queue.launch(copies(0, slots=(2,), into=(4,)))
    run.finish()
    assert seen == [4] and run.memory.device[4] == 55


def test_steps_do_not_wait_for_copies_that_are_not_urgent():
    run = Run()
    run.queue.launch(copies(0, out=(0,), to=(0,), slots=(1,), into=(1,)))
    done = []
    run.step(lambda: done.append(1))
    for stream in run.cuda._streams[1:]:
        stream.work.appendleft(run.cuda.Event())  # held up for good
    while run.cuda.advance():
        pass
    assert done == [1] and run.poll() == [] and run.queue.busy
    for stream in run.cuda._streams[1:]:
        stream.work.popleft()
    run.finish()
    assert run.ended == [0]


@pytest.mark.parametrize("seed", range(20))
def test_a_block_swaps_its_contents_in_one_message(seed):
    run = Run(seed)
    run.memory.host[5] = 55
    run.queue.launch(copies(0, out=(3,), to=(2,), slots=(5,), into=(3,), urgent=True))
    run.queue.launch(copies(1, slots=(2,), into=(0,)))  # what was copied out just now
    run.queue.launch(copies(2, out=(3, 0), to=(1, 0)))  # what was copied in just now
    run.finish()
    assert run.memory.host[[2, 1, 0]].tolist() == [3, 55, 3]
    assert run.memory.device[[3, 0]].tolist() == [55, 3]


def test_ends_are_told_in_the_order_they_come_and_once():
    run = Run()
    run.queue.launch(copies(0, out=(0,), to=(0,)))
    run.queue.launch(copies(1, slots=(1,), into=(1,)))
    run.queue._waiting.join()
    out_stream = run.cuda._streams[1]
    out_stream.work.appendleft(held := run.cuda.Event())
    while run.cuda.advance():
        pass
    assert run.poll() == [1] and run.poll() == []
    held.fired = True
    run.finish()
    assert run.ended == [1, 0] and not run.queue.busy


@pytest.mark.parametrize("seed", range(40))
def test_random_messages_end_as_if_run_one_by_one(seed):
    run = Run(seed)
    rng = np.random.default_rng(seed)
    device, host = run.memory.device.copy(), run.memory.host.copy()
    held: dict[int, set[int]] = {}  # blocks that nobody may touch yet
    for number in range(12):
        sizes = rng.integers(0, 4, 2)
        out, to = (rng.permutation(BLOCKS)[: sizes[0]] for _ in range(2))
        slots, into = (rng.permutation(BLOCKS)[: sizes[1]] for _ in range(2))
        host[to] = device[out]
        device[into] = host[slots]
        urgent_into = bool(rng.integers(2))
        run.queue.launch(copies(number, out, to, slots, into, urgent=True, urgent_into=urgent_into))
        if not urgent_into:
            held[number] = set(into.tolist())
        if rng.integers(2):
            value, free = 1000 * (number + 1), set(range(BLOCKS)).difference(*held.values())
            places = rng.permutation(np.array(sorted(free), np.int64))[:2]
            device[places] = value
            run.step(lambda v=value, p=places: run.memory.device.__setitem__(p, v))
        for _ in range(rng.integers(6)):
            run.cuda.advance()
        for ended in run.poll():
            held.pop(ended, None)
    run.finish()
    assert sorted(run.ended) == list(range(12))
    assert run.memory.device.tolist() == device.tolist() and run.memory.host.tolist() == host.tolist()


def test_copies_that_cannot_be_submitted_have_failed_and_hold_up_nothing(caplog):
    run = Run()
    run.memory.into = lambda *_: (_ for _ in ()).throw(RuntimeError("CUDA error 1"))
    run.queue.launch(copies(0, out=(0,), to=(0,), slots=(1,), into=(1,)))
    run.queue.launch(copies(1, slots=(1,), into=(2,), urgent_into=True))
    run.queue.launch(copies(2, out=(0,), to=(0,)))
    run.finish()
    assert run.failed == [0, 1] and run.ended == [2]
    assert "could not be copied" in caplog.text


def test_submission_does_not_hold_up_the_caller():
    run = Run()
    gate = threading.Event()
    plain = run.memory.out

    def slow(blocks, slots):
        assert gate.wait(10)
        plain(blocks, slots)

    run.memory.out = slow
    run.queue.launch(copies(0, out=(0,), to=(0,)))
    assert run.poll() == [] and run.queue.busy
    gate.set()
    run.finish()
    assert run.ended == [0]
