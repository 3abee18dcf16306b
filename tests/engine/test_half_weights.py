"""16-bit checkpoints computed on in float32, whole engine against Transformers on the same numbers."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from octavo.kernels.cpu import half
from tests import tiny
from tests.engine.closeness import SCORED, chosen, logprobs_of
from tests.engine.test_llm_parity import GREEDY, make

pytestmark = pytest.mark.skipif(not half.panel(), reason="no kernels for 16-bit matrices on this CPU")


@pytest.mark.parametrize(
    ("variant", "dtype"),
    [
        ("llama", torch.bfloat16),
        ("qwen2-tied", torch.float16),
        ("gemma3", torch.bfloat16),
        ("mixtral", torch.bfloat16),
        ("deepseek-v2-lite", torch.bfloat16),
    ],
)
@torch.no_grad()
def test_weights_are_widened_exactly(variant: str, dtype: torch.dtype, tmp_path: Path) -> None:
    rounded = copy.deepcopy(tiny.reference(variant)).to(dtype)
    rounded.save_pretrained(tmp_path)
    wide = copy.deepcopy(tiny.reference(variant))  # whose rotary tables are exact
    wide.load_state_dict(rounded.state_dict())
    # Some prompts to decode together (recorded steps), one by itself.
    with make(variant, model=str(tmp_path), max_num_batched_tokens=64) as llm:
        assert "16-bit" in llm.facts.summary["weights"]
        scored = llm.generate(tiny.PROMPTS, SCORED, use_tqdm=False)
        outputs = llm.generate(tiny.PROMPTS, GREEDY, use_tqdm=False)
        outputs += llm.generate(tiny.PROMPTS[:1], GREEDY, use_tqdm=False)
    for prompt, output in zip(tiny.PROMPTS, scored, strict=True):
        want = chosen(wide(torch.tensor([prompt])).logits[0], prompt)
        torch.testing.assert_close(logprobs_of(output, prompt), want, atol=1e-4, rtol=0)
    for prompt, output in zip([*tiny.PROMPTS, tiny.PROMPTS[0]], outputs, strict=True):
        tokens = output.outputs[0].token_ids
        logits = wide(torch.tensor([[*prompt, *tokens[:-1]]])).logits[0, len(prompt) - 1 :]
        assert logits.argmax(-1).tolist() == tokens
