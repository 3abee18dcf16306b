"""The checkpoints of tests/fixtures/quantized: the libraries' own (tools/make_quantized_fixtures.py)."""

from __future__ import annotations

import atexit
import functools
import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo.models.interface import CausalLM
from octavo.models.loader import iterate_weights, load_model_config
from octavo.models.loading import build_model, load_targets, load_weights
from octavo.models.locate import find_model
from octavo.models.quantized import checkpoint_quantization
from octavo.quantization import local_hardware
from octavo.quantization.capability import Hardware
from tests.models.paged import PagedRun

FOLDER = Path(__file__).parent.parent / "fixtures" / "quantized"
NAMES = sorted(path.name for path in FOLDER.iterdir())
# Those whose activations stay as they are.
WEIGHTS_ONLY = [n for n in NAMES if not n.startswith(("fp8", "w8a8", "moe_fp8"))]
HOPPER, AMPERE = Hardware("cuda", (9, 0), name="an H200"), Hardware("cuda", (8, 0), name="an A100")


def pretend(monkeypatch: pytest.MonkeyPatch, hardware: Hardware) -> None:
    """Let matrices be kept as on other hardware; without its kernels, plain PyTorch multiplies them."""
    monkeypatch.setattr(local_hardware, "_hardware", lambda kind, index: hardware)


def expected(name: str) -> dict[str, torch.Tensor]:
    """`tokens`, `logits`, and `logits_quantized` where activations are quantized: of the library's model."""
    return {key: tensor[0] for key, tensor in load_file(FOLDER / name / "expected.safetensors").items()}


def load(folder: str | Path, dtype: torch.dtype = torch.float32, **settings: Any) -> CausalLM:
    """The model of a fixture, or of a folder.

    Args:
        settings: fields of `QuantizationConfig`, or arguments of `build_model`; `load_format`.
    """
    source = find_model(str(FOLDER / folder if isinstance(folder, str) else folder))
    config = load_model_config(source)
    load_format = settings.pop("load_format", "auto")
    quantization = checkpoint_quantization(source, config, load_format)
    assert quantization is not None
    own = {key: settings.pop(key) for key in list(settings) if key in ("dense", "dequantize")}
    values = dict(dtype=dtype, device="cpu", max_model_len=64, block_size=8) | settings
    model = build_model(config, quantization=replace(quantization, **own), **values)
    targets = load_targets(model)
    load_weights(model, iterate_weights(source, config, targets, load_format, dtype, "cpu", progress=False))
    return model


def logits(model: CausalLM, tokens: torch.Tensor, chunk: int = 1000) -> torch.Tensor:
    """The model's logits at every position."""
    return PagedRun(model, 1, 64).prompts([tokens.tolist()], chunk)[0]


def spread(a: torch.Tensor, b: torch.Tensor) -> float:
    """The deviation between two, as a share of the second's own."""
    return float((a - b).std() / b.std())


def changed(
    name: str,
    folder: Path,
    tensors: Callable[[dict[str, torch.Tensor]], None] = lambda found: None,
    **config: Any,
) -> Path:
    """A copy of a fixture with other tensors, or other entries of its quantization_config."""
    shutil.copytree(FOLDER / name, folder, dirs_exist_ok=True)
    found = load_file(folder / "model.safetensors")
    tensors(found)
    save_file(found, folder / "model.safetensors")
    raw = json.loads((folder / "config.json").read_text())
    raw["quantization_config"] |= config
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


def source_folder(wide: bool = False) -> Path:
    """A checkpoint of the weights of which the fixtures of compressed-tensors were made, bfloat16."""
    return _source_folder(wide)


def source_weights(wide: bool = False) -> dict[str, torch.Tensor]:
    """Its tensors by name."""
    return load_file(source_folder(wide) / "model.safetensors")


def _source_model(wide: bool) -> Any:
    """Transformers' own: `llama` of tools/make_quantized_fixtures.py."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=128 if wide else 64,
        intermediate_size=256 if wide else 192,
        num_hidden_layers=1 if wide else 2,
        num_attention_heads=8 if wide else 4,
        num_key_value_heads=4 if wide else 2,
        vocab_size=128,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        initializer_range=0.15,
        bos_token_id=1,
        eos_token_id=2,
        dtype="bfloat16",
    )
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    return model.eval()


@functools.cache
def _source_folder(wide: bool) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="octavo-unquantized-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    _source_model(wide).save_pretrained(folder)
    return folder
