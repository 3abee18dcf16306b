"""Scales of FP8 KV caches: from the checkpoint, or by calibration while the model is loaded.

Calibration computes a fixed text once with an unquantized cache and reads from it the largest size of any
key and of any value, by layer and KV head. A scale is the power of two that puts twice that within the
format's range: FP8 numbers are as exact at any scale, so that the room costs nothing, and a power of two is
the same although sums are rounded otherwise with other threads (the scales enter the keys of KV blocks).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from octavo.errors import ModelError
from octavo.kernels.reference_kv import FP8_LARGEST
from octavo.layers.attention import AttentionMetadata
from octavo.layers.attention_layer import FP8, Attention
from octavo.parallel.state import TensorParallelGroup

if TYPE_CHECKING:
    from octavo.models.interface import CausalLM
    from octavo.tokenization.tokenizer import Tokenizer

# How much larger than those of the fixed text a text's numbers may be: the rotation alone may move the length
# of a pair of elements into one of them.
MARGIN = 2.0
MAX_TOKENS = 512
_RANDOM_TOKENS = 256

TEXT = """The lighthouse keeper counted 1,284 steps before breakfast. "Every morning," she wrote in her log, \
"the fog rolls in from the west at 6:40, and by noon it is gone." On 3 March 1897 the barometer fell to \
28.91 inches; two ships, the Aurora and the St. Brendan, waited outside the harbour until the wind turned.

def median(values: list[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2

{"name": "Zoë", "age": 41, "tags": ["a-b", "c/d"], "balance": -17.5, "active": true, "note": null}

Question: If a train leaves at 14:05 and travels 210 km at 84 km/h, when does it arrive?
Answer: 210 / 84 = 2.5 hours, so it arrives at 16:35. **Check**: 2.5 × 84 = 210 ✓

Der Fluss war über Nacht gestiegen; niemand im Dorf hatte damit gerechnet. La bibliothèque ferme à dix-huit \
heures, sauf le jeudi. 春天来了，院子里的桃树开满了花。Вчера вечером шёл снег. 今日はとても静かな朝です。

SELECT city, COUNT(*) AS n FROM visits WHERE year >= 2019 GROUP BY city ORDER BY n DESC LIMIT 10;
<p class="lead">Prices rose by 4.2% in the second quarter, the bank's economists said, and may rise again.</p>
"""


@dataclass(frozen=True)
class KVScales:
    """Where the scales of a model's FP8 cache are from (for the log), and a digest of them in hexadecimal."""

    origin: str
    digest: str


@dataclass(frozen=True)
class CalibrationTokens:
    """Token ids to calibrate on, and what they are, for the log."""

    ids: list[int]
    kind: str


def text_tokens(tokenizer: Tokenizer, vocab_size: int, most: int) -> CalibrationTokens:
    """The fixed text by a model's tokenizer, in at most `most` tokens."""
    ids = [i for i in tokenizer.encode(TEXT) if i < vocab_size][: min(most, MAX_TOKENS)]
    return CalibrationTokens(ids, "of a built-in text")


def random_tokens(vocab_size: int, most: int) -> CalibrationTokens:
    """For a model without a tokenizer: ids all over the vocabulary, the same ones every time."""
    return CalibrationTokens(
        [(i * 2654435761 + 40503) % (1 << 32) % vocab_size for i in range(min(most, _RANDOM_TOKENS))],
        "at random (no tokenizer)",
    )


def settle_kv_scales(
    model: CausalLM,
    dtype: torch.dtype,
    tokens: Callable[[], CalibrationTokens],
    group: TensorParallelGroup,
) -> KVScales | None:
    """See that every attention layer of a loaded model has its scales: those that no checkpoint gave are
    calibrated.

    Args:
        model: with its weights.
        dtype: of its activations, in which the calibration's cache is.
        tokens: what to calibrate on, called if something is to be calibrated.
        group: the ranks, each of which has the scales of its own heads; the digest is of all heads'.

    Returns:
        None where the cache is not FP8.

    Raises:
        ModelError: the model computes numbers that are not finite.
    """
    layers = [x for x in model.attention_layers() if isinstance(x, Attention) and x.fmt.dtype in FP8]
    if not layers:
        return None
    scales = [_scale_of(layer) for layer in layers]
    lacking = sum(bool(scale.isnan().any()) for scale in scales)
    origin = "scales from the checkpoint"
    if lacking:
        given = tokens()
        calibrate(model, dtype, given.ids)
        origin = f"scales calibrated on {len(given.ids)} tokens {given.kind}"
        if lacking < len(layers):
            origin += f" in {lacking} of {len(layers)} layers, the others' from the checkpoint"
    everyone = group.all_gather(torch.cat([scale.flatten() for scale in scales]))
    digest = hashlib.sha256(everyone.cpu().numpy().tobytes())
    return KVScales(origin, digest.hexdigest())


@torch.inference_mode()
def calibrate(model: CausalLM, dtype: torch.dtype, token_ids: list[int]) -> None:
    """Set the scales that are NaN by one forward pass over `token_ids`, with caches of `dtype`."""
    layers = model.attention_layers()
    device = next(model.parameters()).device
    with ExitStack() as stack:
        for layer in layers:
            if isinstance(layer, Attention):
                stack.enter_context(layer.unquantized(str(dtype).removeprefix("torch.")))
        model.assign_kv_groups()  # to the backends of now
        block_size, rows = layers[0].fmt.block_size, len(token_ids)
        blocks = -(-rows // block_size)
        caches = [
            torch.zeros(blocks, *layer.fmt.layer_block_shape(), dtype=dtype, device=device)
            for layer in layers
        ]
        positions = torch.arange(rows, device=device)
        meta = AttentionMetadata(
            query_start=torch.tensor([0, rows], dtype=torch.int32, device=device),
            seq_lens=torch.tensor([rows], dtype=torch.int32, device=device),
            block_table=torch.arange(blocks, dtype=torch.int32, device=device)[None],
            slot_mapping=positions,
            num_requests=1,
            num_rows=rows,
            max_query_len=rows,
            max_seq_len=rows,
        )
        metas = [replace(meta) for _ in model.kv_groups()]
        model.plan_attention(metas)
        model(torch.tensor(token_ids, dtype=torch.int32, device=device), positions, caches, metas)
    model.assign_kv_groups()
    for number, (layer, cache) in enumerate(zip(layers, caches, strict=True)):
        if isinstance(layer, Attention) and layer.kv_scale is not None:
            largest = cache.abs().amax((0, 3, 4)).float()  # [2, heads]
            if not bool(torch.isfinite(largest).all()):
                raise ModelError(
                    f"attention layer {number} computes keys or values that are not finite on the text that "
                    "calibrates an FP8 cache: check the weights, or use another dtype"
                )
            found = scale_for(largest, layer.fmt.dtype)
            layer.kv_scale.copy_(torch.where(layer.kv_scale.isnan(), found, layer.kv_scale))


def scale_for(largest: torch.Tensor, kind: str) -> torch.Tensor:
    """Scales, powers of two, of numbers that have been as large as `largest` (float32, >= 0)."""
    # Of a head that is 0 throughout any will do.
    wanted = torch.where(largest > 0, largest, 1.0) * (MARGIN / FP8_LARGEST[kind])
    return torch.exp2(wanted.log2().ceil())


def _scale_of(layer: Attention) -> torch.Tensor:
    assert layer.kv_scale is not None
    return layer.kv_scale
