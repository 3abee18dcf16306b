"""What a model's generation config says of sampling, and what the settings say otherwise."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from octavo.errors import ConfigError, RequestError
from octavo.sampling_params import SamplingParams
from octavo.setting_values import json_object

GENERATION_FIELDS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""Fields of a generation_config.json that are read, and what `SamplingParams` calls them."""

_SETTING = "override_generation_config"


def read_override(given: dict[str, Any] | str | None) -> dict[str, Any] | None:
    """The setting `override_generation_config`, checked: values by the file's names.

    Args:
        given: the values, JSON text of them, or the path of a file of it.

    Raises:
        ConfigError: a field that is not read, or a value out of its bounds.
    """
    values = dict(json_object(_SETTING, given, files=True) or {})
    for name, value in values.items():
        if name not in GENERATION_FIELDS:
            near = difflib.get_close_matches(str(name), GENERATION_FIELDS, 1)
            hint = f"did you mean {near[0]}?" if near else f"give {', '.join(GENERATION_FIELDS)}"
            raise ConfigError(f"{_SETTING} has no field {name!s:.100}: {hint}")
        own = GENERATION_FIELDS[name]
        if value is None:
            continue
        try:
            values[name] = getattr(SamplingParams(**{own: value}), own)
        except RequestError as error:
            raise ConfigError(f"{_SETTING}: {str(error).replace(own, name, 1)}") from None
    return values or None


def overridden(stated: Mapping[str, Any], override: Mapping[str, Any] | None) -> dict[str, Any]:
    """The model's defaults with those of the settings in their place; both, and the result, under the names
    of `SamplingParams`, `override` under the file's."""
    ours = {GENERATION_FIELDS[name]: value for name, value in (override or {}).items()}
    return {name: value for name, value in {**stated, **ours}.items() if value is not None}
