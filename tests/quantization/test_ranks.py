"""Quantized weights on 2, 3 and 4 tensor-parallel ranks against one rank, whose logits
`tests/quantization/test_checkpoints.py` holds to those of the formats' own libraries.

The weights are random ones of a model whose sizes make ranks part groups and blocks: 384 columns after
attention, 768 in the feed-forward, 200 tokens. No two scales are equal, and columns in act order are in a
random one.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.models.interface import CausalLM
from octavo.models.loader import iterate_weights, load_model_config
from octavo.models.loading import build_model, load_targets, load_weights
from octavo.models.locate import find_model
from octavo.models.quantized import checkpoint_quantization
from octavo.parallel.state import TensorParallelGroup, use_group
from octavo.quantization.capability import Hardware
from octavo.quantization.online import NAMES, online
from octavo.quantization.scheme import QuantizationConfig
from tests.models.paged import PagedRun
from tests.parallel.threads import on_ranks
from tests.quantization.checkpoints import AMPERE, FOLDER, HOPPER, pretend, spread

SIZES = dict(
    architectures=["Qwen3ForCausalLM"], model_type="qwen3", hidden_size=128, intermediate_size=768,
    num_hidden_layers=1, num_attention_heads=12, num_key_value_heads=12, head_dim=32, vocab_size=200,
    max_position_embeddings=64, rms_norm_eps=1e-6, tie_word_embeddings=False, initializer_range=0.1,
    torch_dtype="float32", hidden_act="silu",
)  # fmt: skip
MOE = SIZES | dict(
    architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", num_experts=6, num_experts_per_tok=2,
    moe_intermediate_size=384, norm_topk_prob=True, mlp_only_layers=[], decoder_sparse_step=1,
)  # fmt: skip
TOKENS = torch.randint(0, 200, (20,), generator=torch.Generator().manual_seed(0)).tolist()
Tensors = dict[str, torch.Tensor]


def _format(fixture: str, **changes: Any) -> dict[str, Any]:
    """A fixture's quantization_config with others in the place of some entries, wherever they are."""
    raw = json.loads((FOLDER / fixture / "config.json").read_text())["quantization_config"]

    def changed(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {key: changes.get(key, changed(entry)) for key, entry in value.items()}

    return changed(raw)


# Groups of 128: the feed-forward's 192 columns of 4 ranks, and attention's 96, 128 and 192, part them.
FORMATS: dict[str, dict[str, Any]] = {
    "gptq": _format("gptq", group_size=128),
    "gptq-heads": _format("gptq", group_size=64) | {"lm_head": True},
    "gptq-desc-act": _format("gptq_desc_act", group_size=128),
    "gptq-v2-desc-act": _format("gptq_v2", group_size=64),
    "gptq-8bit-desc-act": _format("gptq_8bit", group_size=128, desc_act=True),
    "awq": _format("awq", group_size=128),
    "w4a16": _format("w4a16", group_size=128),
    "w4a16-asym": _format("w4a16_asym", group_size=128, ignore=["re:.*mlp.gate$"]),
    "w4a16-actorder": _format("actorder_group", group_size=128),
    "w8a16": _format("w8a16", group_size=128),
    "w8a16-asym": _format("w8a16_asym", group_size=128),
    "fp8-block": _format("fp8_block"),
    "fp8-deepseek": _format("fp8_deepseek"),
    "nf4": _format("bnb_nf4"),
    "nf4-nested": _format("bnb_nf4_nested"),
    "bnb-int8": _format("bnb_int8"),
    "w8a8": _format("w8a8"),
    "fp8-dynamic": _format("fp8_dynamic"),
    "fp8-static": _format("fp8_static"),
}
# On a CPU activations are rounded by blocks of 32 columns, in act order of others on each rank.
_OTHER_BLOCKS = ("gptq-desc-act", "gptq-v2-desc-act", "w4a16-actorder")
WEIGHTS_ONLY = [name for name in FORMATS if not name.startswith(("fp8", "w8a8"))]


pytestmark = pytest.mark.usefixtures("one_thread")


def _shaken(name: str, tensor: torch.Tensor, kinds: str) -> torch.Tensor:
    """No two scales equal, and columns of groups in a random order."""
    g = torch.Generator().manual_seed(len(name) * 1000 + tensor.numel())
    end = name.rpartition(".")[2]
    if end in ("scales", "weight_scale", "weight_scale_inv", "SCB", "absmax") and tensor.is_floating_point():
        factors = 0.5 + torch.rand(tensor.shape, generator=g)
        return (tensor.float() * factors).to(tensor.dtype)
    if end == "input_scale":  # what rows of a norm's width need, and a little less
        return torch.full_like(tensor, 0.02)
    if end in ("g_idx", "weight_g_idx"):
        return tensor[torch.randperm(len(tensor), generator=g)]
    if end in ("qzeros", "weight_zero_point") and tensor.dtype is torch.int32:
        low, high = (-(1 << 31), 1 << 31) if kinds == "4bit" else (0x70707070, 0x70707070 + 0x0F0F0F0F)
        return torch.randint(low, high, tensor.shape, generator=g, dtype=torch.int64).to(torch.int32)
    return tensor


def _folder(name: str, root: str, sizes: dict[str, Any] = SIZES) -> Path:
    folder = Path(root) / name
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**sizes, "quantization_config": FORMATS[name]}))
    return folder


def loader(
    folder: Path,
    dequantize: bool = False,
    expert_parallel: bool = False,
    quantization: QuantizationConfig | None = None,
) -> Callable[[], CausalLM]:
    """What builds and loads the model of a folder on the ranks in force."""
    source = find_model(str(folder))
    config = load_model_config(source)
    if (found := checkpoint_quantization(source, config, "dummy")) is not None:
        quantization = replace(found, dequantize=dequantize)
    build = functools.partial(
        build_model, config, dtype=torch.float32, device="cpu", max_model_len=64, block_size=8,
        quantization=quantization, expert_parallel=expert_parallel,
    )  # fmt: skip
    targets = load_targets(build())
    given = iterate_weights(source, config, targets, "dummy", torch.float32, "cpu", progress=False)
    kinds = "8bit" if "8" in folder.name else "4bit"
    weights: Tensors = {name: _shaken(name, tensor, kinds) for name, tensor in given}

    def load() -> CausalLM:
        model = build()
        load_weights(model, weights.items())
        return model

    return load


def logits(load: Callable[[], CausalLM], size: int) -> list[torch.Tensor]:
    """Each rank's logits."""

    def rank(group: TensorParallelGroup) -> torch.Tensor:
        with use_group(group):
            model = load()
        return PagedRun(model, 1, 64).prompts([TOKENS], 12)[0]

    return on_ranks(size, rank)


def _held(name: str, hardware: Hardware | None, tmp_path: Path, patch: Any) -> None:
    """As equal as sums of float32 in another order are."""
    if hardware is not None:
        pretend(patch, hardware)
    load = loader(_folder(name, str(tmp_path)))
    (one,) = logits(load, 1)
    assert one.isfinite().all() and one.std() > 0.01
    for size in (2, 3, 4):
        for several in logits(load, size):
            assert spread(several, one) < 1e-5, size


@pytest.mark.parametrize("name", WEIGHTS_ONLY)
def test_ranks_together_equal_one(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU's forms, with activations as they are."""
    _held(name, AMPERE, tmp_path, monkeypatch)


@pytest.mark.parametrize("name", sorted(set(FORMATS) - set(_OTHER_BLOCKS)))
def test_on_a_cpu(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernels round activations to 8 bits by blocks of 32 columns, which no border parts."""
    _held(name, None, tmp_path, monkeypatch)


def test_a_scale_of_activations_that_the_checkpoint_has_is_all_ranks_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _held("fp8-static", HOPPER, tmp_path, monkeypatch)


ROWS = {"self_attn.o_proj": 384, "mlp.down_proj": 768}


def products(load: Callable[[], CausalLM], size: int) -> list[list[torch.Tensor]]:
    """Of each rank the results of the layers that are split by columns, for the same rows."""
    x = {
        layer: torch.randn(64, columns, generator=torch.Generator().manual_seed(1))
        for layer, columns in ROWS.items()
    }

    def rank(group: TensorParallelGroup) -> list[torch.Tensor]:
        with use_group(group):
            model = load()
        found = []
        for name in ROWS:
            layer = model.get_submodule(f"model.layers.0.{name}")
            out = layer(x[name].chunk(size, 1)[group.rank])
            # The sum over ranks may be left to the norm that comes after the layer.
            found.append(out if layer.reduce_results else group.all_reduce(out))
        return found

    return on_ranks(size, rank)


def no_farther(load: Callable[[], CausalLM], exact: Callable[[], CausalLM], least: float) -> None:
    """Several ranks' results are as near to the exact ones as one rank's are, which are at least so far."""
    (want,), (one,) = products(exact, 1), products(load, 1)
    for size in (2, 3, 4):
        for several in products(load, size):
            for ours, alone, right in zip(several, one, want, strict=True):
                assert least < spread(alone, right) < 0.15
                assert spread(ours, right) < 1.05 * spread(alone, right), size


@pytest.mark.parametrize(
    ("name", "hardware"),
    [(name, HOPPER) for name in ("w8a8", "fp8-dynamic", "fp8-block", "fp8-deepseek")]
    + [(name, None) for name in _OTHER_BLOCKS],
)
def test_activations_that_each_rank_rounds_are_no_farther_from_the_exact_ones(
    name: str, hardware: Hardware | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank has fewer columns of a row, whose largest magnitude is no larger than the whole row's."""
    if hardware is not None:
        pretend(monkeypatch, hardware)
    folder = _folder(name, str(tmp_path))
    no_farther(loader(folder), loader(folder, dequantize=True), 1e-3)


@pytest.mark.parametrize("hardware", [HOPPER, None], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_weights_that_each_rank_rounds_are_no_farther_from_the_exact_ones(
    name: str, hardware: Hardware | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that quantizes while loading takes scales of its own piece."""
    if hardware is not None:
        pretend(monkeypatch, hardware)
    (tmp_path / "config.json").write_text(json.dumps(SIZES))
    no_farther(loader(tmp_path, quantization=online(name)), loader(tmp_path), 1e-3)


@pytest.mark.parametrize("expert_parallel", [False, True])
@pytest.mark.parametrize(
    ("name", "hardware"),
    [(name, AMPERE) for name in ("w4a16", "w4a16-actorder", "w8a16", "fp8-deepseek")]
    + [(name, None) for name in ("w4a16-asym", "w8a8", "fp8-dynamic")],
)
def test_experts(
    name: str,
    hardware: Hardware | None,
    expert_parallel: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """6 experts, whole on ranks or cut to pieces of 192, 128 and 96."""
    if hardware is not None:
        pretend(monkeypatch, hardware)
    load = loader(_folder(name, str(tmp_path), MOE), expert_parallel=expert_parallel)
    (one,) = logits(load, 1)
    assert one.isfinite().all() and one.std() > 0.01
    for size in (2, 3, 4):
        for several in logits(load, size):
            assert spread(several, one) < 1e-5, size
