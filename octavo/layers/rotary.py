"""Rotary position embedding (RoPE, arXiv 2104.09864): frequencies, their scalings, and the table.

Frequencies are fixed when the model is built. Two scalings of Hugging Face's depend on the length of
the text (dynamic NTK, longrope); here they depend on `max_model_len` instead, so that a token's key
and value never depend on how long its request becomes: cached blocks stay valid, and a long
generation does not change its own past. With `max_model_len` at most the original context they equal
Transformers' for every text; beyond it, for texts of that length.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from octavo.errors import ConfigError, ModelError, first_line
from octavo.layers.layer import BuildContext, Layer
from octavo.models.config import RopeConfig

Frequencies = tuple[torch.Tensor, float]


def _base_frequencies(theta: float, dim: int) -> torch.Tensor:
    return 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))


def _default(rope: RopeConfig, max_position: int, max_model_len: int) -> Frequencies:
    return _base_frequencies(rope.theta, rope.dim), 1.0


def _linear(rope: RopeConfig, max_position: int, max_model_len: int) -> Frequencies:
    """Position interpolation (arXiv 2306.15595)."""
    return _base_frequencies(rope.theta, rope.dim) / rope.params["factor"], 1.0


def _dynamic(rope: RopeConfig, max_position: int, max_model_len: int) -> Frequencies:
    """NTK-aware scaling of the base for a context of `max_model_len`."""
    factor = rope.params["factor"]
    length = max(max_model_len, max_position)
    stretch = (factor * length / max_position) - (factor - 1)
    return _base_frequencies(rope.theta * stretch ** (rope.dim / (rope.dim - 2)), rope.dim), 1.0


def _llama3(rope: RopeConfig, max_position: int, max_model_len: int) -> Frequencies:
    """Llama 3.1: long wavelengths are interpolated, short ones kept, a smooth ramp between."""
    p = rope.params
    factor, low, high = p["factor"], p["low_freq_factor"], p["high_freq_factor"]
    original = p["original_max_position_embeddings"]
    inv_freq = _base_frequencies(rope.theta, rope.dim)
    turns = original * inv_freq / (2 * math.pi)  # full turns within the original context
    smooth = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - smooth) * inv_freq / factor + smooth * inv_freq, 1.0


def _yarn(rope: RopeConfig, max_position: int, max_model_len: int) -> Frequencies:
    """YaRN (arXiv 2309.00071): interpolation by part, and attention made sharper by a factor."""
    p, dim = rope.params, rope.dim
    original = p["original_max_position_embeddings"]
    factor = p.get("factor") or max_position / original

    def mscale(scale: float, weight: float = 1.0) -> float:
        return 0.1 * weight * math.log(scale) + 1.0 if scale > 1 else 1.0

    attention_factor = p.get("attention_factor")
    if attention_factor is None:
        if p.get("mscale") and p.get("mscale_all_dim"):
            attention_factor = mscale(factor, p["mscale"]) / mscale(factor, p["mscale_all_dim"])
        else:
            attention_factor = mscale(factor)

    def dimension(turns: float) -> float:
        """Where in the head a frequency makes that many turns within the original context."""
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    first, last = dimension(p.get("beta_fast") or 32), dimension(p.get("beta_slow") or 1)
    if p.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    if first == last:
        last += 0.001  # as Transformers: avoids a division by zero
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - first) / (last - first)).clamp(0, 1)
    inv_freq = _base_frequencies(rope.theta, dim)
    return inv_freq / factor * ramp + inv_freq * (1 - ramp), float(attention_factor)


def _longrope(rope: RopeConfig, max_position: int, max_model_len: int) -> Frequencies:
    """LongRoPE (arXiv 2402.13753): a divisor per frequency, of two sets; `max_model_len` chooses."""
    p = rope.params
    original = p["original_max_position_embeddings"]
    which = "long_factor" if max_model_len > original else "short_factor"
    divisors = torch.tensor(p[which], dtype=torch.float32)
    if divisors.shape != (rope.dim // 2,):
        raise ModelError(
            f"rope {which} has {divisors.numel()} numbers, not {rope.dim // 2} (half the rotated "
            "dimensions): the config is corrupt, fetch it again"
        )
    factor = p.get("factor") or max_position / original
    attention_factor = p.get("attention_factor")
    if attention_factor is None:
        attention_factor = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return _base_frequencies(rope.theta, rope.dim) / divisors, float(attention_factor)


_KINDS: dict[str, Callable[[RopeConfig, int, int], Frequencies]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}


def rope_frequencies(rope: RopeConfig, max_position_embeddings: int, max_model_len: int) -> Frequencies:
    """Inverse frequencies, float32 `[dim / 2]`, and the factor of the cosines and sines.

    Raises:
        ModelError: an unknown kind, or one whose numbers are missing or malformed.
    """
    if rope.kind not in _KINDS:
        raise ModelError(f"rope kind {rope.kind!r} is not supported: use one of {', '.join(_KINDS)}")
    try:
        inv_freq, factor = _KINDS[rope.kind](rope, max_position_embeddings, max_model_len)
    except KeyError as error:
        raise ModelError(f"rope kind {rope.kind!r} lacks {error}: fetch the config again") from None
    except (TypeError, ValueError, ArithmeticError, RuntimeError) as error:
        raise ModelError(f"rope kind {rope.kind!r} is malformed ({error}): fetch the config again") from None
    if not (torch.isfinite(inv_freq).all() and math.isfinite(factor)):
        raise ModelError(
            f"rope kind {rope.kind!r} with theta {rope.theta:g} and {rope.params} has no finite frequencies: "
            "fetch the config again"
        )
    return inv_freq, factor


def rope_variant(rope: RopeConfig, max_position_embeddings: int, max_model_len: int) -> dict[str, Any]:
    """What, besides the config, decides the frequencies: part of the root of the block keys.

    Empty but for the kinds that `max_model_len` fixes, so that other models share blocks between
    instances that differ in it.
    """
    if rope.kind == "dynamic":
        return {"length": max(max_model_len, max_position_embeddings)}
    if rope.kind == "longrope":
        return {"long": max_model_len > rope.params["original_max_position_embeddings"]}
    return {}


class RotaryEmbedding(Layer):
    """Table of cosines and sines for positions below `max_model_len`, shared by all layers.

    `cos_sin` is float32 `[max_model_len, dim]`: cosines in the first half, sines in the second,
    both times the scaling's attention factor. It stays float32 whatever the model's dtype, because
    bfloat16 cannot tell neighbouring positions apart.
    """

    cos_sin: torch.Tensor

    def __init__(self, rope: RopeConfig, max_position_embeddings: int):
        super().__init__()
        self.rope = rope
        self.max_position_embeddings = max_position_embeddings

    def create_weights(self, build: BuildContext, prefix: str) -> None:
        inv_freq, factor = rope_frequencies(self.rope, self.max_position_embeddings, build.max_model_len)
        if build.device.type == "meta":  # arithmetic there would import PyTorch's compiler: seconds, 100 MB
            table = torch.empty(build.max_model_len, 2 * len(inv_freq), device="meta")
            self.register_buffer("cos_sin", table, persistent=False)
            return
        inv_freq = inv_freq.to(build.device)
        try:
            positions = torch.arange(build.max_model_len, dtype=torch.float32, device=build.device)
            angles = torch.outer(positions, inv_freq)
            table = torch.cat((angles.cos(), angles.sin()), dim=-1) * factor
        except RuntimeError as error:  # PyTorch's for memory that cannot be had
            raise ConfigError(
                f"max_model_len={build.max_model_len} needs a rotary table that cannot be had "
                f"({first_line(error)}): lower max_model_len"
            ) from None
        self.register_buffer("cos_sin", table, persistent=False)
