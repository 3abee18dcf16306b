"""Whether a model makes embeddings, and how: from the settings and the files of sentence-transformers.

Format: https://sbert.net/docs/sentence_transformer/usage/custom_models.html (`modules.json` names a
sentence's way through the modules; each has a folder with its config).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from octavo.config import EngineConfig
from octavo.errors import ConfigError, ModelError
from octavo.models.config import ModelConfig
from octavo.models.json_file import read_json, read_value
from octavo.models.locate import ModelSource
from octavo.models.transformers_config import ENCODER
from octavo.setting_values import json_object

POOLING_TYPES = ("LAST", "MEAN", "CLS")
# The flags of older pooling configs, and the word of newer ones.
_MODES = {
    "pooling_mode_lasttoken": "LAST",
    "pooling_mode_mean_tokens": "MEAN",
    "pooling_mode_cls_token": "CLS",
    "lasttoken": "LAST",
    "mean": "MEAN",
    "cls": "CLS",
}
# llama.cpp's numbers: https://github.com/ggml-org/llama.cpp/blob/master/include/llama.h
_GGUF_POOLING = {1: "MEAN", 2: "CLS", 3: "LAST"}


@dataclass(frozen=True)
class PoolingSettings:
    """How a model's token vectors become embeddings.

    Attributes:
        pooling_type: LAST, MEAN or CLS (the last token's vector, the mean of all, the first one's).
        normalize: whether embeddings get length 1.
        prompts: texts that are put before others, by name ("query", "document", …).
        default_prompt: name of the one that is used where none is asked for.
        max_length: tokens of the longest text, if the files bound it further than the model does.
        lower_case: whether texts are lower-cased first.
    """

    pooling_type: str
    normalize: bool
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    max_length: int | None = None
    lower_case: bool = False


def pooling_settings(config: EngineConfig, source: ModelSource, model: ModelConfig) -> PoolingSettings | None:
    """How a model makes embeddings, or None where it makes texts.

    Raises:
        ConfigError: `runner` or `pooler_config` don't fit.
        ModelError: files of sentence-transformers that ask for something else.
    """
    if not _makes_embeddings(config, source, model):
        if config.pooler_config is not None:
            raise ConfigError(
                f"pooler_config is given, but {source.name} makes texts: set runner='pooling', or leave "
                "it out"
            )
        return None
    default = "MEAN" if model.implementation == ENCODER else "LAST"
    found = PoolingSettings(default, normalize=True)
    given = _parsed(config.pooler_config)
    if source.kind == "folder":
        found = _from_files(source.path, found, given.get("pooling_type"))
    elif (kind := _gguf_pooling(model)) is not None and "pooling_type" not in given:
        if kind not in _GGUF_POOLING:
            raise ModelError(
                f"{source.name}: pooling_type {kind!r} is not supported: give pooler_config to choose one of "
                f"{', '.join(POOLING_TYPES)}"
            )
        found = replace(found, pooling_type=_GGUF_POOLING[kind])
    return replace(
        found,
        pooling_type=given.get("pooling_type", found.pooling_type),
        normalize=given.get("normalize", found.normalize),
    )


def _makes_embeddings(config: EngineConfig, source: ModelSource, model: ModelConfig) -> bool:
    if config.runner == "generate":
        if model.implementation == ENCODER:
            raise ConfigError(
                f"runner='generate': {source.name} is a {model.architecture}, which has no next token to "
                "tell: use it with runner='pooling', or name another model"
            )
        return False
    if config.runner == "pooling" or model.implementation == ENCODER:
        return True
    if source.kind != "folder":
        return _gguf_pooling(model) is not None
    names = [str(name) for name in model.extra.get("architectures") or ()]
    bare = bool(names) and names[0].endswith("Model") and not names[0].endswith("LMHeadModel")
    return bare or (source.path / "modules.json").is_file()


def _gguf_pooling(model: ModelConfig) -> Any:
    """What a GGUF file's metadata says of pooling, None where it makes texts."""
    found = (value for key, value in model.extra.items() if key.endswith(".pooling_type"))
    return next(found, None) or None


def _parsed(given: dict[str, Any] | str | None) -> dict[str, Any]:
    """The user's pooler_config, checked."""
    out = dict(json_object("pooler_config", given) or {})
    for key in out:
        if key not in ("pooling_type", "normalize"):
            raise ConfigError(f"pooler_config has {key!r}: give pooling_type and normalize")
    if "pooling_type" in out:
        kind = out["pooling_type"]
        out["pooling_type"] = str(kind).upper()
        if out["pooling_type"] not in POOLING_TYPES:
            raise ConfigError(f"pooling_type={kind!r} is not known: choose {', '.join(POOLING_TYPES)}")
    if "normalize" in out and not isinstance(out["normalize"], bool):
        raise ConfigError(f"pooler_config's normalize={out['normalize']!r} is not valid: give true or false")
    return out


def _from_files(folder: Path, found: PoolingSettings, chosen: str | None = None) -> PoolingSettings:
    """What modules.json and its companions say, but for the pooling where the user has `chosen` one."""
    if (folder / "sentence_bert_config.json").is_file():
        raw = read_json(folder / "sentence_bert_config.json")
        length = raw.get("max_seq_length")
        if isinstance(length, int) and not isinstance(length, bool) and length > 0:
            found = replace(found, max_length=length)
        found = replace(found, lower_case=bool(raw.get("do_lower_case", False)))
    if (folder / "config_sentence_transformers.json").is_file():
        raw = read_json(folder / "config_sentence_transformers.json")
        prompts = raw.get("prompts") or {}
        if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
            raise ModelError(
                f"{folder / 'config_sentence_transformers.json'}: prompts are no texts: correct the file"
            )
        default = raw.get("default_prompt_name") or None
        if default is not None and (not isinstance(default, str) or default not in prompts):
            raise ModelError(
                f"{folder / 'config_sentence_transformers.json'}: default_prompt_name={default!r} is not "
                f"one of its prompts ({', '.join(prompts) or 'none'}): correct the file"
            )
        found = replace(found, prompts=prompts, default_prompt=default)
    path = folder / "modules.json"
    if not path.is_file():
        return found
    modules = read_value(path)
    try:
        kinds = [(str(module["type"]).rpartition(".")[2], str(module["path"])) for module in modules]
    except (TypeError, KeyError):
        raise ModelError(f"{path}: no list of modules with type and path: fetch the file again") from None
    found = replace(found, normalize=any(kind == "Normalize" for kind, _ in kinds))
    for kind, where in kinds:
        if kind == "Pooling":
            if ".." in Path(where).parts or Path(where).is_absolute():
                raise ModelError(f"{path}: path {where!r} leads out of the folder: correct the file")
            pooling = folder / where / "config.json"
            found = replace(found, pooling_type=chosen or _mode(pooling))
            if found.prompts and read_json(pooling).get("include_prompt") is False:
                raise ModelError(
                    f"{pooling}: include_prompt=false (vectors of the prompt are left out) is not supported: "
                    "use another model"
                )
        elif kind not in ("Transformer", "Normalize"):
            raise ModelError(f"{path}: module {kind} is not supported: use a model without it")
    return found


def _mode(path: Path) -> str:
    """The one way of pooling that a Pooling module's config asks for."""
    raw = read_json(path)
    modes = [key for key, value in raw.items() if key.startswith("pooling_mode_") and value is True]
    if isinstance(raw.get("pooling_mode"), str):
        modes.append(raw["pooling_mode"])
    if len(modes) != 1 or modes[0] not in _MODES:
        raise ModelError(
            f"{path}: pools by {', '.join(modes) or 'nothing'}: only one of {', '.join(POOLING_TYPES)} is "
            "supported; give pooler_config to choose another"
        )
    return _MODES[modes[0]]
