"""Configs of models that run through Transformers' own code: who does, and their normal form.

Transformers is imported only here and in the modules beside this one, and only for such a model.
"""

from __future__ import annotations

from typing import Any

from octavo.errors import ConfigError, ModelError, OctavoError, first_line
from octavo.models.config import ModelConfig, RopeConfig
from octavo.models.hf_config import first_id, positive, stored_dtype, token_ids
from octavo.models.hf_families import FAMILIES
from octavo.quantization.read_config import read_quantization

FALLBACK, ENCODER = "transformers", "encoder"
_LONGEST = 1 << 31


def is_native(raw: dict[str, Any], model_impl: str) -> bool:
    """Whether a raw config is read, and its model run, by Octavo's own families.

    Args:
        model_impl: the setting: auto takes a family that knows the architecture, else Transformers.
    """
    if model_impl != "auto":
        return model_impl == "octavo"
    names = {str(name) for name in raw.get("architectures") or ()}
    return any(name in FAMILIES for name in names)


def with_head(raw: dict[str, Any]) -> dict[str, Any]:
    """The raw config of a family's bare decoder (`Qwen3Model`) as that of the model with its head; any other
    as it is."""
    names = [str(name) for name in raw.get("architectures") or ()]
    causal = [f"{name[: -len('Model')]}ForCausalLM" for name in names if name.endswith("Model")]
    both_sides = raw.get("use_bidirectional_attention") or raw.get("is_causal") is False
    if both_sides or not any(name in FAMILIES for name in causal):
        return raw
    return raw | {"architectures": causal}


def import_transformers() -> Any:
    """The library.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(
            f"this model runs through the transformers package, which cannot be imported ({error}): "
            "`pip install 'octavo[transformers]'`, or use a model of a built-in family"
        ) from None
    return transformers


def hf_config(raw: dict[str, Any], where: str = "config.json") -> Any:
    """Transformers' config object of a raw config.

    Raises:
        ModelError: a model type that the installed Transformers does not know, or values it refuses.
    """
    transformers = import_transformers()
    mapping = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    kind = raw.get("model_type")
    if not isinstance(kind, str) or kind not in mapping:
        raise ModelError(
            f"{where}: model_type {kind!r} is known neither to Octavo nor to transformers "
            f"{transformers.__version__}: use another model, or a newer transformers"
        )
    try:
        return mapping[kind].from_dict(dict(raw))
    except Exception as error:  # whatever a config class raises on values of a wrong kind
        raise ModelError(
            f"{where}: refused by transformers ({first_line(error)}): fetch the file again"
        ) from None


def model_config_from_raw(
    raw: dict[str, Any], generation: dict[str, Any] | None = None, where: str = "config.json"
) -> ModelConfig:
    """The normal form of a config that Transformers reads, its `implementation` set.

    Encoders (BERT and its like) get the implementation "encoder", decoders "transformers". Sizes that
    only this model's own code knows stay in `extra`, the raw config.

    Raises:
        ModelError: neither kind of model; the message says why.
        ConfigError: Transformers is missing.
    """
    if (found := read_quantization(raw, where)) is not None:
        raise ModelError(
            f"{where}: models that run through Transformers' code take no quantized weights "
            f"(this one is quantized by {found.format}): use the unquantized checkpoint"
        )
    config = hf_config(raw, where)
    architecture = _architecture(raw, config, where)
    try:
        return _normal_form(raw, generation, config, architecture, where)
    except OctavoError:
        raise
    except Exception as error:  # config classes have properties that raise
        raise ModelError(
            f"{where}: {architecture}'s config cannot be read ({first_line(error)}): use another model"
        ) from None


def _normal_form(
    raw: dict[str, Any], generation: dict[str, Any] | None, config: Any, architecture: str, where: str
) -> ModelConfig:
    text = config.get_text_config(decoder=True)
    encoder = not is_causal(architecture, config)
    if not getattr(text, "num_attention_heads", None):
        raise ModelError(
            f"{where}: {architecture} has no attention heads (num_attention_heads), so that it cannot run on "
            "paged attention: use another model"
        )
    heads = _size(text, "num_attention_heads", where)
    hidden = _size(text, "hidden_size", where)
    head_dim = _largest(_of_any_layer(text, "head_dim")) or hidden // heads
    positions = _positions(text, where)
    return ModelConfig(
        architecture=architecture,
        vocab_size=_size(text, "vocab_size", where),
        hidden_size=hidden,
        intermediate_size=_largest(getattr(text, "intermediate_size", None)) or 4 * hidden,
        num_layers=_size(text, "num_hidden_layers", where),
        num_heads=heads,
        num_kv_heads=int(getattr(text, "num_key_value_heads", None) or heads),
        head_dim=int(head_dim),
        max_position_embeddings=positions,
        rms_norm_eps=float(getattr(text, "rms_norm_eps", None) or 1e-6),
        rope=_rope(text, int(head_dim), positions),
        dtype=stored_dtype(raw, where),
        tie_word_embeddings=bool(getattr(config, "tie_word_embeddings", False)),
        implementation=ENCODER if encoder else FALLBACK,
        bos_token_id=first_id(raw.get("bos_token_id")),
        eos_token_ids=token_ids(raw.get("eos_token_id"), (generation or {}).get("eos_token_id")),
        extra=raw,
    )


def is_causal(architecture: str, config: Any) -> bool:
    """Whether an architecture is a decoder whose rows see only those before them."""
    if getattr(config, "use_bidirectional_attention", None) or getattr(config, "is_causal", None) is False:
        return False
    return causal_class(architecture, config) is not None


def causal_class(architecture: str, config: Any) -> type[Any] | None:
    """Transformers' class with an output head for a config, or None where there is no causal one."""
    transformers = import_transformers()
    auto = transformers.models.auto.modeling_auto
    names = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    if architecture in names:
        return getattr(transformers, architecture)
    if auto.MODEL_MAPPING_NAMES.get(config.model_type) != architecture or _encodes(config.model_type):
        return None
    mapping = auto.MODEL_FOR_CAUSAL_LM_MAPPING
    return mapping[type(config)] if type(config) in mapping else None


def _encodes(model_type: str) -> bool:
    """Whether models of a type are trained to fill in masked words, so that a bare one sees both sides."""
    auto = import_transformers().models.auto.modeling_auto
    return model_type in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES


def _architecture(raw: dict[str, Any], config: Any, where: str) -> str:
    """The class of a model that has only text to read and is not both encoder and decoder.

    Raises:
        ModelError: it has more, or names no class.
    """
    transformers = import_transformers()
    names = [str(name) for name in raw.get("architectures") or ()]
    name = next((name for name in names if hasattr(transformers, name)), None)
    shown = ", ".join(names) or f"model_type {raw.get('model_type')}"
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(
            f"{where}: {shown} is an encoder with a decoder, which is not supported: use a decoder"
        )
    for other in ("vision_config", "audio_config", "speech_config"):
        if getattr(config, other, None) is not None:
            raise ModelError(
                f"{where}: {shown} also takes {other.partition('_')[0]} input, which is not supported: "
                "use its text model"
            )
    if name is None:
        auto = transformers.models.auto.modeling_auto
        name = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
        name = name or auto.MODEL_MAPPING_NAMES.get(config.model_type)
    if not isinstance(name, str):
        raise ModelError(f"{where}: {shown} is not a class of transformers {transformers.__version__}")
    return name


def _positions(config: Any, where: str) -> int:
    """Longest text in tokens; RoBERTa and its like number positions from behind the padding token's."""
    for key in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"):
        value = getattr(config, key, None)
        if isinstance(value, int) and 0 < value < _LONGEST:
            offset = (config.pad_token_id or 0) + 1 if config.model_type in _OFFSET_POSITIONS else 0
            return value - offset
    raise ModelError(
        f"{where}: states no longest text (max_position_embeddings), as models without positions of their "
        "own (ALiBi) or with a recurrent state do, which are not supported: use another model"
    )


_OFFSET_POSITIONS = {
    "roberta",
    "xlm-roberta",
    "xlm-roberta-xl",
    "camembert",
    "mpnet",
    "data2vec-text",
    "roberta-prelayernorm",
    "longformer",
    "ibert",
    "esm",
}


def _rope(config: Any, head_dim: int, positions: int) -> RopeConfig:
    """The rotary positions, as far as the context's length and the block keys depend on them."""
    given = getattr(config, "rope_parameters", None) or {}
    if any(isinstance(value, dict) for value in given.values()):
        given = given.get("full_attention") or {}
    params = {key: value for key, value in given.items() if value is not None}
    kind, theta = params.pop("rope_type", None) or "default", params.pop("rope_theta", None) or 10000.0
    if kind in ("dynamic", "longrope", "llama3", "yarn"):
        original = getattr(config, "original_max_position_embeddings", None)
        params.setdefault("original_max_position_embeddings", original or positions)
    return RopeConfig(theta=float(theta), dim=head_dim, kind=str(kind), params=params)


def _of_any_layer(config: Any, key: str) -> Any:
    """An attribute, or the list of its values where the config class holds one for each layer alone."""
    try:
        return getattr(config, key, None)
    except Exception:  # a class of Transformers' own, which its older versions lack
        return [getattr(config.per_layer_config[i], key) for i in range(config.num_hidden_layers)]


def _largest(size: Any) -> int | None:
    """A size, or the largest where a config has a list of one for each layer."""
    return max(map(int, size), default=None) if isinstance(size, (list, tuple)) else size


def _size(config: Any, key: str, where: str) -> int:
    return positive({key: getattr(config, key, None)}, key, where)
