"""Scales and centres of quantized caches: what calibration finds, where keys are centred, what is kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from octavo.config import EngineConfig
from octavo.kernels.reference_kv import FP8_DTYPES, FP8_LARGEST, dequantize_fp8, quantize_fp8
from octavo.layers.attention_layer import Attention
from octavo.parallel.stages import StageGroup
from octavo.parallel.state import TensorParallelGroup
from octavo.worker import kv_scales
from octavo.worker.kv_scales import CalibrationTokens, centre_for, restore, settle
from octavo.worker.worker import Worker
from tests import tiny
from tests.quantization.checkpoints import load

ALONE = TensorParallelGroup()


def worker(variant: str = "llama", kind: str = "fp8", **settings: Any) -> Worker:
    values = dict(
        model=str(tiny.checkpoint(variant)), dtype="float32", device="cpu", num_threads=1, block_size=8,
        kv_cache_dtype=kind, max_model_len=tiny.CONTEXT, max_num_seqs=4, kv_cache_memory_bytes=1 << 20,
    ) | settings  # fmt: skip
    return Worker(EngineConfig(**values))


def layers_of(found: Worker) -> list[Attention]:
    layers = [x for x in found.model.attention_layers() if isinstance(x, Attention)]
    assert layers
    return layers


@pytest.mark.parametrize("kind", list(FP8_DTYPES))
def test_a_centre_is_near_the_mean_and_makes_the_first_key_a_code(kind):
    mean, scale = 5 * torch.randn(3, 64), torch.tensor([0.25, 0.5, 1.0])
    first = mean + 20 * torch.randn(3, 64)
    centre = centre_for(mean, first, kind, scale)
    digits = 3 if kind == "fp8" else 2  # of the mantissa
    half = (first - mean).abs() * 2.0**-digits / 2 + scale[:, None] * 2.0**-10
    assert bool(((centre - mean).abs() <= half).all())
    assert float((centre - mean).abs().max()) > 0.1
    codes = quantize_fp8(first[None], kind, scale, centre)
    stored = dequantize_fp8(codes[0][:, None], kind, scale)[:, 0]
    torch.testing.assert_close(stored, first - centre, rtol=1e-5, atol=1e-5)  # float32's rounding, no code's
    plain = dequantize_fp8(quantize_fp8(first[None], kind, scale, mean)[0][:, None], kind, scale)[:, 0]
    assert float((plain - (first - mean)).abs().max()) > 0.1


@pytest.mark.parametrize("kind", list(FP8_DTYPES))
@pytest.mark.parametrize("variant", ["llama", "qwen2", "qwen3", "gemma3"])
def test_keys_are_centred(variant, kind):
    found = worker(variant, kind)
    for layer in layers_of(found):
        assert layer.kv_scale is not None and layer.kv_centre is not None
        assert layer.backend.kv_centre is layer.kv_centre
        assert bool(layer.kv_scale.isfinite().all()) and bool((layer.kv_scale.log2() % 1 == 0).all())
        assert bool(layer.kv_centre.isfinite().all()) and bool(layer.kv_centre.any())
        assert bool((layer.kv_centre.abs().amax(1) < layer.kv_scale[0] * FP8_LARGEST[kind]).all())
    described = found.facts.summary["kv cache"]
    assert described.startswith(f"{kind}, keys centred, scales calibrated on ")


def test_the_first_key_of_the_text_is_stored_exactly():
    """The engine's own keys, computed with an unquantized cache and with a centred one."""
    found = worker("qwen2")
    tokens = kv_scales.text_tokens(found_tokenizer(found), tiny.VOCAB_SIZE, tiny.CONTEXT)
    assert tokens.text and len(tokens.ids) > 100
    keys: list[torch.Tensor] = []
    plain = kv_scales._settle_layer

    def note(layer: Attention, k: torch.Tensor, v: torch.Tensor, centred: bool) -> None:
        keys.append(k)
        plain(layer, k, v, centred)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_scales, "_settle_layer", note)
        kv_scales.calibrate(found.model, torch.float32, tokens)
    layers = layers_of(found)
    assert len(keys) == len(layers)
    for k, layer in zip(keys, layers, strict=True):
        assert layer.kv_scale is not None and layer.kv_centre is not None
        codes = quantize_fp8(k, "fp8", layer.kv_scale[0], layer.kv_centre)
        back = dequantize_fp8(codes.transpose(0, 1), "fp8", layer.kv_scale[0]).transpose(0, 1)
        error = (back + layer.kv_centre - k).abs().amax((1, 2))
        assert float(error[0]) < 1e-5 < 1e-3 < float(error[1:].min())


def found_tokenizer(found: Worker):
    from octavo.models.locate import configured_model, configured_tokenizer
    from octavo.tokenization.tokenizer import load_tokenizer

    return load_tokenizer(configured_tokenizer(found.config, configured_model(found.config)))


def test_not_under_a_cap_on_scores():
    found = worker("gemma2")
    assert all(layer.softcap is not None and layer.kv_centre is None for layer in layers_of(found))
    assert found.facts.summary["kv cache"].startswith("fp8, scales calibrated on ")


def test_not_where_scales_are_the_checkpoint_s():
    model = load("fp8_static_kv", kv_dtype="fp8")
    scales = settle(model, torch.float32, lambda: pytest.fail("to be calibrated"), ALONE)
    assert scales is not None and scales.origin == "scales from the checkpoint"
    layers = [x for x in model.attention_layers() if isinstance(x, Attention)]
    assert all(layer.kv_centre is not None and not layer.kv_centre.any() for layer in layers)
    # A checkpoint that has only one layer's.
    layers[1].kv_scale.fill_(float("nan"))
    ids = [5 + i * 7 % 90 for i in range(60)]
    scales = settle(model, torch.float32, lambda: CalibrationTokens(ids, "of a test", True), ALONE)
    assert scales is not None and scales.origin.startswith("keys centred in 1 of 2 layers, scales calibrated")
    assert not layers[0].kv_centre.any() and bool(layers[1].kv_centre.any())


def test_in_int8_the_centre_is_the_mean():
    """Of keys alone: every token has scales of its own. There are offsets beside where keys have biases."""
    for variant, offset in [("llama", False), ("qwen2", True)]:
        found = worker(variant, "int8")
        tokens = kv_scales.text_tokens(found_tokenizer(found), tiny.VOCAB_SIZE, tiny.CONTEXT)
        keys = kv_scales._keys_and_values(found.model, torch.float32, tokens.ids, StageGroup())
        with torch.inference_mode():
            for layer, (k, _) in keys:
                assert layer.kv_scale is None and layer.backend.kv_centre is layer.kv_centre
                assert layer.fmt.offset is offset
                torch.testing.assert_close(layer.kv_centre, k.mean(0), rtol=0, atol=1e-5)
                assert float(k.mean(0).abs().max()) > 1e-2
        assert found.kv_scales is not None and found.kv_scales.scales == "none" != found.kv_scales.centres
        kind = "int8 with offsets" if offset else "int8"
        described = found.facts.summary["kv cache"]
        assert described.startswith(f"{kind}, keys centred on {len(tokens.ids)} tokens of a built-in text, ")


def test_other_caches_have_no_centres():
    found = worker(kind="auto")
    assert found.kv_scales is None and all(layer.kv_centre is None for layer in layers_of(found))
    for settings in (dict(variant="gemma2"), dict(skip_tokenizer_init=True)):  # a cap on scores; no text
        found = worker(kind="int8", **settings)
        assert found.kv_scales is None
        assert all(layer.kv_centre is None or not layer.kv_centre.any() for layer in layers_of(found))


def test_the_root_of_block_keys_tells_centres(monkeypatch):
    first, again = worker(), worker()
    assert first.facts.cache_root == again.facts.cache_root
    with monkeypatch.context() as patch:
        patch.setattr(kv_scales, "TEXT", kv_scales.TEXT[::-1])
        other = worker()
    for a, b in zip(layers_of(first), layers_of(other), strict=True):
        assert not torch.equal(a.kv_centre, b.kv_centre)
    assert other.facts.cache_root != first.facts.cache_root
    with monkeypatch.context() as patch:  # the same scales, and other centres by one bit
        move = kv_scales._settle_layer

        def moved(layer: Attention, k: torch.Tensor, v: torch.Tensor, centred: bool) -> None:
            move(layer, k, v, centred)
            layer.kv_centre[0, 0] = layer.kv_centre[0, 0].nextafter(torch.tensor(9.0))

        patch.setattr(kv_scales, "_settle_layer", moved)
        near = worker()
    assert all(
        torch.equal(a.kv_scale, b.kv_scale) for a, b in zip(layers_of(first), layers_of(near), strict=True)
    )
    assert near.facts.cache_root != first.facts.cache_root


def test_what_wakes_up_stores_keys_as_before():
    """Centres are kept to the bit, though sums may be rounded otherwise the next time; another model is not
    taken."""
    found = worker()
    before = [layer.kv_centre.clone() for layer in layers_of(found)]
    for layer in layers_of(found):
        layer.kv_centre += 1e-6
    assert restore(found.model, found.kv_scales, found.kv_scales)
    assert all(torch.equal(x.kv_centre, c) for x, c in zip(layers_of(found), before, strict=True))
    other = worker("qwen2")
    assert not restore(found.model, found.kv_scales, other.kv_scales)
    assert not restore(found.model, found.kv_scales, None)
    assert restore(found.model, None, None)
