"""config.json and generation_config.json, as Hugging Face writes them, read into the normal form.

Transformers 5 writes `rope_parameters` (which holds `rope_theta`) and `dtype`; older versions wrote
`rope_theta`, `rope_scaling` (with `type` or `rope_type`) and `torch_dtype`. Both are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo.errors import ModelError
from octavo.generation_defaults import GENERATION_FIELDS
from octavo.models.config import ModelConfig, RopeConfig
from octavo.models.hf_families import FAMILIES, Family
from octavo.models.json_file import read_json
from octavo.quantization.read_config import read_quantization

ROPE_KINDS = ("default", "linear", "llama3", "yarn", "dynamic", "longrope")
_ROPE_NEEDS = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
}
_ROPE_ALIASES = {"su": "longrope"}  # Phi-3's first name for it
_ROPE_SIZES = ("factor", "original_max_position_embeddings")


def model_config_from_folder(folder: Path) -> ModelConfig:
    """Read `config.json`, and the EOS ids of `generation_config.json`, of a checkpoint folder.

    Raises:
        ModelError: missing or malformed file, unknown architecture, rope or quantization.
    """
    path = folder / "config.json"
    generation = folder / "generation_config.json"
    return model_config_from_dict(
        read_json(path), read_json(generation) if generation.exists() else {}, where=str(path)
    )


def model_config_from_dict(
    raw: dict[str, Any], generation: dict[str, Any] | None = None, where: str = "config.json"
) -> ModelConfig:
    """The normal form of a raw config; `where` names its origin in error messages.

    Raises:
        ModelError: as `model_config_from_folder`.
    """
    try:
        return _read_config(raw, generation, where)
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:  # a value of the wrong kind
        raise ModelError(f"{where}: malformed ({error}): fetch the file again") from None


def _read_config(raw: dict[str, Any], generation: dict[str, Any] | None, where: str) -> ModelConfig:
    read_quantization(raw, where)  # refuses what is not supported
    architectures = raw.get("architectures") or []
    name = next((a for a in architectures if a in FAMILIES), None)
    if name is None:
        shown = ", ".join(map(str, architectures)) or f"none (model_type {raw.get('model_type')!r})"
        raise ModelError(
            f"{where}: architecture {shown} is not supported: use a checkpoint of {', '.join(FAMILIES)}"
        )
    family = FAMILIES[name]
    ids = [raw.get("eos_token_id")]
    if isinstance(raw.get("text_config"), dict):  # a multimodal checkpoint's part for text
        raw = {**raw, **raw["text_config"]}
    raw = {**family.defaults, **raw}
    if raw.get("use_bidirectional_attention"):
        raise ModelError(
            f"{where}: use_bidirectional_attention is set (an embedding model such as EmbeddingGemma), which "
            "is not supported: use a checkpoint that generates text"
        )
    heads = positive(raw, "num_attention_heads", where)
    hidden = positive(raw, "hidden_size", where)
    kv_heads = positive(raw, "num_key_value_heads", where, heads)
    if heads % kv_heads:
        raise ModelError(
            f"{where}: num_key_value_heads={kv_heads} does not divide num_attention_heads={heads}: "
            "the file is corrupt, fetch it again"
        )
    head_dim = positive(raw, "head_dim", where, hidden // heads)
    positions = positive(raw, "max_position_embeddings", where)
    rope, local_rope = _ropes(raw, family, head_dim, positions, where)
    attention_bias, out_bias, mlp_bias = family.biases(raw)
    config = ModelConfig(
        architecture=name,
        vocab_size=positive(raw, "vocab_size", where),
        hidden_size=hidden,
        intermediate_size=positive(raw, "intermediate_size", where),
        num_layers=positive(raw, "num_hidden_layers", where),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=positions,
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope=rope,
        local_rope=local_rope,
        dtype=stored_dtype(raw, where),
        hidden_act=str(raw.get("hidden_activation") or raw.get("hidden_act", "silu")),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        attention_bias=attention_bias,
        attention_out_bias=out_bias,
        mlp_bias=mlp_bias,
        qk_norm=family.qk_norm,
        norm_offset=family.norm_offset,
        bos_token_id=first_id(raw.get("bos_token_id")),
        eos_token_ids=token_ids(*ids, raw.get("eos_token_id"), (generation or {}).get("eos_token_id")),
        extra=raw,
    )
    if config.context_length >= 1 << 31:
        raise ModelError(
            f"{where}: max_position_embeddings={positions} and rope's factor make a context of "
            f"{config.context_length} tokens: fetch the file again"
        )
    return family.refine(config, raw).with_windows(family.windows(raw))


def positive(raw: Mapping[str, Any], key: str, where: str, default: int | None = None) -> int:
    """A size that a config states under `key`, or else `default`.

    Raises:
        ModelError: no positive integer of 31 bits.
    """
    value = default if raw.get(key) is None else raw[key]
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 1 << 31:
        raise ModelError(
            f"{where}: {key}={value!r} is not a positive integer of 31 bits: fetch the file again"
        )
    return value


def stored_dtype(raw: dict[str, Any], where: str) -> str:
    """The type of a checkpoint's weights.

    Raises:
        ModelError: one that is not supported.
    """
    value = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    value = str(value).removeprefix("torch.")
    if value not in ("float32", "bfloat16", "float16"):
        raise ModelError(
            f"{where}: dtype {value!r} is not supported: use a float32, bfloat16 or float16 checkpoint"
        )
    return value


def _ropes(
    raw: dict[str, Any], family: Family, head_dim: int, positions: int, where: str
) -> tuple[RopeConfig, RopeConfig | None]:
    """The rotary positions, and those of the layers that slide where they have others."""
    given = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    nested = isinstance(given, dict) and any(isinstance(v, dict) for v in given.values())
    if not isinstance(given, dict) or (nested and family.local_theta is None):
        raise ModelError(
            f"{where}: rope_parameters per layer type are not supported for {raw.get('model_type')}: "
            "use a checkpoint with one set for all layers"
        )
    theta = raw.get("rope_theta") or 10000.0
    full = _rope(
        (given.get("full_attention") or {}) if nested else given, raw, theta, head_dim, positions, where
    )
    local = full
    if family.local_theta is not None:
        given = (given.get("sliding_attention") or {}) if nested else {}
        local = _rope(given, raw, family.local_theta(raw), head_dim, positions, where)
    if not family.partial_rotary and min(full.dim, local.dim) < head_dim:
        raise ModelError(
            f"{where}: partial_rotary_factor is not supported for {raw['architectures'][0]}, where other "
            "implementations take no notice of it: remove it if the model turns whole heads"
        )
    return full, None if local == full else local


def _rope(
    given: dict[str, Any], raw: dict[str, Any], theta: Any, head_dim: int, positions: int, where: str
) -> RopeConfig:
    if not isinstance(given, dict):
        raise ModelError(f"{where}: rope parameters {given!r} are no JSON object: fetch the file again")
    params = {k: v for k, v in given.items() if v is not None}
    kind = params.pop("rope_type", None) or params.pop("type", None) or "default"
    params.pop("type", None)
    kind = _ROPE_ALIASES.get(kind, kind)
    if kind == "yarn" and "short_factor" in params:  # Phi-3 once called it so, too
        kind = "longrope"
    if kind not in ROPE_KINDS:
        raise ModelError(f"{where}: rope type {kind!r} is not supported: use one of {', '.join(ROPE_KINDS)}")
    missing = [key for key in _ROPE_NEEDS.get(kind, ()) if key not in params]
    if missing:
        raise ModelError(f"{where}: rope type {kind!r} lacks {', '.join(missing)}: fetch the file again")
    theta = params.pop("rope_theta", None) or theta
    partial = params.pop("partial_rotary_factor", None) or raw.get("partial_rotary_factor") or 1.0
    if kind in ("default", "linear"):
        params.pop("original_max_position_embeddings", None)
    elif raw.get("original_max_position_embeddings") is not None:  # Phi-3 keeps it outside; it wins
        params["original_max_position_embeddings"] = raw["original_max_position_embeddings"]
    else:
        params.setdefault("original_max_position_embeddings", positions)
    if kind == "yarn":
        params.setdefault("factor", positions / params["original_max_position_embeddings"])
    if kind == "default":
        params = {}
    sizes = {"rope_theta": theta, "partial_rotary_factor": partial} | {
        k: params.get(k, 1) for k in _ROPE_SIZES
    }
    for key, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e18:
            raise ModelError(
                f"{where}: rope's {key}={value!r} is not a positive number: fetch the file again"
            )
    dim = int(head_dim * partial)
    if not 2 <= dim <= head_dim or dim % 2:
        raise ModelError(
            f"{where}: rope turns {dim} dimensions (head_dim={head_dim}, partial_rotary_factor={partial}), "
            "not an even number of those of a head: fetch the file again"
        )
    return RopeConfig(theta=float(theta), dim=dim, kind=kind, params=params)


def first_id(value: Any) -> int | None:
    """The first of the token ids that a config gives under one name; None: it gives none."""
    ids = token_ids(value)
    return ids[0] if ids else None


def token_ids(*values: Any) -> tuple[int, ...]:
    """All token ids among values of a config, each once, in order."""
    out: dict[int, None] = {}
    for value in values:
        for token in value if isinstance(value, list) else [value]:
            if isinstance(token, int) and not isinstance(token, bool):
                out[token] = None
    return tuple(out)


def generation_config_from_folder(folder: Path) -> dict[str, float | int]:
    """Default sampling settings that `generation_config.json` states, or {}.

    Those of `GENERATION_FIELDS`, under the names of `SamplingParams`.

    Raises:
        ModelError: malformed file or a setting that is not a number.
    """
    path = folder / "generation_config.json"
    if not path.exists():
        return {}
    raw = read_json(path)
    out: dict[str, float | int] = {}
    for key, name in GENERATION_FIELDS.items():
        value = raw.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ModelError(f"{path}: {key}={value!r} is not a number: correct it or remove it")
        out[name] = value
    return out
