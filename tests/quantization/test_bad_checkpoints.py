"""Quantized checkpoints that contradict themselves are refused in a line that names tensor and remedy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from octavo.errors import ModelError
from octavo.quantization.capability import Hardware
from tests.quantization.checkpoints import HOPPER, changed, load, pretend

Tensors = dict[str, torch.Tensor]
DOWN = "model.layers.0.mlp.down_proj"


def put(name: str, change: Callable[[torch.Tensor], torch.Tensor | None]) -> Callable[[Tensors], None]:
    """Change a tensor of the down projection; None: in place."""

    def apply(found: Tensors) -> None:
        out = change(found[f"{DOWN}.{name}"])
        if out is not None:
            found[f"{DOWN}.{name}"] = out.contiguous()

    return apply


def drop(name: str) -> Callable[[Tensors], None]:
    return lambda found: found.__delitem__(f"{DOWN}.{name}")


def first(value: float) -> Callable[[torch.Tensor], None]:
    def change(tensor: torch.Tensor) -> None:
        tensor.view(-1)[0] = value

    return change


def code(bits: int) -> Callable[[torch.Tensor], None]:
    """One weight in the midst of a matrix of FP8."""

    def change(tensor: torch.Tensor) -> None:
        tensor.view(torch.uint8)[17, 33] = bits

    return change


@pytest.mark.parametrize(
    ("fixture", "change", "message"),
    [
        ("w4a16", put("weight_packed", lambda t: t[:, :-1]), r"weight_packed' has shape \[64, 23\]"),
        ("w4a16", put("weight_scale", first(0.0)), "down_proj.weight_scale holds 0, which is no scale"),
        ("w4a16", put("weight_scale", first(float("nan"))), "down_proj.weight_scale holds nan"),
        ("w4a16", drop("weight_scale"), "tensor '.*down_proj.weight_scale' is missing: fetch"),
        ("w4a16", put("weight_packed", lambda t: t.float()), "has type F32, .* not supported: use .* I32"),
        ("w4a16_asym", drop("weight_zero_point"), "weight_zero_point' is missing"),
        ("w8a8", put("weight_scale", first(float("inf"))), "weight_scale holds inf"),
        ("w8a8", put("weight", lambda t: t.to(torch.uint8)), "has type U8.*use a checkpoint in I8"),
        ("fp8_static", put("input_scale", first(0.0)), "down_proj.input_scale holds 0"),
        ("fp8_static", drop("input_scale"), "input_scale' is missing"),
        ("fp8_deepseek", put("weight_scale_inv", lambda t: t[:, :1]), r"has shape \[1, 1\]"),
        ("gptq", put("qweight", lambda t: t[:-1]), r"qweight' has shape \[23, 64\]"),
        ("gptq", put("scales", first(float("nan"))), "down_proj.scales holds nan"),
        ("gptq_desc_act", put("g_idx", lambda t: t.zero_()), "g_idx makes groups of unequal sizes"),
        ("gptq_desc_act", put("g_idx", first(99)), "g_idx names groups 0 to 99 where there are 6"),
        ("gptq_desc_act", drop("g_idx"), "g_idx' is missing"),
        ("awq", put("qzeros", lambda t: t[:, :-1]), r"qzeros' has shape \[6, 7\]"),
        ("w4a16_asym", put("weight_zero_point", lambda t: t[:-1]), r"weight_zero_point' has shape \[7, 6\]"),
        ("w8a16", put("weight_packed", lambda t: t[:, :-1]), r"weight_packed' has shape \[64, 47\]"),
        ("w8a8", put("weight_scale", first(0.0)), "down_proj.weight_scale holds 0, which is no scale"),
        ("fp8_dynamic", put("weight", code(0x7F)), "down_proj.weight holds nan, which is no number: "),
        ("fp8_dynamic", put("weight", code(0xFF)), "down_proj.weight holds nan, which is no number"),
        ("fp8_static", put("weight", code(0xFF)), "down_proj.weight holds nan"),
        ("fp8_block", put("weight", code(0x7F)), "down_proj.weight holds nan"),
        ("fp8_deepseek", put("weight", code(0xFF)), "down_proj.weight holds nan"),
        ("fp8_dynamic", put("weight", lambda t: t.to(torch.float8_e5m2)), "has type F8_E5M2, .* in F8_E4M3"),
        ("fp8_dynamic", put("weight", lambda t: t[:-1]), r"down_proj.weight' has shape \[63, 192\]"),
        ("fp8_dynamic", put("weight_scale", first(-1.0)), "down_proj.weight_scale holds -1, which"),
        ("fp8_deepseek", put("weight_scale_inv", first(float("nan"))), "weight_scale_inv holds nan"),
        ("fp8_static", put("input_scale", first(-2.0)), "down_proj.input_scale holds -2"),
        ("awq", put("scales", first(float("inf"))), "down_proj.scales holds inf"),
        ("gptq_8bit", put("scales", first(0.0)), "down_proj.scales holds 0"),
        ("bnb_nf4", put("weight", lambda t: t[:-1]), r"down_proj.weight' has shape \[6143, 1\]"),
        ("bnb_nf4", put("weight.absmax", first(float("nan"))), "down_proj.weight.absmax holds nan"),
        ("bnb_nf4", put("weight.absmax", first(-1.0)), "down_proj.weight.absmax holds -1, which is no scale"),
        ("bnb_nf4", put("weight.quant_map", first(float("nan"))), "down_proj.weight.quant_map holds nan"),
        ("bnb_nf4_nested", put("weight.nested_absmax", first(float("inf"))), "nested_absmax holds inf"),
        ("bnb_nf4_nested", put("weight.nested_quant_map", first(float("nan"))), "nested_quant_map holds nan"),
        ("bnb_int8", put("SCB", first(float("inf"))), "down_proj.SCB holds inf, which is no scale"),
        ("bnb_int8", put("weight_format", lambda t: t.fill_(1)), "weight_format 1 .*not supported: save"),
        ("bnb_nf4_nested",
         put("weight.quant_state.bitsandbytes__nf4", lambda t: torch.tensor([7], dtype=torch.uint8)),
         "quant_state is no JSON"),
        ("bnb_nf4_nested",
         put("weight.quant_state.bitsandbytes__nf4", lambda t: torch.tensor([*b"{}"], dtype=torch.uint8)),
         "nested_offset None is not supported: quantize"),
        ("bnb_nf4_nested",
         put("weight.quant_state.bitsandbytes__nf4",
             lambda t: torch.tensor([*b'{"nested_offset": NaN}'], dtype=torch.uint8)),
         "nested_offset nan is not supported: quantize"),
        ("bnb_nf4",
         put("weight.quant_state.bitsandbytes__nf4",
             lambda t: torch.tensor([*b'{"blocksize": 128}'], dtype=torch.uint8)),
         "blocks of 128 weights are not supported: use blocksize=64"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("hardware", [None, HOPPER], ids=["cpu", "hopper"])
def test_tensors(
    fixture: str,
    change: Callable[[Tensors], None],
    message: str,
    hardware: Hardware | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if hardware is not None:
        pretend(monkeypatch, hardware)
    folder = changed(fixture, tmp_path, change)
    with pytest.raises(ModelError, match=message) as caught:
        load(folder)
    assert "\n" not in str(caught.value)


def test_every_other_code_of_fp8_is_a_number(tmp_path: Path) -> None:
    """The largest of either sign among them, and so are int4's scales below 0, as AutoRound makes them."""

    def all_codes(found: Tensors) -> None:
        codes = torch.arange(256, dtype=torch.uint8)
        codes[[0x7F, 0xFF]] = 0
        found[f"{DOWN}.weight"].view(torch.uint8)[3, :] = codes[:192]
        found[f"{DOWN}.weight"].view(torch.uint8)[4, :] = codes[64:]

    load(changed("fp8_dynamic", tmp_path / "fp8", all_codes))

    def turned(found: Tensors) -> None:
        found[f"{DOWN}.scales"].neg_()

    model = load(changed("gptq", tmp_path / "gptq", turned), dequantize=True)
    plain = load("gptq", dequantize=True)
    x = torch.randn(3, 192, generator=torch.Generator().manual_seed(0))
    ours, theirs = (m.get_submodule(DOWN)(x) for m in (model, plain))
    assert torch.equal(ours, -theirs)


@pytest.mark.parametrize("where", ["cpu", "hopper"])
@pytest.mark.parametrize(
    ("fixture", "name", "change", "message"),
    [
        ("moe_fp8", "weight", code(0x7F), r"experts.1.up_proj.weight holds nan, which is no number"),
        ("moe_fp8", "weight_scale", first(-1.0), r"experts.1.up_proj.weight_scale holds -1"),
        ("moe_w4a16", "weight_scale", first(float("nan")), r"experts.1.up_proj.weight_scale holds nan"),
    ],
)
def test_tensors_of_experts(
    fixture: str,
    name: str,
    change: Callable[[torch.Tensor], None],
    message: str,
    where: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if where == "hopper":
        pretend(monkeypatch, HOPPER)

    def spoil(found: Tensors) -> None:
        change(next(t for key, t in found.items() if key.endswith(f"experts.1.up_proj.{name}")))

    with pytest.raises(ModelError, match=message):
        load(changed(fixture, tmp_path, spoil))


def test_a_group_size_that_does_not_divide(tmp_path: Path) -> None:
    folder = changed("gptq", tmp_path, group_size=40)
    with pytest.raises(
        ModelError, match="has 64 columns, and 40 share an entry: use .* group size divides 64"
    ):
        load(folder)


def test_a_bias_that_the_model_lacks(tmp_path: Path) -> None:
    def zeros(found: Tensors) -> None:
        found[f"{DOWN}.bias"] = torch.zeros(64, dtype=torch.float16)

    load(changed("gptq", tmp_path / "zeros", zeros))  # as AutoGPTQ writes

    def ones(found: Tensors) -> None:
        found[f"{DOWN}.bias"] = torch.ones(64, dtype=torch.float16)

    with pytest.raises(ModelError, match="down_proj: the checkpoint has a bias where the model has none"):
        load(changed("gptq", tmp_path / "ones", ones))


def test_a_truncated_file(tmp_path: Path) -> None:
    folder = changed("w4a16", tmp_path)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelError, match="truncated"):
        load(folder)
