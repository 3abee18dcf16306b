"""How llama.cpp names and stores each architecture: its converter's conventions, one entry each.

Source: https://github.com/ggml-org/llama.cpp, convert_hf_to_gguf.py (what is written) and
src/llama-model.cpp (what is read, and what holds where a key is absent).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from octavo.models.config import ModelConfig

if TYPE_CHECKING:
    from octavo.models.gguf_file import GGUFFile

TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@dataclass(frozen=True)
class GGUFFamily:
    """One of llama.cpp's architectures.

    Attributes:
        architecture: Hugging Face's class name.
        names: changes to `LAYER_NAMES`: llama.cpp's name of a layer's tensor, and Hugging Face's.
        permuted: whether the rows of q and k are turned so that rotary pairs lie side by side. Where not,
            llama.cpp rotates the halves of a head, as Hugging Face does.
        norm_offset: what the converter added to the stored weights of norms.
        hidden_act: activation of the feed-forward (no key says it).
        refine: from the file: what else its keys say, on top of the normal form that all have in common.
    """

    architecture: str
    names: Mapping[str, str] = field(default_factory=dict)
    permuted: bool = False
    norm_offset: float = 0.0
    hidden_act: str = "silu"
    refine: Callable[[ModelConfig, GGUFFile], ModelConfig] = lambda config, file: config

    def layer_name(self, name: str) -> str | None:
        """Hugging Face's name of a layer's tensor, or None if it has no place."""
        return self.names.get(name) or LAYER_NAMES.get(name)


FAMILIES: dict[str, GGUFFamily] = {
    "llama": GGUFFamily("LlamaForCausalLM", permuted=True),
    "qwen2": GGUFFamily("Qwen2ForCausalLM"),
    "qwen3": GGUFFamily("Qwen3ForCausalLM"),
}
