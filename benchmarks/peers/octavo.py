"""Octavo itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.peers.engine import EngineSpec, Peer, Tokens

PEER = Peer(
    "octavo",
    "Octavo",
    (),
    ("16-bit", "int8", "Q4_1"),
    "`LLM.generate`, `dtype=auto`: float32 is computed in where the processor has no bfloat16",
)

_SETTINGS: dict[str, dict[str, Any]] = {"16-bit": {"quantization": "none"}, "int8": {"quantization": "int8"}}
_KV_BYTES = 30 * 2 * 3 * 64  # elements a token: layers, keys and values, KV heads, head size


class OctavoEngine:
    """`LLM` with token ids in and out."""

    def __init__(self, spec: EngineSpec) -> None:
        from octavo import LLM
        from octavo.planning.hardware import detect_cpu

        item = 2 if detect_cpu().fast_bfloat16 else 4
        self._llm = LLM(
            spec.model,
            device="cpu",
            num_threads=spec.threads,
            skip_tokenizer_init=True,
            max_num_seqs=spec.max_seqs,
            kv_cache_memory_bytes=spec.capacity * _KV_BYTES * item,
            disable_log_stats=True,
            **_SETTINGS.get(spec.weights, {}),
        )

    def generate(self, prompts: Sequence[list[int]], lengths: Sequence[int]) -> Tokens:
        from octavo import SamplingParams

        params = [
            SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True, detokenize=False) for n in lengths
        ]
        return [list(out.outputs[0].token_ids) for out in self._llm.generate(prompts, params, use_tqdm=False)]


def load(spec: EngineSpec) -> OctavoEngine:
    return OctavoEngine(spec)
