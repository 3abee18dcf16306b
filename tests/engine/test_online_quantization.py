"""Models that are quantized while they are loaded, through the whole engine: the same tokens however a text
is computed, and those of the same weights dequantized."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from octavo import LLM
from octavo.models.loader import iterate_weights, load_model_config
from octavo.models.loading import build_model, load_targets, load_weights
from octavo.models.locate import find_model
from octavo.quantization import capability, checkpoint_method
from octavo.quantization.capability import Hardware, Running
from octavo.quantization.online import NAMES, online
from tests.engine.test_quantized_parity import (
    CPU,
    PROMPTS,
    check_chunks_hits_and_preemption,
    generate,
    make,
    use,
)
from tests.quantization.checkpoints import AMPERE, HOPPER, logits, source_folder

KV = {"fp8": "fp8", "fp8_per_block": "int8", "int8": "int8", "int4_weight_only": "fp8"}
CASES = [(hardware, name, KV.get(name, "auto")) for name in NAMES for hardware in (CPU, HOPPER)]


def start(name: str, **settings: Any) -> LLM:
    return make("", model=str(source_folder()), quantization=name, **settings)


@pytest.mark.parametrize(
    ("hardware", "name", "kv_dtype"), CASES, ids=[f"{h.name}-{n}-{kv}".replace(" ", "") for h, n, kv in CASES]
)
def test_chunks_hits_and_preemption_change_nothing(
    hardware: Hardware, name: str, kv_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(hardware, monkeypatch)
    check_chunks_hits_and_preemption(lambda **more: start(name, kv_cache_dtype=kv_dtype, **more))


@pytest.mark.parametrize("name", [n for n in NAMES if n != "int8"])
def test_greedy_tokens_are_those_of_the_dequantized_weights(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights alone: on a GPU whose FP8 is only stored."""
    source = find_model(str(source_folder()))
    config = load_model_config(source)
    with monkeypatch.context() as context:
        context.setattr(checkpoint_method, "mode_of", lambda *a: Running("dequantized", "a test asks for it"))
        plain = build_model(
            config,
            quantization=online(name),
            dtype=torch.float32,
            device="cpu",
            max_model_len=64,
            block_size=8,
        )
        targets = load_targets(plain)
        read = iterate_weights(source, config, targets, "auto", torch.float32, "cpu", progress=False)
        load_weights(plain, read)
    use(AMPERE, monkeypatch)
    asked = capability.asked_mode(online(name).schemes[0])
    assert capability.running(online(name).schemes[0], AMPERE).mode == asked.replace("W8A8", "W8A16")
    with start(name) as llm:
        found = generate(llm)
    for prompt, tokens in zip(PROMPTS, found, strict=True):
        scores = logits(plain, torch.tensor([*prompt, *tokens[:-1]]))[len(prompt) - 1 :]
        chosen = scores.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert float((scores.amax(1) - chosen).max()) < 1e-4  # a tie may fall either way


def test_keys_of_blocks_tell_settings_apart() -> None:
    """Two settings with schemes of one name round differently: neither may find the other's blocks."""
    roots = []
    for name in ("fp8_per_channel", "fp8_per_tensor", "fp8_per_channel"):
        with start(name) as llm:
            roots.append(llm.facts.cache_root)
            assert llm.facts.summary["weights"].startswith(
                f"online {name}: FP8_DYNAMIC as dequantized, since "
            )
    assert roots[0] == roots[2] != roots[1]
