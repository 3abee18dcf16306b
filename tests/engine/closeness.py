"""How near the engine's log-probabilities are to Transformers' in 16 bits, against float32."""

from __future__ import annotations

import torch

from octavo import LLM, SamplingParams
from octavo.outputs import RequestOutput
from tests import tiny

SCORED = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)


def logprobs_of(output: RequestOutput, prompt: list[int]) -> torch.Tensor:
    """Log-probability of each prompt token but the first."""
    return torch.tensor([e[t].logprob for e, t in zip(output.prompt_logprobs[1:], prompt[1:], strict=True)])


def chosen(logits: torch.Tensor, prompt: list[int]) -> torch.Tensor:
    """The same from logits."""
    return logits.float().log_softmax(-1)[:-1].cpu().gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]


def bfloat16_errors(llm: LLM, variant: str, device: str) -> tuple[float, float]:
    """Root mean square error against float32: of a bfloat16 engine, and of Transformers' bfloat16."""
    scored = llm.generate(tiny.PROMPTS, SCORED, use_tqdm=False)
    peer = tiny.build(variant).to(device, torch.bfloat16)
    ours, theirs = [], []
    for prompt, output in zip(tiny.PROMPTS, scored, strict=True):
        exact = chosen(tiny.logits(variant, prompt), prompt)
        with torch.no_grad():
            theirs.append(chosen(peer(torch.tensor([prompt], device=device)).logits[0], prompt) - exact)
        ours.append(logprobs_of(output, prompt) - exact)
    rms, rms_theirs = (float(torch.cat(errors).square().mean().sqrt()) for errors in (ours, theirs))
    print(f"{variant:16} rms error {rms:.4f}, Transformers' {rms_theirs:.4f}")
    return rms, rms_theirs
