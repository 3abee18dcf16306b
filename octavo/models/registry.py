"""From an architecture's name to the class that implements it, imported when asked for."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from octavo.errors import ModelError

if TYPE_CHECKING:
    from octavo.models.interface import CausalLM

# Hugging Face's class name: module, class.
ARCHITECTURES: dict[str, tuple[str, str]] = {
    "LlamaForCausalLM": ("octavo.models.llama", "LlamaForCausalLM"),
    "MistralForCausalLM": ("octavo.models.llama", "LlamaForCausalLM"),
    "Qwen2ForCausalLM": ("octavo.models.llama", "LlamaForCausalLM"),
    "Qwen3ForCausalLM": ("octavo.models.llama", "LlamaForCausalLM"),
    "Phi3ForCausalLM": ("octavo.models.llama", "LlamaForCausalLM"),
    "Gemma2ForCausalLM": ("octavo.models.gemma", "GemmaForCausalLM"),
    "Gemma3ForCausalLM": ("octavo.models.gemma", "GemmaForCausalLM"),
    "Gemma3ForConditionalGeneration": ("octavo.models.gemma", "Gemma3ForConditionalGeneration"),
    "GraniteForCausalLM": ("octavo.models.granite", "GraniteForCausalLM"),
    "Olmo2ForCausalLM": ("octavo.models.olmo2", "Olmo2ForCausalLM"),
    "Olmo3ForCausalLM": ("octavo.models.olmo2", "Olmo2ForCausalLM"),
    "OlmoeForCausalLM": ("octavo.models.olmoe", "OlmoeForCausalLM"),
    "StableLmForCausalLM": ("octavo.models.stablelm", "StableLmForCausalLM"),
    "MixtralForCausalLM": ("octavo.models.mixtral", "MixtralForCausalLM"),
    "Qwen2MoeForCausalLM": ("octavo.models.qwen3_moe", "Qwen3MoeForCausalLM"),
    "Qwen3MoeForCausalLM": ("octavo.models.qwen3_moe", "Qwen3MoeForCausalLM"),
    "DeepseekV2ForCausalLM": ("octavo.models.deepseek", "DeepseekForCausalLM"),
    "DeepseekV3ForCausalLM": ("octavo.models.deepseek", "DeepseekForCausalLM"),
}

# What drafts for a model and is none by itself.
DRAFT_HEADS: dict[str, tuple[str, str]] = {"Eagle3": ("octavo.models.eagle3", "Eagle3Head")}


def model_class(architecture: str, implementation: str = "octavo") -> type[CausalLM]:
    """The class that runs an architecture, of Octavo's families or over Transformers' code.

    Raises:
        ModelError: none does.
    """
    if implementation == "transformers":
        from octavo.models.transformers_model import TransformersForCausalLM

        return TransformersForCausalLM
    known = ARCHITECTURES | DRAFT_HEADS
    if architecture not in known:
        raise ModelError(
            f"architecture {architecture!r} is not supported: use a model of {', '.join(ARCHITECTURES)}"
        )
    module, name = known[architecture]
    return getattr(importlib.import_module(module), name)
