"""Tiny models as Transformers builds, saves and runs them."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

from tests.tiny.tokenizer import save_tokenizer
from tests.tiny.variants import BASE, BOS, EOS, PROMPTS, VARIANTS

NEW_TOKENS = 64
MIN_DISTINCT = 20
MIN_GAP = 1e-3
# What Gemma's norms multiply by is 1 more than their weights. Its embedding is scaled up, and its
# likeness to the tied head would repeat each token for ever: it is small here, the last norm large.
_GEMMA_NORMS = {"post_attention_layernorm": 1.0, "post_feedforward_layernorm": 1.0, "norm": 5.0}
_GEMMA_EMBEDDING = 0.04


@functools.cache
def root() -> Path:
    """The folder of this process's tiny models."""
    path = Path(tempfile.mkdtemp(prefix="tiny-models-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


def build(variant: str, seed: int | None = None, **changes: Any) -> Any:
    """The Transformers model of a variant, float32, in eval mode, with weights by `seed`.

    `changes` override the config. Norms and biases are random too, so that leaving one out shows.
    """
    import transformers

    prefix, overrides, own_seed = VARIANTS[variant]
    config_class = getattr(transformers, f"{prefix}Config")
    config = config_class(**{**BASE, **overrides, **changes})
    config.dtype = torch.float32
    config._attn_implementation = "eager"  # the only one that caps scores
    prefix = prefix.removesuffix("Text")
    model = getattr(transformers, f"{prefix}ForCausalLM")(config).eval()
    gemma = prefix.startswith("Gemma")
    generator = torch.Generator().manual_seed(own_seed if seed is None else seed)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            noise = torch.randn(weight.shape, generator=generator)
            if name.endswith(".bias"):
                weight.copy_(0.3 * noise)
            elif "norm" in name:
                mean = _GEMMA_NORMS.get(name.split(".")[-2], 0.0) if gemma else 1.0
                weight.copy_(mean + 0.2 * noise)
            elif name.endswith(("embed_tokens.weight", "lm_head.weight")):
                weight.copy_((_GEMMA_EMBEDDING if gemma else 0.3) * noise)
            else:
                weight.copy_(noise * 1.2 / weight.shape[-1] ** 0.5)
        for name, buffer in sorted(model.named_buffers()):
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))
    model.generation_config.bos_token_id = BOS
    model.generation_config.eos_token_id = EOS
    return model


@functools.cache
def reference(variant: str) -> Any:
    """The Transformers model of a variant, built once."""
    return build(variant)


@functools.cache
def checkpoint(variant: str) -> Path:
    """The folder of a variant, written once."""
    folder = root() / variant
    reference(variant).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


@torch.no_grad()
def logits(variant: str, ids: list[int]) -> torch.Tensor:
    """Transformers' logits at every position, float32 `[len(ids), VOCAB_SIZE]`."""
    return reference(variant)(torch.tensor([ids])).logits[0]


@functools.cache
def greedy(variant: str, prompt: int, count: int = NEW_TOKENS) -> list[int]:
    """Transformers' greedy continuation of `PROMPTS[prompt]`, EOS not heeded."""
    return _greedy(reference(variant), PROMPTS[prompt], count)[0]


@torch.no_grad()
def _greedy(model: Any, prompt: list[int], count: int) -> tuple[list[int], float, float]:
    """Tokens, the smallest lead of a chosen token, the smallest deviation of a step's logits."""
    out, cache, ids = [], None, torch.tensor([prompt])
    gap = spread = float("inf")
    for _ in range(count):
        result = model(ids, past_key_values=cache, use_cache=True)
        cache, row = result.past_key_values, result.logits[0, -1]
        first, second = row.topk(2).values.tolist()
        gap, spread = min(gap, first - second), min(spread, float(row.std()))
        out.append(int(row.argmax()))
        ids = torch.tensor([[out[-1]]])
    return out, gap, spread


def is_good(model: Any) -> bool:
    """Whether a model meets what the module promises, for every prompt."""
    for prompt in PROMPTS:
        tokens, gap, spread = _greedy(model, prompt, NEW_TOKENS)
        if len(set(tokens)) < MIN_DISTINCT or gap <= 2 * MIN_GAP or spread < 1.0:
            return False
    return True
