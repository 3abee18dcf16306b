"""Settings of speculative decoding, with vLLM's field names: typed, documented, validated once."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from octavo.config import make_config, setting, validate
from octavo.errors import ConfigError

METHODS: dict[str, str] = {
    "ngram": "looks up the newest tokens in the request's own text, and drafts what followed them there",
    "suffix": "drafts what followed the newest tokens most often, in the request or in earlier outputs",
    "draft_model": "lets a smaller model of the same vocabulary (`model`) go ahead",
    "eagle3": "lets an EAGLE-3 head (`model`) of the target draft from its hidden states",
}
"""What each method does, in the order of the documentation."""

MOST_DRAFTS = 32

_USED_BY: dict[str, tuple[str, ...]] = {
    "model": ("draft_model", "eagle3"),
    "revision": ("draft_model", "eagle3"),
    "quantization": ("draft_model", "eagle3"),
    "prompt_lookup_min": ("ngram",),
    "prompt_lookup_max": ("ngram",),
    "suffix_decoding_max_tree_depth": ("suffix",),
    "suffix_decoding_max_cached_requests": ("suffix",),
    "suffix_decoding_max_spec_factor": ("suffix",),
    "suffix_decoding_min_token_prob": ("suffix",),
}
"""Fields that some methods alone use."""


@dataclass
class SpeculativeConfig:
    """How tokens are drafted. Outputs never depend on it."""

    method: str = setting("ngram", "What drafts tokens.", choices=tuple(METHODS))
    num_speculative_tokens: int = setting(
        5,
        "Most tokens drafted for a request and step; by default suffix_decoding_max_tree_depth with suffix.",
        low=1,
        high=MOST_DRAFTS,
    )
    model: str | None = setting(
        None, "Folder, GGUF file or hub id of the draft model (draft_model), or of the head (eagle3)."
    )
    revision: str | None = setting(None, "Branch, tag or commit of a draft model from the hub.")
    quantization: str | None = setting(
        None, "How the draft's weights are stored: as the engine's setting of this name."
    )
    adaptive: bool = setting(
        True,
        "Draft as many tokens as pay, by measured acceptance and times of steps, down to none; off: always "
        "num_speculative_tokens.",
    )
    prompt_lookup_min: int = setting(2, "Fewest tokens that must be found again (ngram).", low=1, high=64)
    prompt_lookup_max: int = setting(5, "Most tokens that are looked for (ngram).", low=1, high=64)
    suffix_decoding_max_tree_depth: int = setting(
        24, "Most tokens that are looked for (suffix).", low=1, high=64
    )
    suffix_decoding_max_cached_requests: int = setting(
        10000,
        "Earlier requests whose outputs are searched (suffix), the newest, of two million tokens at most; 0: "
        "the request's own text alone.",
        low=0,
    )
    suffix_decoding_max_spec_factor: float = setting(
        1.0, "Most tokens of a draft for each one that was found again (suffix).", low=0.1, high=MOST_DRAFTS
    )
    suffix_decoding_min_token_prob: float = setting(
        0.1,
        "A draft ends where the share of places at which all of it followed falls below this (suffix).",
        low=0.0,
        high=1.0,
    )

    def __post_init__(self) -> None:
        validate(self)
        for spec in fields(self):
            value, users = getattr(self, spec.name), _USED_BY.get(spec.name, METHODS)
            if self.method not in users and value != spec.default:
                raise ConfigError(
                    f"method={self.method!r} has no {spec.name}, and {spec.name}={value!r} is given: leave "
                    f"it out, or take {' or '.join(users)}"
                )
        if self.method in _USED_BY["model"] and self.model is None:
            kinds = "folder or hub id" if self.method == "eagle3" else "folder, GGUF file or hub id"
            raise ConfigError(f"method={self.method!r} needs a model: name its {kinds}")
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ConfigError(
                f"prompt_lookup_min={self.prompt_lookup_min} is above "
                f"prompt_lookup_max={self.prompt_lookup_max}: raise the latter"
            )

    def describe(self) -> str:
        """One line for the log."""
        kind = "adaptively" if self.adaptive else "always"
        name = self.method if self.model is None else f"{self.method} {self.model}"
        return f"{name}, up to {self.num_speculative_tokens} tokens, {kind}"


def read_speculative_config(
    given: dict[str, Any] | str | None, model: str | None, num_tokens: int | None
) -> SpeculativeConfig | None:
    """The settings of a user, None where nothing is drafted.

    Args:
        given: `speculative_config`: fields, JSON text of an object, or the path of a file of such.
        model, num_tokens: `speculative_model` and `num_speculative_tokens`, given beside it or alone.

    Raises:
        ConfigError: an unknown field or method, a bad value, or two values of one field.
    """
    values = {} if given is None else dict(given) if isinstance(given, dict) else _parse(given)
    for name, value in (("model", model), ("num_speculative_tokens", num_tokens)):
        if value is None:
            continue
        if values.get(name, value) != value:
            raise ConfigError(
                f"speculative_config has {name}={values[name]!r}, beside it {value!r} is given: leave one out"
            )
        values[name] = value
    if not values:
        if given is None:
            return None
        raise ConfigError(f"speculative_config={given!r} names no method: give one of {', '.join(METHODS)}")
    if "method" not in values and "model" not in values:
        raise ConfigError(f"speculative_config names no method: give one of {', '.join(METHODS)}")
    values.setdefault("method", "draft_model")
    try:
        config = make_config(SpeculativeConfig, values)
        if config.method == "suffix" and "num_speculative_tokens" not in values:
            depth = config.suffix_decoding_max_tree_depth
            config = replace(config, num_speculative_tokens=min(depth, MOST_DRAFTS))
        return config
    except ConfigError as error:
        names = ", ".join(spec.name for spec in fields(SpeculativeConfig))
        hint = f" (fields: {names})" if str(error).startswith("there is no") else ""
        raise ConfigError(f"speculative_config: {error}{hint}") from None


def plain(config: SpeculativeConfig) -> dict[str, Any]:
    """The settings as a dictionary that `read_speculative_config` takes."""
    return asdict(config)


def describe_fields() -> str:
    """What `--help-speculative` prints: methods, and every field with its meaning, default and bounds."""
    lines = ["speculative_config: a JSON object (or the path of a file of one) with these fields.", ""]
    for spec in fields(SpeculativeConfig):
        meta = spec.metadata
        low, high = meta["low"], meta["high"]
        bounds = f", {low} to {high}" if low is not None and high is not None and math.isfinite(high) else ""
        lines.append(f"  {spec.name} (default {json.dumps(spec.default)}{bounds})")
        lines.append(f"      {meta['help']}")
        if spec.name == "method":
            lines += [f"      {name}: {text}" for name, text in METHODS.items()]
    return "\n".join(lines)


def _parse(text: str) -> dict[str, Any]:
    path = Path(text)
    if not text.lstrip().startswith("{"):
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"speculative_config={str(path)!r} is neither a JSON object nor a readable file ({error})"
            ) from None
    try:
        values = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"speculative_config is not JSON ({error}): {text[:100]!r}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"speculative_config={text[:100]!r} is not a JSON object")
    return values
