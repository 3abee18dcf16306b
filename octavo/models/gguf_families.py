"""How llama.cpp names and stores each architecture: its converter's conventions, one entry each.

Source: https://github.com/ggml-org/llama.cpp, convert_hf_to_gguf.py (what is written) and
src/llama-model.cpp (what is read, and what holds where a key is absent).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from octavo.models.config import ModelConfig, RopeConfig
from octavo.models.deepseek_config import GGUF_NAMES as DEEPSEEK_NAMES
from octavo.models.deepseek_config import gguf_deepseek2
from octavo.models.hf_families import scaled_positions
from octavo.models.moe_config import gguf_mixtral, gguf_moe

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

# Experts are stacked, those of one matrix in one tensor.
EXPERT_NAMES = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}
# Until April 2024 llama.cpp stored Mixtral's one by one.
_MIXTRAL_NAMES = {"ffn_gate_inp": "block_sparse_moe.gate"} | {
    f"ffn_{ours}{kind}": f"block_sparse_moe.experts{one}.{theirs}"
    for ours, theirs in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
    for kind, one in (("_exps", ""), (".#", ".#"))
}


@dataclass(frozen=True)
class GGUFFamily:
    """One of llama.cpp's architectures.

    Attributes:
        architecture: Hugging Face's class name.
        names: changes to `LAYER_NAMES`: llama.cpp's name of a layer's tensor, and Hugging Face's; `#`
            stands for an expert's number, and a name with its ending (`.bias`) for one that has none there.
        permuted: whether the rows of q and k are turned so that rotary pairs lie side by side. Where not,
            llama.cpp rotates the halves of a head, as Hugging Face does.
        norm_offset: what the converter added to the stored weights of norms.
        hidden_act: activation of the feed-forward (no key says it).
        window: the sliding window where the file does not say; 0: none.
        full_every: in a model with a window, every so many layers one sees everything, where the file
            does not say; 0: none does.
        refine: from the file: what else its keys say, on top of the normal form that all have in common.
    """

    architecture: str
    names: Mapping[str, str] = field(default_factory=dict)
    permuted: bool = False
    norm_offset: float = 0.0
    hidden_act: str = "silu"
    window: int = 0
    full_every: int = 0
    refine: Callable[[ModelConfig, GGUFFile], ModelConfig] = lambda config, file: config

    def layer_name(self, name: str) -> str | None:
        """Hugging Face's name of a layer's tensor, or None if it has no place."""
        return self.names.get(name) or LAYER_NAMES.get(name)


def _positive(file: GGUFFile, key: str, default: float) -> float:
    value = float(file.get(f"{{arch}}.{key}", default))
    if not 0 < value < math.inf:
        raise ValueError(f"{key}={value!r} is not a positive number")
    return value


def _positive_if_there(file: GGUFFile, key: str) -> float | None:
    return None if file.get(f"{{arch}}.{key}") is None else _positive(file, key, 1.0)


def _gemma(config: ModelConfig, file: GGUFFile, wide: int) -> ModelConfig:
    # No key says what the scores are divided by: the size of a head, but in the model of `wide` layers
    # (27B) the width over the heads.
    width = config.hidden_size // config.num_heads if config.num_layers == wide else config.head_dim
    return replace(config, embedding_scale=math.sqrt(config.hidden_size), attention_scale=width**-0.5)


def _gemma2(config: ModelConfig, file: GGUFFile) -> ModelConfig:
    return replace(
        _gemma(config, file, wide=46),
        attention_softcap=_positive(file, "attn_logit_softcapping", 50.0),
        logit_softcap=_positive(file, "final_logit_softcapping", 30.0),
    )


def _gemma3(config: ModelConfig, file: GGUFFile) -> ModelConfig:
    local = RopeConfig(_positive(file, "rope.freq_base_swa", 10000.0), config.rope.dim)
    config = replace(
        _gemma(config, file, wide=62),
        local_rope=None if local == config.rope else local,
        logit_softcap=_positive_if_there(file, "final_logit_softcapping"),
    )
    return scaled_positions(config)


def _granite(config: ModelConfig, file: GGUFFile) -> ModelConfig:
    return replace(
        config,
        embedding_scale=_positive(file, "embedding_scale", 1.0),
        attention_scale=_positive_if_there(file, "attention.scale"),
        residual_scale=_positive(file, "residual_scale", 1.0),
        logit_scale=1.0 / _positive(file, "logit_scale", 1.0),
    )


def _olmo2(config: ModelConfig, file: GGUFFile) -> ModelConfig:
    """One architecture for OLMo 2 and 3, which has windows, and scaled positions in other layers alone."""
    if not file.get("{arch}.attention.sliding_window", 0):
        return config
    rope = config.rope
    if rope.kind == "yarn" and (factor := _positive_if_there(file, "rope.scaling.attn_factor")):
        rope = replace(rope, params={**rope.params, "attention_factor": factor})  # the whole of it here
    local = RopeConfig(rope.theta, rope.dim)
    return replace(
        config, architecture="Olmo3ForCausalLM", rope=rope, local_rope=None if local == rope else local
    )


def _stablelm(config: ModelConfig, file: GGUFFile) -> ModelConfig:
    # Not by the key use_parallel_residual: the converter sets it for every model whose config has none.
    parallel = "blk.0.ffn_norm.weight" not in file.tensors
    eps = _positive(file, "attention.layer_norm_epsilon", 1e-5)
    return replace(config, rms_norm_eps=eps, parallel_residual=parallel)


_AROUND = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GELU = "gelu_pytorch_tanh"

FAMILIES: dict[str, GGUFFamily] = {
    "llama": GGUFFamily("LlamaForCausalLM", _MIXTRAL_NAMES, permuted=True, refine=gguf_mixtral),
    "qwen2": GGUFFamily("Qwen2ForCausalLM"),
    "qwen3": GGUFFamily("Qwen3ForCausalLM"),
    "phi3": GGUFFamily("Phi3ForCausalLM", {"ffn_up": "mlp.gate_up_proj"}),
    "gemma2": GGUFFamily(
        "Gemma2ForCausalLM",
        _AROUND,
        norm_offset=1.0,
        hidden_act=_GELU,
        window=4096,
        full_every=2,
        refine=_gemma2,
    ),
    "gemma3": GGUFFamily(
        "Gemma3ForCausalLM", _AROUND, norm_offset=1.0, hidden_act=_GELU, full_every=6, refine=_gemma3
    ),
    "granite": GGUFFamily("GraniteForCausalLM", permuted=True, refine=_granite),
    "olmo2": GGUFFamily("Olmo2ForCausalLM", _AROUND, full_every=4, refine=_olmo2),
    "stablelm": GGUFFamily(
        "StableLmForCausalLM",
        {"attn_q_norm": "self_attn.q_layernorm", "attn_k_norm": "self_attn.k_layernorm"},
        refine=_stablelm,
    ),
    "qwen3moe": GGUFFamily("Qwen3MoeForCausalLM", EXPERT_NAMES, refine=gguf_moe),
    "deepseek2": GGUFFamily(
        "DeepseekV2ForCausalLM", {**EXPERT_NAMES, **DEEPSEEK_NAMES}, refine=gguf_deepseek2
    ),
}
