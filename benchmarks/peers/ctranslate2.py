"""CTranslate2, weights in int8: static batches, until the longest answer is done."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.peers.engine import EngineSpec, Peer, Tokens

PEER = Peer(
    "ctranslate2",
    "CTranslate2",
    ("torch==2.13.0", "transformers==4.57.*", "ctranslate2==4.8.5"),  # the first two convert
    ("int8",),
    "`Generator.generate_batch`; a batch ends with its longest answer",
)


class CTranslate2Engine:
    """The generator; it takes tokens as text, and knows no ids."""

    def __init__(self, spec: EngineSpec) -> None:
        import json
        from pathlib import Path

        import ctranslate2

        self._generator = ctranslate2.Generator(
            spec.model, device="cpu", compute_type="int8", inter_threads=1, intra_threads=spec.threads
        )
        self._words: list[str] = json.loads((Path(spec.model) / "vocabulary.json").read_text())

    def generate(self, prompts: Sequence[list[int]], lengths: Sequence[int]) -> Tokens:
        most = max(lengths)
        results = self._generator.generate_batch(
            [[self._words[i] for i in ids] for ids in prompts],
            max_length=most,
            min_length=most,
            include_prompt_in_result=False,
            end_token=[],
        )
        return [r.sequences_ids[0][:n] for r, n in zip(results, lengths, strict=True)]


def load(spec: EngineSpec) -> CTranslate2Engine:
    return CTranslate2Engine(spec)
