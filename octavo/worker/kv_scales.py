"""Scales of FP8 KV caches, from the checkpoint or by calibration while the model is loaded, and centres of
all caches of 8 bits.

Calibration computes a fixed text once with an unquantized cache and reads from it the largest size of any
key and of any value, by layer and KV head. A scale is the power of two that puts twice that within the
format's range: FP8 numbers are as exact at any scale, so that the room costs nothing, and a power of two is
the same although sums are rounded otherwise with other threads (the scales enter the keys of KV blocks).

Keys are stored less a centre, a vector of their layer and head: softmax sees only differences of a row's
scores, which are the same without it, and what is smaller is rounded less. The centre is the keys' mean over
the text; in FP8 moved by less than a step of the codes so that the key of the text's first token is a code:
much attention goes to that place, whose key lies far from the mean and is nearly the same in every text. What
this brings is measured in benchmarks/kv.md: most where keys have biases (Qwen 2). A centre depends on how
sums are rounded, and enters the keys of KV blocks: a start on another kind of device or processor may find
nothing that was cached before.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from octavo.errors import ModelError
from octavo.kernels.reference_kv import FP8_LARGEST, dequantize_fp8, quantize_fp8
from octavo.layers.attention import AttentionMetadata
from octavo.layers.attention_layer import Attention
from octavo.parallel.stages import StageGroup
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
    """What a model's quantized cache is stored by, beside its format.

    Attributes:
        origin: whether keys are centred, and where scales are from, for the log.
        scales, centres: digests of all heads', hexadecimal; "none" where there are none.
        kept: this rank's centres, copies.
    """

    origin: str
    scales: str
    centres: str
    kept: tuple[torch.Tensor, ...]

    @property
    def digest(self) -> str:
        """What of them decides how a block's numbers are to be read with others'."""
        return f"scales={self.scales},centres={self.centres}"


@dataclass(frozen=True)
class CalibrationTokens:
    """Token ids to calibrate on.

    Attributes:
        kind: what they are, for the log.
        text: whether they are what a request may begin with; else no key is worth being exact.
    """

    ids: list[int]
    kind: str
    text: bool


def text_tokens(tokenizer: Tokenizer, vocab_size: int, most: int) -> CalibrationTokens:
    """The fixed text by a model's tokenizer, in at most `most` tokens."""
    ids = [i for i in tokenizer.encode(TEXT) if i < vocab_size][: min(most, MAX_TOKENS)]
    return CalibrationTokens(ids, "of a built-in text", True)


def random_tokens(vocab_size: int, most: int) -> CalibrationTokens:
    """For a model without a tokenizer: ids all over the vocabulary, the same ones every time."""
    return CalibrationTokens(
        [(i * 2654435761 + 40503) % (1 << 32) % vocab_size for i in range(min(most, _RANDOM_TOKENS))],
        "at random (no tokenizer)",
        False,
    )


def settle(
    model: CausalLM,
    dtype: torch.dtype,
    tokens: Callable[[], CalibrationTokens],
    group: TensorParallelGroup,
    stages: StageGroup | None = None,
) -> KVScales | None:
    """See that every attention layer of a loaded model has its scales: those that no checkpoint gave are
    calibrated, and where those of keys are, keys are centred. In int8, where every token has scales of its
    own, keys are centred, if there is a text to calibrate on.

    Args:
        model: with its weights.
        dtype: of its activations, in which the calibration's cache is.
        tokens: what to calibrate on, called if something is to be calibrated.
        group: the ranks, each of which has the scales of its own heads; the digest is of all heads'.
        stages: the pipeline's, each of which has those of its own layers; the digest is of all layers'.
            None: there is one.

    Returns:
        None where the cache is not quantized, or in int8 without centres.

    Raises:
        ModelError: the model computes numbers that are not finite.
    """
    stages, layers = stages or StageGroup(), _settled_layers(model)
    if not layers:
        return None
    scales = [layer.kv_scale for layer in layers if layer.kv_scale is not None]
    lacking = sum(bool(scale.isnan().any()) for scale in scales)
    origin = "scales from the checkpoint"
    if not scales or -stages.minimum(-lacking):  # on any stage
        given = tokens()
        if not scales and not given.text:
            return None
        calibrate(model, dtype, given, stages)
        origin = f"{len(given.ids)} tokens {given.kind}"
        if scales:
            origin = f"scales calibrated on {origin}"
        if lacking < len(scales):
            origin += f" in {lacking} of {len(layers)} layers, the others' from the checkpoint"
    centred = sum(layer.kv_centre is not None and bool(layer.kv_centre.any()) for layer in layers)
    if centred:
        where = "" if centred == len(layers) else f" in {centred} of {len(layers)} layers"
        origin = f"keys centred{where}, {origin}" if scales else f"keys centred{where} on {origin}"
    centres = tuple(layer.kv_centre.clone() for layer in layers if layer.kv_centre is not None)
    return KVScales(origin, _digest(group, stages, scales), _digest(group, stages, centres), centres)


def restore(model: CausalLM, earlier: KVScales | None, found: KVScales | None) -> bool:
    """Let a model that was loaded again, and has the scales `found`, store its keys as it did earlier, to the
    bit. False: it is another model, by its scales; centres depend on how sums are rounded."""
    if (earlier and earlier.scales) != (found and found.scales):
        return False
    if earlier is not None:
        centres = [layer.kv_centre for layer in _settled_layers(model) if layer.kv_centre is not None]
        for centre, before in zip(centres, earlier.kept, strict=True):
            centre.copy_(before)
    return True


def _digest(group: TensorParallelGroup, stages: StageGroup, tensors: Sequence[torch.Tensor]) -> str:
    if not tensors:  # which is so on all ranks and stages or on none
        return "none"
    everyone = group.all_gather(torch.cat([tensor.flatten() for tensor in tensors]))
    digest = hashlib.sha256(everyone.cpu().numpy().tobytes())
    if stages.size > 1:
        digest = hashlib.sha256(stages.everyones(digest.digest()))
    return digest.hexdigest()


def _settled_layers(model: CausalLM) -> list[Attention]:
    """The layers whose cache has scales or centres of its layer's."""
    layers = [x for x in model.attention_layers() if isinstance(x, Attention)]
    return [x for x in layers if x.kv_scale is not None or x.kv_centre is not None]


@torch.inference_mode()
def calibrate(
    model: CausalLM, dtype: torch.dtype, tokens: CalibrationTokens, stages: StageGroup | None = None
) -> None:
    """Set the scales that are NaN, and the centres that go with them, by one forward pass over `tokens` with
    caches of `dtype`; it goes through all pipeline stages."""
    stages = stages or StageGroup()
    for number, (layer, computed) in enumerate(_keys_and_values(model, dtype, tokens.ids, stages)):
        if not bool(torch.isfinite(computed).all()):
            raise ModelError(
                f"attention layer {number} computes keys or values that are not finite on the text that "
                "calibrates a cache of 8 bits: check the weights, or use another dtype"
            )
        _settle_layer(layer, computed[0], computed[1], centred=tokens.text)


def _keys_and_values(
    model: CausalLM, dtype: torch.dtype, token_ids: list[int], stages: StageGroup
) -> Iterator[tuple[Attention, torch.Tensor]]:
    """Each layer that is to be settled, and its keys and values of a text: float32
    `[2, rows, heads, head_dim]`."""
    layers = model.attention_layers()
    settled = {id(layer) for layer in _settled_layers(model)}
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
        entering = torch.tensor(token_ids, dtype=torch.int32, device=device)
        if not stages.is_first:
            entering = torch.empty(rows, model.config.hidden_size, dtype=dtype, device=device)
            stages.receive(entering)
        leaving = model(entering, positions, caches, metas)
        if not stages.is_last:
            stages.send(leaving)
    model.assign_kv_groups()
    for layer, cache in zip(layers, caches, strict=True):
        if isinstance(layer, Attention) and id(layer) in settled:
            yield layer, cache.permute(1, 0, 3, 2, 4).flatten(1, 2)[:, :rows].float()


def _settle_layer(layer: Attention, keys: torch.Tensor, values: torch.Tensor, centred: bool) -> None:
    """A layer's scales and centre from `keys` and `values`, float32 `[rows, heads, head_dim]`."""
    if layer.kv_scale is None:  # int8
        if centred and layer.kv_centre is not None:
            layer.kv_centre.copy_(keys.mean(0))
        return
    lacking = layer.kv_scale.isnan()
    # A checkpoint's scale is that of keys as they are.
    centred = centred and layer.kv_centre is not None and bool(lacking[0].all())
    mean = keys.mean(0) if centred else torch.zeros_like(keys[0])
    largest = torch.stack([(keys - mean).abs().amax((0, 2)), values.abs().amax((0, 2))])
    layer.kv_scale.copy_(torch.where(lacking, scale_for(largest, layer.fmt.dtype), layer.kv_scale))
    if centred:
        assert layer.kv_centre is not None
        layer.kv_centre.copy_(centre_for(mean, keys[0], layer.fmt.dtype, layer.kv_scale[0]))


def centre_for(mean: torch.Tensor, first: torch.Tensor, kind: str, scale: torch.Tensor) -> torch.Tensor:
    """The vector within half a step of the codes from `mean` that makes `first` less it a code.

    Args:
        mean, first: float32 `[heads, head_dim]`, of keys.
        kind: fp8 or fp8_e5m2.
        scale: float32 `[heads]`, of the codes.
    """
    codes = quantize_fp8(first[None], kind, scale, mean)[0]
    return first - dequantize_fp8(codes[:, None], kind, scale)[:, 0]


def scale_for(largest: torch.Tensor, kind: str) -> torch.Tensor:
    """Scales, powers of two, of numbers that have been as large as `largest` (float32, >= 0)."""
    # Of a head that is 0 throughout any will do.
    wanted = torch.where(largest > 0, largest, 1.0) * (MARGIN / FP8_LARGEST[kind])
    return torch.exp2(wanted.log2().ceil())
