"""From an architecture's name to the class that implements it, imported when asked for."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from octavo.errors import ModelError

if TYPE_CHECKING:
    from octavo.models.interface import CausalLM

# Hugging Face's class name: module, class.
ARCHITECTURES: dict[str, tuple[str, str]] = {
    name: ("octavo.models.llama", "LlamaForCausalLM")
    for name in ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
}


def model_class(architecture: str) -> type[CausalLM]:
    """The class that runs an architecture.

    Raises:
        ModelError: none does.
    """
    if architecture not in ARCHITECTURES:
        raise ModelError(
            f"architecture {architecture!r} is not supported: use a model of {', '.join(ARCHITECTURES)}"
        )
    module, name = ARCHITECTURES[architecture]
    return getattr(importlib.import_module(module), name)
