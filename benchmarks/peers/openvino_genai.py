"""OpenVINO GenAI: its pipeline with continuous batching, on a model converted by optimum-intel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.peers.engine import EngineSpec, Peer, Tokens

PEER = Peer(
    "openvino_genai",
    "OpenVINO GenAI",
    ("openvino-genai==2026.4.1.0",),
    ("16-bit",),
    "`ContinuousBatchingPipeline`, prefix caching on, its own choice of precision (of the KV cache too)",
)
CONVERSION = ("torch==2.13.0", "optimum-intel==2.2.0", "nncf==3.4.0", "openvino==2026.4.1")
"""The environment of the conversion; it is removed after."""

_BLOCK = 32  # tokens in a KV block of its CPU plugin


class OpenVINOEngine:
    """The pipeline without its tokenizer's work: tensors of ids in."""

    def __init__(self, spec: EngineSpec) -> None:
        import openvino_genai as genai

        scheduler: Any = genai.SchedulerConfig()
        scheduler.num_kv_blocks = -(-spec.capacity // _BLOCK)
        scheduler.max_num_batched_tokens = 2048
        scheduler.max_num_seqs = spec.max_seqs
        scheduler.enable_prefix_caching = True
        properties = {"INFERENCE_NUM_THREADS": spec.threads, "PERFORMANCE_HINT": "LATENCY"}
        self._pipeline = genai.ContinuousBatchingPipeline(spec.model, scheduler, "CPU", properties)

    def generate(self, prompts: Sequence[list[int]], lengths: Sequence[int]) -> Tokens:
        import numpy
        import openvino
        import openvino_genai as genai

        inputs = [openvino.Tensor(numpy.array([ids], dtype=numpy.int64)) for ids in prompts]
        configs = [
            genai.GenerationConfig(max_new_tokens=n, min_new_tokens=n, ignore_eos=True, do_sample=False)
            for n in lengths
        ]
        return [list(result.m_generation_ids[0]) for result in self._pipeline.generate(inputs, configs)]


def load(spec: EngineSpec) -> OpenVINOEngine:
    return OpenVINOEngine(spec)
