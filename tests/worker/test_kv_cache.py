"""Caches of several groups in one memory, their number of blocks, and tables with gaps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from octavo.errors import ConfigError
from octavo.kv.format import KVFormat
from octavo.kv.groups import group_layers, page_bytes
from octavo.sampling_params import SamplingParams
from octavo.step_messages import Admission, BlockUpdate, StepPlan
from octavo.worker.input_batch import InputBatch
from octavo.worker.kv_cache import allocate_caches
from octavo.worker.memory import KVBudget, num_blocks

CPU = torch.device("cpu")
FORMAT = KVFormat("bfloat16", 4, 2, 8)


def test_layers_of_all_groups_share_the_memory_of_a_page():
    groups = group_layers([(window, FORMAT) for window in (9, 9, None, 9, 9, None, 9)])
    assert [group.layers for group in groups] == [(2, 5), (0, 1), (3, 4), (6,)]
    caches = allocate_caches(groups, 5, CPU)
    assert [tuple(cache.shape) for cache in caches] == [(5, 2, 2, 4, 8)] * 7
    assert {cache.dtype for cache in caches} == {torch.bfloat16}
    places = [cache.data_ptr() for cache in caches]
    assert places[2] == places[0] == places[3] == places[6]
    assert places[5] == places[1] == places[4]
    assert abs(places[5] - places[2]) >= caches[0].nbytes
    memory = {cache.untyped_storage().data_ptr(): cache.untyped_storage().nbytes() for cache in caches}
    assert sum(memory.values()) == 5 * page_bytes(groups)
    caches[4][3].fill_(1)  # block 3 of one layer is block 3 of those that share its buffer, and no other
    assert [float(cache.sum()) for cache in caches] == [0, 128, 0, 0, 128, 128, 0]
    assert float(caches[1][3].sum()) == 128


def test_formats_of_equal_bytes_have_their_own_shapes():
    other = replace(FORMAT, num_kv_heads=1, head_dim=16)
    caches = allocate_caches(group_layers([(None, FORMAT), (6, other)]), 3, CPU)
    assert [tuple(cache.shape) for cache in caches] == [(3, 2, 2, 4, 8), (3, 2, 1, 4, 16)]
    assert caches[0].data_ptr() == caches[1].data_ptr()


def test_a_budget_counts_pages():
    groups = group_layers([(window, FORMAT) for window in (9, 9, 9, None)])
    page = FORMAT.layer_block_bytes()
    assert num_blocks(KVBudget(10 * page + 1, "test"), groups, most=100) == 10
    assert num_blocks(KVBudget(10 * page, "test"), groups, most=7) == 7
    with pytest.raises(ConfigError, match=rf"{3 * page} bytes \(test\).*needs {page} and 4 groups") as caught:
        num_blocks(KVBudget(3 * page, "test"), groups, most=100)
    assert "\n" not in str(caught.value)


def test_entries_without_a_block_leave_the_device_table_as_it_is():
    groups = group_layers([(None, FORMAT), (6, FORMAT)])
    batch = InputBatch(2, 32, 16, groups, CPU)
    none = np.zeros(0, np.int32)

    def enter(slot: int, tables: list[list[int]], update: BlockUpdate) -> None:
        admission = Admission(
            slot, np.zeros(20, np.int32), 20, 16, tables, SamplingParams(), 0, [], []
        )  # fmt: skip
        batch.apply(
            StepPlan(
                step_id=0,
                admissions=[admission],
                block_updates=[BlockUpdate(none, none, none), update],
                slots=np.array([slot], np.int32),
                num_rows=np.array([1], np.int32),
                start=np.array([16], np.int32),
                samples=np.array([False]),
            )
        )

    enter(0, [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]], BlockUpdate(none, none, none))
    update = BlockUpdate(*np.array([[0], [5], [11]], np.int32))
    enter(0, [[12, 13, 14, 15, 16], [-1, -1, 17, 18, 19]], update)
    assert batch.block_tables[0][0].tolist()[:5] == [12, 13, 14, 15, 16]
    # Stale, but valid ids.
    assert batch.block_tables[1][0].tolist()[:6] == [6, 7, 17, 18, 19, 11]
    enter(1, [[1, 2, 3, 4, 5], [-1, -1, -1, -1, -1]], BlockUpdate(none, none, none))
    assert batch.block_tables[1][1].tolist()[:5] == [0] * 5
