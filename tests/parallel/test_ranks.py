"""Ranks as processes: the same tokens, one ledger each, and nothing left when the engine is closed."""

from __future__ import annotations

import os
from types import SimpleNamespace

import psutil
import pytest

from octavo import LLM, EngineDeadError, SamplingParams
from octavo.config import EngineConfig
from octavo.engine import rank_processes
from octavo.errors import ConfigError
from octavo.eval.prompt_engine import PromptEngine
from tests import tiny
from tests.engine.closeness import bfloat16_errors
from tests.engine.test_embed import encoder
from tests.engine.test_llm_parity import expected, generate, make
from tests.quantization.checkpoints import changed


def ranks_of(process: int | None = None) -> list[psutil.Process]:
    """The living ranks under a process."""
    children = psutil.Process(process or os.getpid()).children(recursive=True)
    living = [child for child in children if child.status() != psutil.STATUS_ZOMBIE]
    return [child for child in living if "octavo.parallel.rank" in child.cmdline()]


def await_end(processes: list[psutil.Process], seconds: float = 10.0) -> None:
    """All of them have ended, or will soon."""
    _, living = psutil.wait_procs(processes, timeout=seconds)
    assert not [p for p in living if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def test_two_ranks_say_what_one_says_and_leave_nothing(tmp_path, monkeypatch):
    tiny.checkpoint("llama")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "none"))  # nobody needs a folder
    shared = set(os.listdir("/dev/shm"))
    with make("llama", tensor_parallel_size=2) as llm:
        ranks = ranks_of()
        assert len(ranks) == 2
        assert generate(llm) == expected("llama")
        before = llm.stats().prefix_cache_hits
        assert generate(llm) == expected("llama")
        assert llm.stats().prefix_cache_hits > before
        seeded = SamplingParams(temperature=0.9, seed=5, max_tokens=20, logprobs=3, detokenize=False)
        sampled = llm.generate(tiny.PROMPTS, seeded, use_tqdm=False)
        # One ledger each, whose weights are a part of the model's.
        weights = [memory["weights"] for memory in llm.facts.rank_memory]
        assert len(weights) == 2 and weights[0] == weights[1]
    assert not any(rank.is_running() for rank in ranks)
    assert set(os.listdir("/dev/shm")) <= shared
    with make("llama") as llm:
        assert llm.facts.rank_memory == []
        assert weights[0] < llm.facts.memory["weights"] < 2 * weights[0]
        alone = llm.generate(tiny.PROMPTS, seeded, use_tqdm=False)
    for output, other in zip(sampled, alone, strict=True):
        assert output.outputs[0].token_ids == other.outputs[0].token_ids
        for told, want in zip(output.outputs[0].logprobs, other.outputs[0].logprobs, strict=True):
            assert told.keys() == want.keys()
            assert all(abs(told[t].logprob - want[t].logprob) < 1e-4 for t in told)


def test_what_another_rank_makes_of_its_weights_is_told(tmp_path):
    """A scale that the kernels don't take, in rows that are the second rank's."""
    up = "model.layers.0.mlp.up_proj.weight_scale"
    folder = changed("w8a8", tmp_path / "model", lambda found: found[up].view(-1)[-1:].fill_(1e-9))
    settings = dict(model=str(folder), max_model_len=64, tensor_parallel_size=2)
    with make("llama", **settings) as llm:
        first, others = llm.facts.summary["weights"].split("; other ranks: ")
        assert "dequantized" not in first and "W8A8; 1 of the matrices dequantized, since float16" in others
        assert len(generate(llm, [[5, 6, 7]])[0]) > 1
    with pytest.raises(ConfigError, match="quantization_strict: 1 of the matrices would be dequantized"):
        make("llama", quantization_strict=True, **settings)


def test_what_a_rank_cannot_do_is_told_as_by_one():
    with pytest.raises(ConfigError, match="num_attention_heads=4 .* tensor_parallel_size=3"):
        make("llama", tensor_parallel_size=3)
    assert not ranks_of()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (dict(distributed_executor_backend="uni"), "leave distributed_executor_backend='uni' out"),
        (dict(device="cuda:1"), "CUDA_VISIBLE_DEVICES"),
        (
            dict(kv_disk_path="/tmp/kv", kv_disk_size=1, swap_space=1),
            "kv_disk_path does not work with tensor_parallel_size=2",
        ),
    ],
)
def test_what_ranks_cannot_do_is_refused_by_name(settings, words):
    with pytest.raises(ConfigError, match=words):
        make("llama", tensor_parallel_size=2, **settings)


def test_ranks_need_linux(monkeypatch):
    monkeypatch.setattr(rank_processes, "sys", SimpleNamespace(platform="darwin"))
    with pytest.raises(ConfigError, match="2 ranks, each in a process of its own, need Linux: use one rank"):
        make("llama", tensor_parallel_size=2)


def test_a_rank_that_dies_ends_the_engine_which_names_it():
    with make("llama", tensor_parallel_size=2) as llm:
        ranks = ranks_of()
        ranks[1].kill()
        with pytest.raises(EngineDeadError, match=rf"rank \d \(pid {ranks[1].pid}\) was ended by SIGKILL"):
            generate(llm)
    await_end(ranks)


def test_bfloat16_is_about_as_close_as_transformers():
    with make("llama", dtype="bfloat16", tensor_parallel_size=2) as llm:
        rms, rms_theirs = bfloat16_errors(llm, "llama", "cpu")
    assert 1e-4 < rms <= 2 * rms_theirs


def test_encoders_and_evaluation_are_refused():
    with pytest.raises(ConfigError, match=r"is an encoder \(BertModel\), which runs on one rank"):
        LLM(str(encoder("Bert")[1]), device="cpu", tensor_parallel_size=2, skip_tokenizer_init=True)
    config = EngineConfig(
        str(tiny.checkpoint("llama")), device="cpu", tensor_parallel_size=2, enable_prefix_caching=False,
        enforce_eager=True,
    )  # fmt: skip
    with pytest.raises(ConfigError, match="tensor_parallel_size=2 .* octavo eval runs on one rank"):
        PromptEngine(config)
