"""Pipeline stages as processes, over gloo: the tokens of one rank, and no process that is left."""

from __future__ import annotations

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


def test_a_stage_that_dies_ends_the_engine_which_names_it():
    with make("llama", pipeline_parallel_size=2) as llm:
        ranks = ranks_of()
        ranks[1].kill()
        with pytest.raises(EngineDeadError, match=rf"rank \d \(pid {ranks[1].pid}\) was ended by SIGKILL"):
            generate(llm)
    await_end(ranks)  # killed they are; a busy system takes its time
