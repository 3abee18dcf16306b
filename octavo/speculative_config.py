"""Settings of speculative decoding, with vLLM's field names: typed, documented, validated once."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

from octavo.config import make_config, setting, validate
from octavo.errors import ConfigError
from octavo.setting_values import json_object
from octavo.speculative.synthetic import from_length, from_marginals, parse_rates, show_rates
from octavo.vllm_names import DRAFTS, Foreign

METHODS: dict[str, str] = {
    "ngram": "looks up the newest tokens in the request's own text, and drafts what followed them there",
    "suffix": "drafts what followed the newest tokens most often, in the request or in earlier outputs",
    "draft_model": "lets a smaller model of the same vocabulary (`model`) go ahead",
    "pard": "the same, of a model that was taught to draft all tokens in one pass (PARD)",
    "eagle3": "lets an EAGLE-3 head (`model`) of the target draft from its hidden states",
}
"""What each method does, in the order of the documentation."""

MOST_DRAFTS = 32

WHOLE_MODELS = ("draft_model", "pard")
"""Methods whose `model` is a whole language model."""

_WITH_MODEL = (*WHOLE_MODELS, "eagle3")

_USED_BY: dict[str, tuple[str, ...]] = {
    "model": _WITH_MODEL,
    "revision": _WITH_MODEL,
    "quantization": _WITH_MODEL,
    "max_model_len": WHOLE_MODELS,
    "parallel_drafting": WHOLE_MODELS,
    "draft_confidence_threshold": ("draft_model", "eagle3"),
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
    """How tokens are drafted. Outputs never depend on it.

    Attributes:
        foreign: what becomes of vLLM's other fields.
    """

    foreign: ClassVar[Mapping[str, Foreign]] = DRAFTS

    method: str = setting("ngram", "What drafts tokens.", choices=tuple(METHODS))
    num_speculative_tokens: int = setting(
        5,
        "Most tokens drafted for a request and step; by default suffix_decoding_max_tree_depth with suffix.",
        low=1,
        high=MOST_DRAFTS,
    )
    model: str | None = setting(
        None, "Folder, GGUF file or hub id of the draft model (draft_model, pard), or of the head (eagle3)."
    )
    revision: str | None = setting(None, "Branch, tag or commit of a draft model from the hub.")
    quantization: str | None = setting(
        None, "How the draft's weights are stored: as the engine's setting of this name."
    )
    max_model_len: int | None = setting(
        None, "Tokens of the longest text that is drafted for; by default the draft model's context.", low=1
    )
    parallel_drafting: bool = setting(
        False, "With draft_model: the same as method pard, which always does. vLLM's way to write it."
    )
    adaptive: bool = setting(
        True,
        "Draft as many tokens as pay, by measured acceptance and times of steps, down to none; off: always "
        "num_speculative_tokens.",
    )
    draft_confidence_threshold: float | None = setting(
        None,
        "A draft ends before the token with which the product of the draft's own probabilities falls below "
        "this; 0: it doesn't; by default it is learned, where adaptive. Not with async_scheduling.",
        low=0.0,
        high=1.0,
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
    rejection_sample_method: str = setting(
        "standard",
        "Who judges drafts: the model (standard), or for benchmarks chance (synthetic): answers are not the "
        "model's then, and are marked.",
        choices=("standard", "synthetic"),
        aliases={"strict": "standard"},
    )
    synthetic_acceptance: list[float] | str | None = setting(
        None,
        "For benchmarks: how likely each draft is to stand if all before it do, as 0.8,0.6 or a list, one "
        "for each of num_speculative_tokens; makes rejection_sample_method synthetic.",
    )
    synthetic_acceptance_rates: list[float] | str | None = setting(
        None,
        "The same told otherwise, with rejection_sample_method synthetic: how likely each draft is to stand "
        "together with all before it.",
    )
    synthetic_acceptance_length: float | None = setting(
        None,
        "The same told by the mean tokens of a step, from 1 to num_speculative_tokens + 1.",
        low=1.0,
        high=MOST_DRAFTS + 1.0,
    )

    def __post_init__(self) -> None:
        validate(self)
        self._settle_synthetic()
        for spec in fields(self):
            value, users = getattr(self, spec.name), _USED_BY.get(spec.name, METHODS)
            if self.method not in users and value != spec.default:
                raise ConfigError(
                    f"method={self.method!r} has no {spec.name}, and {spec.name}={value!r} is given: leave "
                    f"it out, or take {' or '.join(users)}"
                )
        if self.parallel_drafting or self.method == "pard":
            self.method, self.parallel_drafting = "pard", True
        if self.method in _WITH_MODEL and self.model is None:
            kinds = "folder, GGUF file or hub id" if self.method == "draft_model" else "folder or hub id"
            raise ConfigError(f"method={self.method!r} needs a model: name its {kinds}")
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ConfigError(
                f"prompt_lookup_min={self.prompt_lookup_min} is above "
                f"prompt_lookup_max={self.prompt_lookup_max}: raise the latter"
            )

    def _settle_synthetic(self) -> None:
        """One value for synthetic acceptance, whichever way it was told: `synthetic_acceptance`, a list."""
        most, names = self.num_speculative_tokens, ("", "_rates", "_length")
        given = [n for n in (f"synthetic_acceptance{end}" for end in names) if getattr(self, n) is not None]
        if len(given) > 1:
            raise ConfigError(f"{given[0]} and {given[1]} are two names of one setting: leave one out")
        synthetic = self.rejection_sample_method == "synthetic"
        if not given:
            if synthetic:
                raise ConfigError(
                    "rejection_sample_method='synthetic' needs rates: give synthetic_acceptance, say 0.8,0.6"
                )
            return
        if not synthetic and given[0] != "synthetic_acceptance":
            raise ConfigError(
                f"{given[0]}={getattr(self, given[0])!r} is for rejection_sample_method='synthetic': give "
                "that too, or leave it out"
            )
        if self.synthetic_acceptance_length is not None:
            rates = from_length(self.synthetic_acceptance_length, most)
        elif self.synthetic_acceptance_rates is not None:
            rates = from_marginals(parse_rates(self.synthetic_acceptance_rates, given[0]), most)
        else:
            assert self.synthetic_acceptance is not None
            rates = parse_rates(self.synthetic_acceptance, given[0], most)
        self.rejection_sample_method, self.synthetic_acceptance = "synthetic", rates
        self.synthetic_acceptance_rates = self.synthetic_acceptance_length = None

    def describe(self, model: str | None = None) -> str:
        """One line for the log; `model` is what to call what drafts."""
        kind, model = "adaptively" if self.adaptive else "always", model or self.model
        name = self.method if model is None else f"{self.method} {model}"
        text = f"{name}, up to {self.num_speculative_tokens} tokens, {kind}"
        if self.synthetic_acceptance is None:
            return text
        return f"{text}, SYNTHETIC acceptance {show_rates(self.synthetic_acceptance)}"


def read_speculative_config(
    given: dict[str, Any] | str | None,
    model: str | None,
    num_tokens: int | None,
    synthetic: str | None = None,
) -> SpeculativeConfig | None:
    """The settings of a user, None where nothing is drafted.

    Args:
        given: `speculative_config`: fields, JSON text of an object, or the path of a file of such.
        model, num_tokens, synthetic: `speculative_model`, `num_speculative_tokens` and
            `speculative_synthetic_acceptance`, given beside it or alone.

    Raises:
        ConfigError: an unknown field or method, a bad value, or two values of one field.
    """
    values = dict(json_object("speculative_config", given, files=True) or {})
    for name, value in (
        ("model", model),
        ("num_speculative_tokens", num_tokens),
        ("synthetic_acceptance", synthetic),
    ):
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
    if values.keys() == {"synthetic_acceptance"} and given is None:
        raise ConfigError(
            f"speculative_synthetic_acceptance={synthetic!r} judges drafts, and nothing drafts: give "
            "speculative_config with a method"
        )
    if "method" not in values and "model" not in values:
        raise ConfigError(f"speculative_config names no method: give one of {', '.join(METHODS)}")
    values.setdefault("method", _method_of(values.get("model")))
    try:
        for name in ("synthetic_acceptance", "synthetic_acceptance_rates"):
            if values.get(name) is not None:  # as many drafts as rates, unless that is told
                values.setdefault("num_speculative_tokens", len(parse_rates(values[name], name)))
        depth = values.get("suffix_decoding_max_tree_depth", SpeculativeConfig.suffix_decoding_max_tree_depth)
        if values["method"] == "suffix" and isinstance(depth, int):
            values.setdefault("num_speculative_tokens", max(1, min(depth, MOST_DRAFTS)))
        if values["method"] == "ngram":  # one bound makes room for itself, if the other isn't told
            least, longest = values.get("prompt_lookup_min"), values.get("prompt_lookup_max")
            if longest is None and isinstance(least, int):
                values["prompt_lookup_max"] = max(least, SpeculativeConfig.prompt_lookup_max)
            elif least is None and isinstance(longest, int):
                values["prompt_lookup_min"] = max(1, min(longest, SpeculativeConfig.prompt_lookup_min))
        config: SpeculativeConfig = make_config(SpeculativeConfig, values)
        return config
    except ConfigError as error:
        names = ", ".join(spec.name for spec in fields(SpeculativeConfig))
        hint = f" (fields: {names})" if str(error).startswith("there is no") else ""
        raise ConfigError(f"speculative_config: {error}{hint}") from None


def _method_of(model: Any) -> str:
    """The method of a model without one: told by the name, as in vLLM, since heads are called so."""
    return "eagle3" if isinstance(model, str) and "eagle3" in Path(model).name.lower() else "draft_model"


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
