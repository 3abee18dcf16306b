"""Recipes: a modifier in Python, or llm-compressor's YAML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from octavo.errors import ConfigError
from octavo.quantization.compress.modifiers import QuantizationModifier, known_modifiers, modifier_of
from octavo.quantization.compress.nearest import hint

_MOST_BYTES = 1 << 20
Recipe = QuantizationModifier | Sequence[QuantizationModifier] | str | Path


def read_recipe(recipe: Recipe) -> QuantizationModifier:
    """The one modifier of a recipe.

    Args:
        recipe: it, or in a list; YAML (a text of several lines), or the path of a file of it.

    Raises:
        ConfigError: malformed, a word that there is not, or several modifiers.
    """
    if isinstance(recipe, QuantizationModifier):
        return recipe
    if isinstance(recipe, (str, Path)):
        found = _modifiers(_parse(*_text(recipe)))
    else:
        found = list(recipe)
    for one in found:
        if not isinstance(one, QuantizationModifier):
            raise ConfigError(f"recipe: {one!r} is no modifier: give a QuantizationModifier")
    if len(found) != 1:
        raise ConfigError(
            f"a recipe of {len(found)} modifiers is not supported: give one QuantizationModifier"
        )
    return found[0]


def recipe_text(modifier: QuantizationModifier) -> str:
    """The modifier as YAML, which `read_recipe` reads."""
    import yaml

    values: dict[str, Any] = {"targets": _plain(modifier.targets)}
    if modifier.scheme is not None:
        values["scheme"] = modifier.scheme
    if modifier.group_size is not None:
        values["group_size"] = modifier.group_size
    if modifier.config_groups is not None:
        values["config_groups"] = _plain(modifier.config_groups)
    values["ignore"] = _plain(modifier.ignore)
    stages = {"default_stage": {"default_modifiers": {"QuantizationModifier": values}}}
    return yaml.safe_dump(stages, sort_keys=False)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    return value


def _text(recipe: str | Path) -> tuple[str, str]:
    """YAML, and what to call it in messages."""
    if isinstance(recipe, str) and "\n" in recipe:
        return recipe, "recipe"
    path = Path(recipe).expanduser()
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ConfigError(f"recipe={str(path)!r} is larger than a recipe: name a YAML file")
        return path.read_text("utf-8"), str(path)
    except OSError as error:
        raise ConfigError(f"recipe={str(path)!r} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"recipe={str(path)!r} is no text: name a YAML file") from None


def _parse(text: str, where: str) -> Any:
    import yaml

    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        problem = " ".join(str(error).split())[:200]
        raise ConfigError(f"{where}: no YAML ({problem}): correct it") from None


def _modifiers(raw: Any) -> list[QuantizationModifier]:
    """Those of stages (`NAME_stage: {NAME_modifiers: {Modifier: …}}`), or of modifiers without one."""
    if isinstance(raw, list):
        return [modifier for entry in raw for modifier in _modifiers(entry)]
    if not isinstance(raw, dict):
        raise ConfigError("recipe: no mapping: write `QuantizationModifier:` and its settings below it")
    found = []
    for name, value in raw.items():
        if str(name).endswith(("_stage", "_modifiers")):
            found += _modifiers(value)
        elif str(name).endswith("Modifier"):
            if not isinstance(value, dict):
                raise ConfigError(f"recipe: {name} has no settings: write scheme and ignore below it")
            found.append(modifier_of(str(name), {str(key): one for key, one in value.items()}))
        else:
            words = ("default_stage", "default_modifiers", *known_modifiers())
            raise ConfigError(f"recipe: {name!r} is not known: {hint(name, words)}")
    return found
