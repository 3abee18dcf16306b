"""One row at a time, in Python and float64: what the batched sampler is held against."""

from __future__ import annotations

import math

import numpy as np

from octavo.sampling_params import SamplingParams
from octavo.step_messages import Admission

MASK32, MASK64 = (1 << 32) - 1, (1 << 64) - 1


def splitmix64(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK64
    return x ^ (x >> 31)


def keys(seed: int, position: int) -> tuple[int, int]:
    key = splitmix64((splitmix64(seed & MASK64) + position * 0x9E3779B97F4A7C15) & MASK64)
    return key & MASK32, key >> 32


def judgement(seed: int, position: int) -> float:
    """By what synthetic acceptance judges the draft at a position."""
    state = splitmix64(splitmix64(seed & MASK64) ^ 0xA0761D6478BD642F)
    return (splitmix64((state + position * 0x9E3779B97F4A7C15) & MASK64) >> 11) * 2.0**-53


def uniform(v: int, k0: int, k1: int) -> float:
    x = (v * 0x9E3779B1 + k0) & MASK32
    x ^= x >> 16
    x = (x * 0x21F0AAAD) & MASK32
    x ^= x >> 15
    x ^= k1
    x = (x * 0x735A2D97) & MASK32
    x ^= x >> 15
    return ((x >> 9) + 0.5) * 2.0**-23


def admission(
    slot: int,
    tokens: list[int],
    prompt_len: int,
    params: SamplingParams,
    seed: int = 0,
    eos: tuple[int, ...] = (),
    bad: tuple[tuple[int, ...], ...] = (),
) -> Admission:
    return Admission(
        slot=slot,
        token_ids=np.array(tokens, np.int32),
        prompt_len=prompt_len,
        num_computed=0,
        block_ids=[],
        params=params,
        seed=seed,
        eos_token_ids=list(eos),
        bad_words_ids=[list(word) for word in bad],
    )


def processed(logits: np.ndarray, request: Admission, tokens: list[int]) -> np.ndarray:
    """float64 logits after bias … penalties, given the known tokens."""
    x = logits.astype(np.float64)
    p = request.params
    output = tokens[request.prompt_len :]
    for token, value in (p.logit_bias or {}).items():
        x[token] += value
    if p.allowed_token_ids:
        for token in range(len(x)):
            if token not in p.allowed_token_ids:
                x[token] = -math.inf
    for word in request.bad_words_ids:
        before = word[:-1]
        if len(output) >= len(before) and output[len(output) - len(before) :] == before:
            x[word[-1]] = -math.inf
    if len(output) < p.min_tokens:
        for token in [*request.eos_token_ids, *(p.stop_token_ids or [])]:
            x[token] = -math.inf
    for token in set(tokens):
        x[token] = x[token] / p.repetition_penalty if x[token] > 0 else x[token] * p.repetition_penalty
    for token in set(output):
        x[token] -= p.frequency_penalty * output.count(token) + p.presence_penalty
    return x


def kept(x: np.ndarray, p: SamplingParams) -> np.ndarray:
    """bool: what min_p, top_k, top_p leave of logits that were divided by the temperature."""
    keep = np.isfinite(x)
    if p.min_p > 0:
        keep &= x >= x.max() + math.log(p.min_p)
    if p.top_k and keep.sum() > p.top_k:
        keep &= x >= np.sort(x[keep])[-p.top_k]
    if p.top_p < 1:
        order = sorted(np.flatnonzero(keep), key=lambda i: -x[i])
        weights = np.exp(x - x.max())
        total, reached = weights[keep].sum(), 0.0
        for i in order:
            reached += weights[i]
            if reached >= p.top_p * total:
                keep &= x >= x[i]
                break
    return keep


def sample(logits: np.ndarray, request: Admission, tokens: list[int]) -> int:
    x = processed(logits, request, tokens)
    p = request.params
    if p.greedy:
        return int(x.argmax())
    x = x / p.temperature
    keep = kept(x, p)
    k0, k1 = keys(request.seed, len(tokens))
    scores = [x[v] - math.log(-math.log(uniform(v, k0, k1))) if keep[v] else -math.inf for v in range(len(x))]
    return int(np.argmax(scores))
