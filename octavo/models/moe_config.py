"""`MoEConfig` out of config.json and GGUF metadata, for the families of mixtures of experts."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from octavo.errors import ModelError
from octavo.models.config import ModelConfig, MoEConfig

if TYPE_CHECKING:
    from octavo.models.gguf_file import GGUFFile


def with_experts(config: ModelConfig, moe: MoEConfig) -> ModelConfig:
    """The config with experts, or as it is where no layer has any.

    Raises:
        ValueError: sizes that cannot be.
    """
    if not moe.layers:
        return config
    if not 1 <= moe.top_k <= moe.num_experts < 1 << 16:
        raise ValueError(f"{moe.top_k} experts for each token of {moe.num_experts}")
    if not 1 <= moe.expert_size < 1 << 31:
        raise ValueError(f"experts of inner size {moe.expert_size}")
    if moe.num_experts % moe.num_groups or not 1 <= moe.top_groups <= moe.num_groups:
        raise ValueError(
            f"{moe.top_groups} groups for each token, of {moe.num_groups} of {moe.num_experts} experts"
        )
    if moe.top_k > moe.num_experts // moe.num_groups * moe.top_groups:
        raise ValueError(f"{moe.top_k} experts for each token of {moe.top_groups} groups that hold fewer")
    return replace(config, moe=moe)


def num_experts(raw: dict[str, Any]) -> int:
    """Transformers 5 writes `num_local_experts` for every family; older versions Qwen's `num_experts`."""
    return int(raw["num_local_experts"] if "num_local_experts" in raw else raw["num_experts"])


def mixtral_moe(config: ModelConfig, raw: dict[str, Any]) -> ModelConfig:
    """Mixtral: every layer has experts, the best of which are weighted by the softmax among them."""
    return with_experts(
        config,
        MoEConfig(
            num_experts=num_experts(raw),
            top_k=int(raw["num_experts_per_tok"]),
            expert_size=config.intermediate_size,
            layers=tuple(range(config.num_layers)),
        ),
    )


def olmoe_moe(config: ModelConfig, raw: dict[str, Any]) -> ModelConfig:
    """OLMoE: every layer has experts of the feed-forward's size."""
    if raw.get("clip_qkv") is not None:
        raise ModelError(f"clip_qkv={raw['clip_qkv']} is not supported: use an OLMoE that does not clip")
    moe = MoEConfig(
        num_experts=num_experts(raw),
        top_k=int(raw["num_experts_per_tok"]),
        expert_size=config.intermediate_size,
        layers=tuple(range(config.num_layers)),
        renormalize=bool(raw["norm_topk_prob"]),
    )
    return with_experts(config, moe)


def qwen_moe(config: ModelConfig, raw: dict[str, Any]) -> ModelConfig:
    """Qwen2-MoE and Qwen3-MoE: every `decoder_sparse_step`-th layer but those of `mlp_only_layers`."""
    step, dense = int(raw["decoder_sparse_step"]), raw.get("mlp_only_layers") or []
    experts = num_experts(raw)
    sparse = [i for i in range(config.num_layers) if (i + 1) % step == 0 and i not in dense]
    return with_experts(
        config,
        MoEConfig(
            num_experts=experts,
            top_k=int(raw["num_experts_per_tok"]),
            expert_size=int(raw["moe_intermediate_size"]),
            layers=tuple(sparse) if experts else (),
            shared_size=int(raw.get("shared_expert_intermediate_size") or 0),
            renormalize=bool(raw["norm_topk_prob"]),
        ),
    )


def gguf_moe(config: ModelConfig, file: GGUFFile) -> ModelConfig:
    """A GGUF file whose every layer has experts, weighted as Mixtral's (llama.cpp's `norm_w`)."""
    size = file.get("{arch}.expert_feed_forward_length", config.intermediate_size)
    return with_experts(
        config,
        MoEConfig(
            num_experts=int(file.get("{arch}.expert_count")),
            top_k=int(file.get("{arch}.expert_used_count")),
            expert_size=int(size),
            layers=tuple(range(config.num_layers)),
        ),
    )


def gguf_mixtral(config: ModelConfig, file: GGUFFile) -> ModelConfig:
    """llama.cpp calls Mixtral "llama" with experts."""
    if not file.get("{arch}.expert_count", 0):
        return config
    return replace(gguf_moe(config, file), architecture="MixtralForCausalLM")
