"""The engine with blocks on disk: what a restart finds there; no fault of the disk changes a token."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from octavo import LLM, SamplingParams
from octavo.kv.groups import page_bytes
from octavo.messages import CoreStats
from octavo.worker import worker
from tests import tiny

GIB = 1 << 30
PARAMS = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, detokenize=False)
PROMPTS = [[7 + (i * j) % 200 for j in range(1, 60)] for i in range(1, 9)]


def make(**settings) -> LLM:
    values = dict(
        device="cpu", num_threads=1, dtype="float32", max_model_len=tiny.CONTEXT, max_num_seqs=4,
        skip_tokenizer_init=True, check_invariants=True,
    )  # fmt: skip
    return LLM(str(tiny.checkpoint("llama")), **(values | settings))


def generate(llm: LLM, prompt: dict) -> tuple[list[int], int]:
    """Greedy tokens, and how many of the prompt's were cached."""
    output = llm.generate([prompt], PARAMS, use_tqdm=False)[0]
    return output.outputs[0].token_ids, output.num_cached_tokens


@dataclass
class Plain:
    """What an engine without tiers says, and its bytes of a block."""

    tokens: list[list[int]]
    page: int

    def tiered(self, folder: Path) -> LLM:
        """An engine whose device and host together don't hold what all prompts need."""
        return make(
            kv_cache_memory_bytes=12 * self.page,
            swap_space=10 * self.page / GIB,
            kv_disk_path=str(folder),
            kv_disk_size=0.01,
        )

    def check(
        self, folder: Path, rounds: int = 1, before: Callable[[int], object] = lambda number: None
    ) -> CoreStats:
        """Generate everything in each round; the counters at the end."""
        with self.tiered(folder) as llm:
            for number in range(rounds):
                before(number)
                assert [generate(llm, {"prompt_token_ids": p})[0] for p in PROMPTS] == self.tokens
            return llm.stats()


@pytest.fixture(scope="module")
def plain() -> Plain:
    with make() as llm:
        tokens = [generate(llm, {"prompt_token_ids": p})[0] for p in PROMPTS]
        return Plain(tokens, page_bytes(llm.facts.groups))


@pytest.fixture(autouse=True)
def copying_is_worth_it(monkeypatch):
    """Whatever the rates of this machine."""
    monkeypatch.setattr(worker, "prefill_rate", lambda *_: 1e-3)


def files(folder: Path) -> list[Path]:
    return sorted(f for f in folder.rglob("*") if f.is_file())


def test_a_restart_finds_the_blocks_of_the_run_before(plain, tmp_path):
    first = plain.check(tmp_path)
    assert first.disk_blocks_out > 0 and first.disk_failures == 0
    again = plain.check(tmp_path)
    assert again.disk_blocks_in > 0 and again.disk_cache_hits > 0 and again.disk_failures == 0


def test_a_restart_finds_what_never_left_the_device(plain, tmp_path):
    settings = dict(swap_space=2 * plain.page / GIB, kv_disk_path=str(tmp_path), kv_disk_size=0.01)
    for cached in (False, True, True):
        with make(**settings) as llm:
            for prompt, tokens in zip(PROMPTS, plain.tokens, strict=True):
                found = generate(llm, {"prompt_token_ids": prompt})
                assert found[0] == tokens and bool(found[1]) == (cached and len(prompt) > 16)
            assert llm.stats().prefix_cache_evictions == 0


def test_damaged_blocks_are_dropped_recomputed_and_counted(plain, tmp_path):
    plain.check(tmp_path)
    for number, file in enumerate(files(tmp_path)):
        data = bytearray(file.read_bytes())
        data[(number * 977) % len(data)] ^= 64
        file.write_bytes(data if number % 2 else data[: len(data) // 2])
    stats = plain.check(tmp_path)
    assert stats.disk_failures > 0 and stats.disk_blocks_in == 0
    assert plain.check(tmp_path).disk_blocks_in > 0  # what was dropped was written again


def test_a_folder_that_vanishes_only_costs_time(plain, tmp_path):
    folder = tmp_path / "kv"

    def vanish(number: int) -> None:
        for _ in range(100):  # writers may still put blocks there
            if number and folder.exists():
                shutil.rmtree(folder, ignore_errors=True)
        assert not (number and folder.exists())

    stats = plain.check(folder, rounds=2, before=vanish)
    assert stats.disk_failures > 0


def test_a_disk_that_takes_nothing_only_costs_time(plain, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "writev", full)
    stats = plain.check(tmp_path)
    assert stats.disk_failures > 0 and stats.disk_blocks_out == 0 and not files(tmp_path)


def test_salted_prompts_do_not_share_blocks_on_disk(plain, tmp_path):
    plain.check(tmp_path)
    prompt = {"prompt_token_ids": PROMPTS[0]}
    with plain.tiered(tmp_path) as llm:
        for salt in ("a", "b"):
            assert generate(llm, prompt | {"cache_salt": salt}) == (plain.tokens[0], 0)
        tokens, cached = generate(llm, prompt)
        assert tokens == plain.tokens[0] and cached > 0
