"""Tiny models as GGUF files, written as llama.cpp's converter writes them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.tiny.models import reference
from tests.tiny.tokenizer import CHAT_TEMPLATE, tokenizer_json
from tests.tiny.variants import BOS, EOS, SPECIAL_TOKENS

ARCHITECTURES = {  # by Transformers' model_type
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "phi3": "phi3",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "granite": "granite",
    "olmo2": "olmo2",
    "olmo3": "olmo2",
    "stablelm": "stablelm",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
}


def gguf_file(
    variant: str,
    path: Path,
    qtype: str = "F32",
    single_experts: bool = False,
    whole_kv_b: bool = False,
    model: Any = None,
    **metadata: Any,
) -> Path:
    """Write a variant as llama.cpp's converter would (q and k of Llama with permuted rows).

    Args:
        qtype: GGML's name of the matrices' encoding (what `gguf.quants.quantize` knows); vectors are F32.
        single_experts: store each expert's matrices apart, as llama.cpp did in its first months of Mixtral.
        whole_kv_b: store latent attention's kv_b in one, and no sizes of the cache, as until May 2025.
        model: one of the variant's kind in the place of the variant itself.
        metadata: further string, int, float or bool keys, `.` written as `__`.
    """
    import gguf

    model = reference(variant) if model is None else model
    config = model.config
    arch = ARCHITECTURES[config.model_type]
    writer = gguf.GGUFWriter(path, arch)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    if arch == "deepseek2":
        _add_latent(writer, config, whole_kv_b)
    else:
        writer.add_head_count_kv(config.num_key_value_heads)
        if arch not in ("phi3", "granite", "stablelm"):
            writer.add_key_length(head_dim)
            writer.add_value_length(head_dim)
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    dim = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    if arch != "gemma2":
        writer.add_rope_dimension_count(dim)
        if arch != "stablelm":
            writer.add_rope_freq_base(rope["rope_theta"])
    if arch == "stablelm":
        writer.add_layer_norm_eps(config.layer_norm_eps)
        writer.add_parallel_residual(True)  # for every model whose config.json does not say, as few do
    else:
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    _add_scales(writer, config, arch)
    _add_windows(writer, config, arch)
    experts = getattr(config, "num_local_experts", getattr(config, "n_routed_experts", None))
    if experts is not None:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        if (size := getattr(config, "moe_intermediate_size", None)) is not None:
            writer.add_expert_feed_forward_length(size)
    _add_rope(writer, rope, dim)
    _add_vocabulary(writer)
    for key, value in metadata.items():
        kinds = {
            str: writer.add_string, int: writer.add_uint32, float: writer.add_float32, bool: writer.add_bool
        }  # fmt: skip
        kinds[type(value)](key.replace("__", "."), value)
    names = gguf.get_tensor_name_map(
        next(a for a, n in gguf.MODEL_ARCH_NAMES.items() if n == arch), config.num_hidden_layers
    )
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}

    def add(name: str, data: np.ndarray) -> None:
        vector = data.ndim == 1 or name.endswith("_norm.weight")
        kind = gguf.GGMLQuantizationType["F32" if vector else qtype]
        encoded = gguf.quants.quantize(np.ascontiguousarray(data), kind)
        writer.add_tensor(name, encoded, raw_dtype=kind)

    for name, tensor in _tensors(model, whole_kv_b):
        if config.tie_word_embeddings and name == "lm_head.weight":
            continue
        data = tensor.numpy()
        part = name.split(".")[-2]
        if "gemma" in arch and name.endswith("norm.weight"):
            data = data + 1
        if arch in ("llama", "granite") and part in heads:
            n = heads[part]
            data = data.reshape(n, 2, data.shape[0] // n // 2, -1).swapaxes(1, 2).reshape(data.shape)
        stem, _, suffix = name.rpartition(".")
        theirs = names.get_name(stem)
        if data.ndim == 3 and single_experts:
            for expert, matrix in enumerate(data):
                add(f"{theirs.removesuffix('_exps')}.{expert}.{suffix}", matrix)
        else:
            add(f"{theirs}.{suffix}", data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _tensors(model: Any, whole_kv_b: bool) -> Iterator[tuple[str, Any]]:
    """The model's tensors, its experts' matrices stacked one kind apart from the other, heads' norms too."""
    state = model.state_dict()
    for name, tensor in state.items():
        stem, is_norms, head = name.partition(".norms.")
        if is_norms:
            if head == "0.weight":
                heads = [t for n, t in state.items() if n.startswith(f"{stem}.norms.")]
                yield f"{stem}.weight", torch.stack(heads)
        elif name.endswith("experts.gate_up_proj"):
            for part, half in zip(("gate_proj", "up_proj"), tensor.chunk(2, dim=1), strict=True):
                yield name.replace("gate_up_proj", f"{part}.weight"), half
        elif name.endswith("kv_b_proj.weight") and not whole_kv_b:
            whole = tensor.unflatten(0, (model.config.num_attention_heads, -1))
            sizes = [model.config.qk_nope_head_dim, model.config.v_head_dim]
            keys, values = whole.split(sizes, dim=1)
            yield name.replace("kv_b_proj", "k_b_proj"), keys.transpose(1, 2)
            yield name.replace("kv_b_proj", "v_b_proj"), values
        else:
            name = name.replace("e_score_correction_bias", "e_score_correction.bias")
            yield name + (".weight" if name.endswith("experts.down_proj") else ""), tensor


def _add_scales(writer: Any, config: Any, arch: str) -> None:
    if arch == "granite":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if arch == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    if arch in ("gemma2", "gemma3") and config.final_logit_softcapping:
        writer.add_final_logit_softcapping(config.final_logit_softcapping)


def _add_windows(writer: Any, config: Any, arch: str) -> None:
    """Which layers slide is said for OLMo 3 alone; for Gemma 3 where it is not every sixth that sees all."""
    window = getattr(config, "sliding_window", None)
    if arch == "phi3":
        writer.add_sliding_window(window or 0)
    if arch in ("gemma2", "gemma3", "olmo2") and window:
        writer.add_sliding_window(window)
    if config.model_type == "olmo3":
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    if arch == "gemma3":
        writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])
        if (full := config.layer_types.index("full_attention") + 1) != 6:
            writer.add_sliding_window_pattern(full)


def _add_latent(writer: Any, config: Any, whole_kv_b: bool) -> None:
    """DeepSeek's attention and routing; newer files give the cache's sizes, and the heads' beside them."""
    import gguf

    heads = config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
    if whole_kv_b:
        cached, kv_heads = heads, config.num_key_value_heads
    else:
        cached, kv_heads = (config.kv_lora_rank + config.qk_rope_head_dim, config.kv_lora_rank), 1
        writer.add_key_length_mla(heads[0])
        writer.add_value_length_mla(heads[1])
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(cached[0])
    writer.add_value_length(cached[1])
    if config.q_lora_rank is not None:
        writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    writer.add_leading_dense_block_count(config.first_k_dense_replace)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    if config.n_group is not None:
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)
    if config.norm_topk_prob:
        writer.add_expert_weights_norm(True)
    if config.model_type == "deepseek_v3":
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if (mscale := config.rope_parameters.get("mscale_all_dim")) is not None:
        writer.add_rope_scaling_yarn_log_mul(0.1 * mscale)


def _add_rope(writer: Any, rope: dict[str, Any], dim: int) -> None:
    import gguf

    kind = rope["rope_type"]
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        if rope.get("attention_factor") is not None:
            writer.add_rope_scaling_attn_factors(rope["attention_factor"])
    if kind == "longrope":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        original, factor = rope["original_max_position_embeddings"], rope["factor"]
        writer.add_rope_scaling_attn_factors(float(np.sqrt(1 + np.log(factor) / np.log(original))))
        for which in ("long", "short"):
            factors = np.array(rope[f"{which}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{which}.weight", factors)
    if kind == "llama3":
        # As llama.cpp's converter: the divisor of every frequency.
        wavelengths = 2 * np.pi * rope["rope_theta"] ** (np.arange(0, dim, 2) / dim)
        original, low, high = (
            rope["original_max_position_embeddings"],
            rope["low_freq_factor"],
            rope["high_freq_factor"],
        )
        smooth = np.clip((original / wavelengths - low) / (high - low), 0, 1)
        writer.add_tensor(
            "rope_freqs.weight", (1 / ((1 - smooth) / rope["factor"] + smooth)).astype(np.float32)
        )


def _add_vocabulary(writer: Any) -> None:
    model = json.loads(tokenizer_json())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if t in SPECIAL_TOKENS else 1 for t in tokens])
    writer.add_token_merges([" ".join(m) if isinstance(m, list) else m for m in model["merges"]])
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)
