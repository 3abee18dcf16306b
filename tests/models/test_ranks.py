"""Every family on 2, 3 and 4 tensor-parallel ranks against Transformers in float32, whole experts too."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.errors import ConfigError
from octavo.models.loader import load_model_config
from octavo.models.loading import build_model
from octavo.models.locate import find_model
from octavo.models.registry import ARCHITECTURES
from octavo.parallel.state import TensorParallelGroup, use_group
from tests import tiny
from tests.models.paged import PagedRun
from tests.models.parity import TOLERANCE, read
from tests.parallel.threads import on_ranks

DENSE = [
    "llama-biases", "mistral-window", "qwen2-tied", "qwen3", "phi3-longrope", "gemma2", "gemma3", "granite",
    "olmo2", "olmo3", "stablelm-biases", "stablelm-parallel",
]  # fmt: skip
SPARSE = [
    "mixtral", "qwen2-moe", "qwen3-moe", "olmoe", "deepseek-v2-lite", "deepseek-v2", "deepseek-v3",
]  # fmt: skip
# Sizes that 3 divides; on so many ranks 384 tokens are not padded, which 385 are.
_THREE = {"hidden_size": 96, "num_attention_heads": 6, "vocab_size": 385}
_EXPERTS_OF_THREE = {"moe_intermediate_size": 48, "shared_expert_intermediate_size": 48}


pytestmark = pytest.mark.usefixtures("one_thread")


@functools.cache
def _for_three(variant: str) -> tuple[Any, Path]:
    """A variant with sizes that 3 divides: Transformers' model, and its folder."""
    own = tiny.VARIANTS[variant][1]
    grouped = own.get("num_key_value_heads", 2) == 2
    changes = {**_THREE, "num_key_value_heads": 3 if grouped else 6}
    changes |= {key: size for key, size in _EXPERTS_OF_THREE.items() if key in own}
    model = tiny.build(variant, **changes)
    folder = tiny.root() / f"{variant}-for-three"
    model.save_pretrained(folder)
    return model, folder


def _hold_to_transformers(variant: str, size: int, expert_parallel: bool) -> None:
    prompts = tiny.PROMPTS[:2]
    if size == 3:
        reference, folder = _for_three(variant)
    else:
        reference, folder = tiny.reference(variant), tiny.checkpoint(variant)
    with torch.no_grad():
        want = [reference(torch.tensor([prompt])).logits[0] for prompt in prompts]

    def rank(group: TensorParallelGroup) -> list[torch.Tensor]:
        with use_group(group):
            model = read(folder, expert_parallel=expert_parallel)
        return PagedRun(model, len(prompts), 48).prompts(prompts, 9)

    for result in on_ranks(size, rank):
        for ours, theirs in zip(result, want, strict=True):
            assert (ours - theirs).abs().max() < TOLERANCE
            assert theirs.std() > 0.5  # else closeness would mean little


@pytest.mark.proves("tensor parallel")
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("variant", [*DENSE, *SPARSE])
def test_ranks_together_equal_one(variant: str, size: int) -> None:
    _hold_to_transformers(variant, size, False)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("variant", SPARSE)
def test_ranks_with_whole_experts_equal_one(variant: str, size: int) -> None:
    """8 experts over 3 ranks are 3, 3 and 2; OLMoE's 6 over 4 are 2, 2, 1 and 1."""
    _hold_to_transformers(variant, size, True)


def test_no_family_is_left_out() -> None:
    prefixes = {tiny.VARIANTS[variant][0].removesuffix("Text") for variant in (*DENSE, *SPARSE)}
    # The text model of a checkpoint with images is Gemma 3's.
    assert {f"{prefix}ForCausalLM" for prefix in prefixes} == set(ARCHITECTURES) - {
        "Gemma3ForConditionalGeneration"
    }


@pytest.mark.parametrize(
    ("variant", "size", "message"),
    [
        ("llama", 3, "num_attention_heads=4 cannot be split over tensor_parallel_size=3: use a divisor of 4"),
        ("deepseek-v3", 8, "num_attention_heads=4 cannot be split over tensor_parallel_size=8"),
    ],
)
def test_sizes_that_cannot_be_split_are_refused(variant: str, size: int, message: str) -> None:
    config = load_model_config(find_model(str(tiny.checkpoint(variant))))
    with use_group(TensorParallelGroup(0, size)), pytest.raises(ConfigError, match=message):
        build_model(config, dtype=torch.float32, device="meta")
