"""An engine on a GPU sleeps: memory falls and is taken again, and what it computes is the same after that."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.errors import EngineAsleepError

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

from octavo.worker.graphs import DecodeGraphs  # noqa: E402 (defines kernels)

PROMPT = [(7 * i) % 1000 + 5 for i in range(150)]
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, detokenize=False, logprobs=0)
SLACK = 64 << 20  # what PyTorch's allocator keeps of segments that something small still lies in
FORMATS = {
    "bfloat16": {},
    "fp8": {"quantization": "fp8", "kv_cache_dtype": "fp8"},
    "int4": {"quantization": "int4_weight_only", "kv_cache_dtype": "int8"},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3 of 500 MB, whose head shares the embedding's weights."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=64000, hidden_size=1024, intermediate_size=3072, num_hidden_layers=12,
        num_attention_heads=16, num_key_value_heads=8, head_dim=128, max_position_embeddings=4096,
        tie_word_embeddings=True, initializer_range=0.05,
    )  # fmt: skip
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("sleeper")
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """How decode steps ran: "recorded" or "replayed"."""
    found: list[str] = []
    run = DecodeGraphs.run

    def note(self: DecodeGraphs, inputs: Any) -> Any:
        before = len(self._graphs)
        out = run(self, inputs)
        found.append("replayed" if len(self._graphs) == before else "recorded")
        return out

    monkeypatch.setattr(DecodeGraphs, "run", note)
    return found


@pytest.fixture(params=FORMATS)
def llm(request: pytest.FixtureRequest, checkpoint: Path) -> Iterator[LLM]:
    with LLM(
        str(checkpoint), device="cuda", skip_tokenizer_init=True, check_invariants=True, max_model_len=2048,
        max_num_seqs=8, max_num_batched_tokens=256, kv_cache_memory_bytes=512 << 20, **FORMATS[request.param],
    ) as engine:  # fmt: skip
        yield engine


def run(llm: LLM) -> tuple[list[int], list[float], int]:
    """Tokens, their logprobs, and how many tokens of the prompt were cached."""
    [output] = llm.generate(PROMPT, GREEDY, use_tqdm=False)
    choice = output.outputs[0]
    assert choice.logprobs is not None
    scores = [step[token].logprob for token, step in zip(choice.token_ids, choice.logprobs, strict=True)]
    return choice.token_ids, scores, output.num_cached_tokens


def free_bytes() -> int:
    """Device memory that this process doesn't hold, but for a constant: other processes' comes and goes."""
    torch.cuda.synchronize()
    return -torch.cuda.memory_reserved()


def test_memory_falls_and_tokens_stay(llm: LLM, decoded: list[str]) -> None:
    """Twice at each level, so that what is lost each time would show."""
    want, scores, cached = run(llm)
    assert cached == 0 and run(llm)[2] == 144 and len(set(want)) > 1
    assert decoded.count("recorded") == 1
    held = llm.facts.memory["weights"] + llm.facts.memory["kv_cache"]
    assert held > 400 << 20  # far above the slack
    allocated = torch.cuda.memory_allocated()
    for level in (1, 2, 2, 1):
        before = free_bytes()
        status = llm.sleep(level)
        asleep = free_bytes()
        print(f"level {level}: {asleep - before >> 20} MiB fell, {status.freed_bytes >> 20} were told")
        assert status.freed_bytes == pytest.approx(held, rel=0.05)
        assert asleep - before >= status.freed_bytes - SLACK
        with pytest.raises(EngineAsleepError):
            run(llm)
        assert llm.wake_up().level == 0
        assert asleep - free_bytes() >= held - SLACK
        decoded.clear()
        tokens, again, cached = run(llm)
        assert tokens == want and again == pytest.approx(scores, abs=1e-3) and cached == 0
        # The old graphs read memory that is gone: none of them is replayed.
        assert decoded[0] == "recorded" and decoded.count("replayed") == len(decoded) - 1 > 30
        assert run(llm)[2] == 144
        assert torch.cuda.memory_allocated() <= allocated + (8 << 20)  # nothing of before is still there
