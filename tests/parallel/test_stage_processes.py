"""Pipeline stages as processes, over gloo: the tokens of one rank, and no process that is left."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from octavo import EngineDeadError
from tests import tiny
from tests.engine.test_llm_parity import expected, generate, make
from tests.parallel.test_ranks import await_end, ranks_of


@pytest.mark.parametrize(
    "variant, tensor, stages", [("llama-tied", 1, 2), ("gemma3", 2, 2), ("deepseek-v3", 1, 3)]
)
def test_stages_say_what_one_rank_says(variant, tensor, stages):
    settings = dict(tensor_parallel_size=tensor, pipeline_parallel_size=stages)
    with make(variant, **settings, max_num_batched_tokens=16, block_size=8) as llm:
        ranks = ranks_of()
        assert len(ranks) == tensor * stages
        assert generate(llm) == expected(variant)
        assert generate(llm, tiny.PROMPTS * 3) == expected(variant) * 3
        stats = llm.stats()
        assert 0 < stats.pipeline_stage_seconds < stats.pipeline_total_seconds
        assert 0 < stats.pipeline_bubble < 1
    assert not any(rank.is_running() for rank in ranks)


# The second rank of a stage does not take part in a sum.
WAITS_IN_VAIN = """
import sys, time, torch
from octavo.parallel.process_group import join_ranks

rank = int(sys.argv[1])
print("here", flush=True)
sys.stdin.readline()
group = join_ranks(rank, 2, 2, sys.argv[2], torch.device("cpu"), 5.0).tensor
if rank == 0:
    try:
        group.all_reduce(torch.ones(1))
    except RuntimeError:
        print("given up", flush=True)
sys.stdin.readline()
"""


def test_ranks_of_a_stage_wait_no_longer_than_they_may(tmp_path):
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", WAITS_IN_VAIN, str(rank), str(tmp_path / "rendezvous")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
        )
        for rank in range(4)
    ]  # fmt: skip
    timer = threading.Timer(60, ranks[0].kill)
    timer.start()
    try:
        assert [rank.stdout.readline() for rank in ranks] == ["here\n"] * 4
        for rank in ranks:
            rank.stdin.write("join\n")
        assert ranks[0].stdout.readline() == "given up\n"
    finally:
        timer.cancel()
        for rank in ranks:
            rank.kill()
            rank.communicate()


def test_a_stage_that_dies_ends_the_engine_which_names_it():
    with make("llama", pipeline_parallel_size=2) as llm:
        ranks = ranks_of()
        ranks[1].kill()
        with pytest.raises(EngineDeadError, match=rf"rank \d \(pid {ranks[1].pid}\) was ended by SIGKILL"):
            generate(llm)
    await_end(ranks)  # killed they are; a busy system takes its time
