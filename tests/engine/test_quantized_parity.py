"""Quantized checkpoints through the whole engine: the same tokens however a text is computed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.errors import ConfigError
from octavo.kv.capacity import request_blocks
from octavo.kv.groups import page_bytes
from octavo.quantization.capability import Hardware
from tests import tiny
from tests.quantization.checkpoints import AMPERE, FOLDER, HOPPER, changed, load, logits, pretend

PROMPTS = [[(i * i * 7 + seed * 31) % 120 + 5 for i in range(n)] for seed, n in enumerate((40, 19, 33, 5))]
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, detokenize=False)
CPU = Hardware("cpu", name="this CPU")
CASES = [
    (HOPPER, "w4a16_asym", "auto"),
    (HOPPER, "w4a16_asym", "int8"),
    (HOPPER, "fp8_dynamic", "auto"),
    (HOPPER, "fp8_static_kv", "fp8"),
    (HOPPER, "fp8_block", "auto"),
    (HOPPER, "w8a8", "auto"),
    (HOPPER, "gptq_desc_act", "auto"),
    (HOPPER, "mixed", "auto"),
    (HOPPER, "moe_w4a16", "auto"),
    (AMPERE, "fp8_block", "auto"),
    (CPU, "w4a16", "auto"),
    (CPU, "gptq_8bit", "int8"),
    (CPU, "moe_w4a16", "auto"),
]


def make(name: str, **settings: Any) -> LLM:
    values: dict[str, Any] = dict(
        model=str(FOLDER / name), dtype="float32", device="cpu", num_threads=1, max_model_len=64,
        skip_tokenizer_init=True, check_invariants=True, max_num_seqs=8, kv_cache_memory_bytes=2 << 20,
        block_size=8,
    )  # fmt: skip
    return LLM(**values | settings)


def generate(llm: LLM) -> list[list[int]]:
    return [o.outputs[0].token_ids for o in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


def use(hardware: Hardware, monkeypatch: pytest.MonkeyPatch) -> None:
    if hardware is not CPU:
        pretend(monkeypatch, hardware)


def check_chunks_hits_and_preemption(start: Callable[..., LLM]) -> list[list[int]]:
    """The same tokens whole, in chunks, with cached prefixes, and after preemption; returns them."""
    with start() as llm:
        want = generate(llm)
        groups = llm.facts.groups
    with start(max_num_batched_tokens=9) as llm:
        assert generate(llm) == want
        before = llm.stats().prefix_cache_hits
        assert generate(llm) == want
        assert llm.stats().prefix_cache_hits > before
    longest = max(map(len, PROMPTS)) + GREEDY.max_tokens
    blocks = request_blocks(groups, longest, 64) + 3
    few = dict(kv_cache_memory_bytes=blocks * page_bytes(groups), look_ahead_admission=False)
    with start(max_num_batched_tokens=64, **few) as llm:
        assert generate(llm) == want
        assert llm.stats().num_preemptions > 0
    return want


@pytest.mark.parametrize(
    ("hardware", "name", "kv_dtype"), CASES, ids=[f"{h.name}-{n}-{kv}".replace(" ", "") for h, n, kv in CASES]
)
def test_chunks_hits_and_preemption_change_nothing(
    hardware: Hardware, name: str, kv_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(hardware, monkeypatch)
    want = check_chunks_hits_and_preemption(lambda **more: make(name, kv_cache_dtype=kv_dtype, **more))
    assert len(set(map(tuple, want))) == len(PROMPTS)


@pytest.mark.parametrize(
    "name", ["w4a16", "w4a16_asym", "awq", "gptq_v2", "bnb_nf4_nested", "mixed", "moe_w4a16"]
)
def test_greedy_tokens_are_those_of_the_dequantized_weights(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = load(name, dequantize=True, max_model_len=64)
    pretend(monkeypatch, HOPPER)
    with make(name) as llm:
        found = generate(llm)
    for prompt, tokens in zip(PROMPTS, found, strict=True):
        scores = logits(plain, torch.tensor([*prompt, *tokens[:-1]]))[len(prompt) - 1 :]
        chosen = scores.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert float((scores.amax(1) - chosen).max()) < 1e-4  # a tie may fall either way


def test_the_log_says_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, AMPERE)
    with make("fp8_dynamic") as llm:
        kept = llm.facts.summary["weights"]
    assert kept.startswith("compressed-tensors: FP8_DYNAMIC as W8A16, since FP8 is multiplied from ")
    with make("w4a16") as llm:
        assert llm.facts.summary["weights"].startswith("compressed-tensors: W4A16 (")


DOWN, KEYS = "model.layers.0.mlp.down_proj", "model.layers.0.self_attn.k_proj"
NOT_HELD = (
    "1 of the matrices dequantized, since float16, which the kernels have scales in, does not hold theirs"
)


@pytest.mark.parametrize(
    ("name", "tensor", "change", "told"),
    [
        ("w8a8", f"{DOWN}.weight_scale", lambda t: t.view(-1)[:1].fill_(1e-9), f"W8A8; {NOT_HELD} ("),
        ("w4a16", f"{DOWN}.weight_scale", lambda t: t.view(-1)[:1].fill_(1e-9), f"columns; {NOT_HELD} ("),
        ("gptq_desc_act", f"{KEYS}.g_idx", lambda t: t.copy_(t.flip(0)), "columns in different orders ("),
    ],
    ids=["int8", "int4", "orders"],
)
def test_the_log_says_what_the_numbers_make_of_a_mode(
    name: str, tensor: str, change: Callable[[torch.Tensor], Any], told: str, tmp_path: Path
) -> None:
    """On a CPU, whose kernels have scales in float16, and one order of columns for what is one product."""
    with make(name) as llm:
        assert "of the matrices" not in llm.facts.summary["weights"]
    with make(str(changed(name, tmp_path / "model", lambda found: change(found[tensor])))) as llm:
        assert told in llm.facts.summary["weights"]


@pytest.mark.parametrize(("qtype", "plain"), [("Q8_0", False), ("F32", True)])
def test_the_log_says_how_much_of_a_gguf_file_is_no_encoding_that_is_kept(
    qtype: str, plain: bool, tmp_path: Path
) -> None:
    file = tiny.gguf_file("llama", tmp_path / "tiny.gguf", qtype)
    with LLM(str(file), device="cpu", max_model_len=64, kv_cache_memory_bytes=1 << 20) as llm:
        kept = llm.facts.summary["weights"]
    assert kept.startswith("as the GGUF file encodes them")
    assert (" of the matrices in float32" in kept) == plain


def test_strictly_kept_is_what_the_numbers_allow(tmp_path: Path) -> None:
    make("w8a8", quantization_strict=True).close()
    folder = changed("w8a8", tmp_path / "model", lambda found: found[f"{DOWN}.weight_scale"].fill_(1e-9))
    with pytest.raises(
        ConfigError, match="quantization_strict: 1 of the matrices would be dequantized, since"
    ):
        make(str(folder), quantization_strict=True)


def test_a_checkpoint_s_scales_for_the_kv_cache_are_used_without_being_asked_for() -> None:
    with make("fp8_static_kv", kv_cache_dtype="fp8") as llm:
        kept, want = llm.facts.summary["kv cache"], generate(llm)
    with make("fp8_static_kv") as llm:
        assert llm.facts.summary["kv cache"] == kept and kept.startswith("fp8, ")
        assert generate(llm) == want
    with make("fp8_static_kv", kv_cache_dtype="bfloat16") as llm:
        assert llm.facts.summary["kv cache"].startswith("bfloat16, ")
