"""Transformers' `generate`: static batches, padded on the left, until the longest answer is done."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.peers.engine import EngineSpec, Peer, Tokens

PEER = Peer(
    "transformers",
    "Transformers",
    (),
    ("16-bit",),
    "`generate` of the development environment's version; a batch ends with its longest answer",
)


class TransformersEngine:
    """A causal language model of a folder, in the checkpoint's type, or float32 without fast bfloat16."""

    def __init__(self, spec: EngineSpec) -> None:
        import torch
        import transformers

        from octavo.planning.hardware import detect_cpu

        torch.set_num_threads(spec.threads)
        dtype = torch.bfloat16 if detect_cpu().fast_bfloat16 else torch.float32
        self._model = transformers.AutoModelForCausalLM.from_pretrained(spec.model, dtype=dtype).eval()

    def generate(self, prompts: Sequence[list[int]], lengths: Sequence[int]) -> Tokens:
        import torch

        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        most = max(lengths)
        with torch.inference_mode():
            out = self._model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=most,
                min_new_tokens=most,
                do_sample=False,
                pad_token_id=0,
            )
        return [row[width : width + n] for row, n in zip(out.tolist(), lengths, strict=True)]


def load(spec: EngineSpec) -> TransformersEngine:
    return TransformersEngine(spec)
