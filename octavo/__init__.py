"""Octavo: an inference engine for open-weight language models.

The names below are imported when first used, so that `import octavo` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from octavo.version import __version__

if TYPE_CHECKING:
    from octavo.async_llm import AsyncLLM, AsyncLLMEngine
    from octavo.config import EngineConfig
    from octavo.engine_args import AsyncEngineArgs, EngineArgs
    from octavo.errors import ConfigError, EngineDeadError, ModelError, OctavoError, RequestError
    from octavo.inputs import TextPrompt, TokensPrompt
    from octavo.llm import LLM
    from octavo.outputs import CompletionOutput, EmbeddingRequestOutput, RequestOutput
    from octavo.pooling_params import PoolingParams
    from octavo.quantization.compress.modifiers import QuantizationModifier
    from octavo.quantization.compress.oneshot import oneshot
    from octavo.sampling_params import RequestOutputKind, SamplingParams
    from octavo.structured_outputs import GuidedDecodingParams, StructuredOutputsParams

_HOME = {
    "AsyncEngineArgs": "octavo.engine_args",
    "AsyncLLM": "octavo.async_llm",
    "AsyncLLMEngine": "octavo.async_llm",
    "CompletionOutput": "octavo.outputs",
    "ConfigError": "octavo.errors",
    "EmbeddingRequestOutput": "octavo.outputs",
    "EngineArgs": "octavo.engine_args",
    "EngineConfig": "octavo.config",
    "EngineDeadError": "octavo.errors",
    "GuidedDecodingParams": "octavo.structured_outputs",
    "LLM": "octavo.llm",
    "ModelError": "octavo.errors",
    "OctavoError": "octavo.errors",
    "PoolingParams": "octavo.pooling_params",
    "QuantizationModifier": "octavo.quantization.compress.modifiers",
    "RequestError": "octavo.errors",
    "RequestOutput": "octavo.outputs",
    "RequestOutputKind": "octavo.sampling_params",
    "SamplingParams": "octavo.sampling_params",
    "StructuredOutputsParams": "octavo.structured_outputs",
    "TextPrompt": "octavo.inputs",
    "TokensPrompt": "octavo.inputs",
    "oneshot": "octavo.quantization.compress.oneshot",
}

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "CompletionOutput",
    "ConfigError",
    "EmbeddingRequestOutput",
    "EngineArgs",
    "EngineConfig",
    "EngineDeadError",
    "GuidedDecodingParams",
    "ModelError",
    "OctavoError",
    "PoolingParams",
    "QuantizationModifier",
    "RequestError",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
    "oneshot",
]


_INSTEAD = {
    "LLMEngine": "LLM for results at once, or AsyncLLM for requests that come and go",
    "BeamSearchParams": "SamplingParams(n=...): there is no beam search",
}


def __getattr__(name: str) -> object:
    if name in _INSTEAD:  # an ImportError, so that `from octavo import ...` shows the text
        raise ImportError(f"octavo has no {name}: use {_INSTEAD[name]}")
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'octavo' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
