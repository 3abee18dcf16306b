"""GGUF metadata read into the normal form of a model's config.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Two things come from the tensors:
which biases and norms exist, and `rope_freqs.weight`, in which llama.cpp stores the divisor of every
rotary frequency (its form of Llama 3's scaling).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from octavo.errors import ModelError
from octavo.models.config import ModelConfig, RopeConfig
from octavo.models.gguf_families import FAMILIES, GGUFFamily
from octavo.models.gguf_file import GGUFFile, reads_metadata

_SAMPLING = {
    "temperature": "general.sampling.temp",
    "top_p": "general.sampling.top_p",
    "top_k": "general.sampling.top_k",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}
_EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
# Cosine between the two embedding matrices of a file above which they are one matrix, stored at two
# precisions: Q2_K keeps it above 0.95, while matrices trained apart lie near 0.
_TIED_COSINE = 0.9
_TIED_ROWS = 64
# Keys that change what a layer computes, with the values that leave it as it is, and the architectures whose
# reader heeds them. Converters write some of them for every model; llama.cpp ignores none of them where it
# knows it, so that a file with another value is refused.
_SCALED, _CAPPED, _LATENT = ("granite",), ("gemma2", "gemma3"), ("deepseek2",)
_CHANGES: dict[str, tuple[tuple[Any, ...], tuple[str, ...]]] = {
    "attention.causal": ((True,), ()),
    "attention.clamp_kqv": ((0,), ()),
    "attention.max_alibi_bias": ((0,), ()),
    "attention.scale": ((0,), _SCALED),
    "embedding_scale": ((0, 1), _SCALED),
    "residual_scale": ((0, 1), _SCALED),
    "logit_scale": ((0, 1), _SCALED),
    "attn_logit_softcapping": ((0,), _CAPPED),
    "final_logit_softcapping": ((0,), _CAPPED),
    "expert_shared_count": ((0,), _LATENT),
    "expert_gating_func": ((0, 1), _LATENT),
    "expert_weights_norm": ((True,), _LATENT),
    "expert_weights_scale": ((0, 1), _LATENT),
    "expert_group_count": ((0, 1), _LATENT),
}


@reads_metadata
def model_config_from_gguf(file: GGUFFile) -> ModelConfig:
    """The normal form of a GGUF file's model.

    `dtype` is the type of its unquantized matrices, bfloat16 for quantized files.
    `tie_word_embeddings` is also true for a file that stores one matrix twice, at two precisions.

    Raises:
        ModelError: unknown architecture, missing or unusable metadata.
    """
    arch = file.architecture
    family = FAMILIES.get(arch)
    if family is None:
        raise ModelError(
            f"{file.path}: GGUF architecture {arch!r} is not supported: use a file of {', '.join(FAMILIES)}"
        )
    tensors = file.tensors
    if "token_embd.weight" not in tensors:
        raise ModelError(f"{file.path}: tensor 'token_embd.weight' is missing: fetch the file again")
    hidden = _number(file, "embedding_length")
    heads = _number(file, "attention.head_count")
    kv_heads = _number(file, "attention.head_count_kv", heads)
    head_dim = _number(file, "attention.key_length", hidden // heads)
    positions = _number(file, "context_length")
    config = ModelConfig(
        architecture=family.architecture,
        vocab_size=tensors["token_embd.weight"].shape[0],
        hidden_size=hidden,
        intermediate_size=_number(file, "feed_forward_length"),
        num_layers=_number(file, "block_count"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=positions,
        rms_norm_eps=float(file.get("{arch}.attention.layer_norm_rms_epsilon", 1e-5)),
        rope=_rope(file, _number(file, "rope.dimension_count", head_dim), positions),
        dtype=_dtype(file),
        hidden_act=family.hidden_act,
        tie_word_embeddings=_tied(file),
        attention_bias="blk.0.attn_q.bias" in tensors or "blk.0.attn_qkv.bias" in tensors,
        attention_out_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_gate.bias" in tensors,
        qk_norm="blk.0.attn_q_norm.weight" in tensors,
        norm_offset=family.norm_offset,
        bos_token_id=file.get("tokenizer.ggml.bos_token_id"),
        eos_token_ids=_eos(file),
        extra={k: v for k, v in file.metadata.items() if isinstance(v, (int, float, str))},
    )
    _check_changes(file)
    config = family.refine(config, file)
    if file.get("{arch}.expert_count", 0) and config.moe is None:
        raise ModelError(
            f"{file.path}: GGUF architecture {arch!r} with experts is not supported: use a file without"
        )
    return config.with_windows(_windows(file, family))


def _check_changes(file: GGUFFile) -> None:
    """Refuse a file that asks for arithmetic which its architecture's reader takes no notice of."""
    for key, (neutral, readers) in _CHANGES.items():
        value = file.get(f"{{arch}}.{key}")
        if value is not None and file.architecture not in readers and value not in neutral:
            raise ModelError(
                f"{file.path}: {key}={value!r} is not supported for GGUF architecture {file.architecture!r}: "
                "use another model"
            )


def generation_config_from_gguf(file: GGUFFile) -> dict[str, float | int]:
    """Default sampling settings that the file's metadata states (`general.sampling.*`), or {}."""
    found = {name: file.get(key) for name, key in _SAMPLING.items()}
    return {name: value for name, value in found.items() if isinstance(value, (int, float))}


def _number(file: GGUFFile, key: str, default: int | None = None) -> int:
    value: Any = file.get(f"{{arch}}.{key}", default)
    if isinstance(value, np.ndarray):  # one entry per layer
        if len(set(value.tolist())) != 1:
            raise ModelError(
                f"{file.path}: {key} differs between layers, which is not supported: use another model"
            )
        value = int(value[0])
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 1 << 31:
        raise ModelError(
            f"{file.path}: metadata {file.architecture}.{key}={value!r} is not a positive integer of "
            "31 bits: convert the model again"
        )
    return value


def _eos(file: GGUFFile) -> tuple[int, ...]:
    ids = (file.get(f"tokenizer.ggml.{key}") for key in _EOS_KEYS)
    return tuple(dict.fromkeys(int(token) for token in ids if token is not None))


def _dtype(file: GGUFFile) -> str:
    kinds = {t.type_name for t in file.tensors.values() if len(t.shape) > 1}
    if kinds == {"F32"}:
        return "float32"
    return "float16" if kinds <= {"F32", "F16"} else "bfloat16"


def _windows(file: GGUFFile, family: GGUFFamily) -> list[int | None]:
    layers = _number(file, "block_count")
    window = int(file.get("{arch}.attention.sliding_window", family.window))
    if window <= 0:
        return []
    pattern = file.get("{arch}.attention.sliding_window_pattern", family.full_every)
    if isinstance(pattern, np.ndarray):
        if len(pattern) != layers:
            raise ValueError(f"sliding_window_pattern has {len(pattern)} entries for {layers} layers")
        slides = [bool(x) for x in pattern]
    else:
        slides = [pattern == 0 or layer % int(pattern) != 0 for layer in range(1, layers + 1)]
    return [window if x else None for x in slides]


def _rope(file: GGUFFile, dim: int, positions: int) -> RopeConfig:
    def scaling(key: str, default: Any = None) -> Any:
        return file.get(f"{{arch}}.rope.scaling.{key}", default)

    theta = float(file.get("{arch}.rope.freq_base", 10000.0))
    kind = scaling("type", "none")
    original = int(scaling("original_context_length", positions))
    short, long = (_factors(file, f"rope_factors_{which}.weight", dim) for which in ("short", "long"))
    if (shared := _factors(file, "rope_freqs.weight", dim)) is not None:
        # A divisor for every frequency, whatever the length: longrope whose two sets are one.
        short = long = shared
        if np.all(shared == 1.0):
            return RopeConfig(theta, dim)
    if short is not None and long is not None:
        params: dict[str, Any] = {
            "short_factor": [float(x) for x in short],
            "long_factor": [float(x) for x in long],
            "original_max_position_embeddings": original,
            "attention_factor": float(scaling("attn_factor", 1.0)),
            "factor": max(1.0, positions / original),
        }
        return RopeConfig(theta, dim, "longrope", params)
    if kind == "none":
        return RopeConfig(theta, dim)
    factor = float(scaling("factor", 1.0))
    if kind == "linear":
        return RopeConfig(theta, dim, "linear", {"factor": factor})
    if kind == "yarn":
        params = {"factor": factor, "original_max_position_embeddings": original}
        for name in ("beta_fast", "beta_slow"):
            if scaling(f"yarn_{name}") is not None:
                params[name] = float(scaling(f"yarn_{name}"))
        if scaling("attn_factor") is not None:
            # llama.cpp multiplies yarn's own 0.1 ln(factor) + 1 by it.
            params["attention_factor"] = float(scaling("attn_factor")) * (0.1 * float(np.log(factor)) + 1.0)
        return RopeConfig(theta, dim, "yarn", params)
    raise ModelError(
        f"{file.path}: rope scaling {kind!r} is not supported: "
        "use a file with none, linear, yarn or rope factors"
    )


def _factors(file: GGUFFile, name: str, dim: int) -> np.ndarray | None:
    if name not in file.tensors:
        return None
    tensor = file.tensors[name]
    if tensor.type_name != "F32" or tensor.shape != (dim // 2,):
        raise ModelError(
            f"{file.path}: tensor {name!r} is {tensor.type_name} {list(tensor.shape)}, not F32 [{dim // 2}]: "
            "convert the model again"
        )
    return file.data(name).view(np.float32)


def _tied(file: GGUFFile) -> bool:
    """Whether embedding and output matrix are one: absent, or stored a second time at another precision."""
    if "output.weight" not in file.tensors:
        return True
    embedding, output = file.tensors["token_embd.weight"], file.tensors["output.weight"]
    if embedding.shape != output.shape:
        return False
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    step = max(1, embedding.shape[0] // _TIED_ROWS)
    a, b = (
        dequantize(
            np.ascontiguousarray(file.data(t.name).reshape(t.shape[0], -1)[::step]),
            GGMLQuantizationType(t.ggml_type),
        ).astype(np.float64)
        for t in (embedding, output)
    )
    norms = float(np.linalg.norm(a) * np.linalg.norm(b))
    return norms > 0 and float((a * b).sum()) / norms > _TIED_COSINE
