"""Write tests/fixtures/quantized: tiny checkpoints by the libraries that people quantize with, and what these
compute from them.

Run in an environment of its own, with llmcompressor 0.14 and transformers 5.17, bitsandbytes 0.50, and the
unpacked wheels of auto-gptq 0.7.1 and autoawq 0.2.7 (for their packing alone) in a folder:

    python tools/make_quantized_fixtures.py OUT --wheels FOLDER [--only NAME]

Each fixture is a checkpoint folder and `expected.safetensors`: `tokens [1, n]`; `logits [1, n, vocab]` of the
library's own model with activations left as they are (the checkpoint's weights, dequantized, in float32); and
`logits_quantized`, where activations are quantized, with that.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

TOKENS = 12
VOCAB = 128
GROUP = 32
KEPT = ("config.json", "model.safetensors", "expected.safetensors")
KV_SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}


def cast(model: PreTrainedModel, dtype: torch.dtype) -> Any:
    """The model with parameters of a type; its rotary frequencies stay float32."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    model.config.dtype = dtype
    return model.eval()


def llama(bias: bool = False, wide: bool = False) -> LlamaForCausalLM:
    """A Llama of random weights that are large enough for its logits to differ; `wide`: of whole groups of
    128 columns, but 64 rows of keys and values."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=128 if wide else 64,
        intermediate_size=256 if wide else 192,
        num_hidden_layers=1 if wide else 2,
        num_attention_heads=8 if wide else 4,
        num_key_value_heads=4 if wide else 2,
        vocab_size=VOCAB,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        attention_bias=bias,
        initializer_range=0.15,
        bos_token_id=1,
        eos_token_id=2,
        dtype="bfloat16",
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".bias"):
                parameter.normal_(0, 0.1)
    return cast(model, torch.bfloat16)


def qwen3_moe() -> Qwen3MoeForCausalLM:
    """A mixture of four experts."""
    torch.manual_seed(1)
    config = Qwen3MoeConfig(
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        vocab_size=VOCAB,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        initializer_range=0.15,
        bos_token_id=1,
        eos_token_id=2,
        dtype="bfloat16",
    )
    return cast(Qwen3MoeForCausalLM(config), torch.bfloat16)


def tokens() -> torch.Tensor:
    """The text of every fixture."""
    return torch.randint(3, VOCAB, (1, TOKENS), generator=torch.Generator().manual_seed(2))


def run(model: PreTrainedModel) -> torch.Tensor:
    """The model's logits of it."""
    with torch.no_grad():
        return model(tokens()).logits.float().contiguous()


def save_expected(folder: Path, logits: torch.Tensor, quantized: torch.Tensor | None = None) -> None:
    """Write what the library computes, and drop the files that no test reads."""
    out = {"tokens": tokens(), "logits": logits}
    if quantized is not None:
        out["logits_quantized"] = quantized
    save_file(out, folder / "expected.safetensors")
    for path in folder.iterdir():
        if path.name not in KEPT:
            path.unlink()


def quantized_linears(model: PreTrainedModel) -> dict[str, nn.Linear]:
    """All linear layers but the head."""
    return {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and n != "lm_head"}


def with_weights(model: PreTrainedModel, weights: dict[str, torch.Tensor]) -> PreTrainedModel:
    """The model with other matrices, in float32."""
    model = cast(model, torch.float32)
    linears = quantized_linears(model)
    assert set(weights) == set(linears), set(weights) ^ set(linears)
    with torch.no_grad():
        for name, weight in weights.items():
            linears[name].weight.copy_(weight.view_as(linears[name].weight))
    return model


# ---- compressed-tensors ------------------------------------------------------------------------------------


def compressed(model: PreTrainedModel, recipe: Any, folder: Path, calibrate: bool = False) -> None:
    """By llm-compressor, and read back by Transformers."""
    from compressed_tensors.quantization import disable_quantization
    from datasets import Dataset
    from llmcompressor import oneshot

    vocab = {"[UNK]": 0} | {f"t{i}": i for i in range(1, VOCAB)}
    words = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(vocab, "[UNK]"))
    )  # which it asks for
    data: dict[str, Any] = {"processor": words}
    if calibrate:
        ids = torch.randint(3, VOCAB, (16, 64), generator=torch.Generator().manual_seed(3))
        rows = {"input_ids": ids.tolist(), "attention_mask": torch.ones_like(ids).tolist()}
        data |= {"dataset": Dataset.from_dict(rows), "num_calibration_samples": 16, "max_seq_length": 64}
    source = folder.with_name("source")
    model.save_pretrained(source)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    oneshot(model=model, recipe=recipe, **data)
    model.save_pretrained(folder, save_compressed=True)
    shutil.rmtree(source)
    again = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    quantized = run(again)
    for module in again.modules():
        disable_quantization(module)
    plain = run(again)
    save_expected(folder, plain, None if torch.equal(plain, quantized) else quantized)


def modifier(scheme: str | None = None, ignore: tuple[str, ...] = ("lm_head",), **more: Any) -> Any:
    """llm-compressor's round to nearest."""
    from llmcompressor.modifiers.quantization import QuantizationModifier

    if scheme is not None:
        more |= {"targets": "Linear", "scheme": scheme}
    return QuantizationModifier(ignore=list(ignore), **more)


def groups(
    bits: int, symmetric: bool, size: int = GROUP, targets: tuple[str, ...] = ("Linear",), **more: Any
) -> dict[str, Any]:
    """Layers with weights of so many bits in groups."""
    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": symmetric,
        "strategy": "group",
        "group_size": size,
    }
    return {"targets": list(targets), "weights": weights | more}


def in_groups(bits: int, symmetric: bool, **more: Any) -> Any:
    """Every layer as `groups`."""
    return modifier(config_groups={"group_0": groups(bits, symmetric)}, **more)


def gptq_static() -> Any:
    """GPTQ that keeps the columns' order."""
    from llmcompressor.modifiers.gptq import GPTQModifier

    return GPTQModifier(config_groups={"group_0": groups(4, True, actorder="weight")}, ignore=["lm_head"])


def actorder_group(folder: Path) -> None:
    """What earlier releases wrote with actorder="group", which 0.14 no longer does: the numbers of `w4a16`,
    columns and their groups shuffled by one order for all matrices of an input."""
    compressed(llama(), in_groups(4, True), folder)
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(5)
    orders = {columns: torch.randperm(columns, generator=generator) for columns in (64, 192)}
    weights = {}
    for name in [n for n in tensors if n.endswith(".weight_packed")]:
        layer = name.removesuffix(".weight_packed")
        shape = tensors[f"{layer}.weight_shape"]
        order = orders[int(shape[1])]
        codes = unpack_from_int32(tensors[name], 4, shape)[:, order].contiguous()
        g_idx = (torch.arange(len(order)) // GROUP)[order]
        tensors[name] = pack_to_int32(codes, 4)
        tensors[f"{layer}.weight_g_idx"] = g_idx.to(torch.int32)
        weights[layer] = codes.float() * tensors[f"{layer}.weight_scale"].float()[:, g_idx]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    raw = json.loads((folder / "config.json").read_text())
    raw["quantization_config"]["config_groups"]["group_0"]["weights"]["actorder"] = "group"
    (folder / "config.json").write_text(json.dumps(raw, indent=1))
    save_expected(folder, run(with_weights(llama(), weights)))


def mixed() -> Any:
    """Per-layer groups, different among matrices that are read as one, and layers that are left alone."""
    channel = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
    return modifier(
        config_groups={
            "group_0": groups(4, True, targets=("re:.*(q|k|gate|up)_proj$",)),
            "group_1": {"targets": ["re:.*v_proj$"], "weights": channel},
            "group_2": groups(4, False, 64, targets=("re:.*down_proj$",)),
        },
        ignore=("lm_head", "model.layers.1.mlp.down_proj", "re:.*layers.1.self_attn.k_proj"),
    )


def mixture(recipe: Any, folder: Path) -> None:
    """Experts, which llm-compressor writes one by one and Transformers does not read back so."""
    compressed(qwen3_moe(), recipe, folder)
    tensors = load_file(folder / "model.safetensors")
    weights = {}
    for name, tensor in tensors.items():
        layer, _, kind = name.rpartition(".")
        if kind == "weight_packed":
            codes = unpack_from_int32(tensor, 4, tensors[f"{layer}.weight_shape"]).float()
            scale = tensors[f"{layer}.weight_scale"].float()
            scale = scale.repeat_interleave(codes.shape[1] // scale.shape[1], 1)
            weights[f"{layer}.weight"] = codes * scale
        elif kind == "weight" and f"{layer}.weight_scale" in tensors:
            weights[name] = tensor.float() * tensors[f"{layer}.weight_scale"].float()
        elif kind == "weight":
            weights[name] = tensor.float()
    model = cast(qwen3_moe(), torch.float32)
    experts, count = "model.layers.0.mlp.experts", model.config.num_experts

    def stacked(kind: str) -> torch.Tensor:
        return torch.stack([weights.pop(f"{experts}.{i}.{kind}_proj.weight") for i in range(count)])

    weights[f"{experts}.gate_up_proj"] = torch.cat((stacked("gate"), stacked("up")), 1)
    weights[f"{experts}.down_proj"] = stacked("down")
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert missing == ["lm_head.weight"] and not unexpected, (missing, unexpected)
    save_expected(folder, run(model))


def fine_grained_fp8(folder: Path) -> None:
    """DeepSeek's and Qwen's layout: the numbers of compressed-tensors' FP8_BLOCK under its names."""
    compressed(llama(wide=True), modifier("FP8_BLOCK"), folder)
    tensors = load_file(folder / "model.safetensors")
    renamed = {
        name.replace("weight_scale", "weight_scale_inv"): t.float() if name.endswith("weight_scale") else t
        for name, t in tensors.items()
    }
    save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})
    raw = json.loads((folder / "config.json").read_text())
    raw["quantization_config"] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }
    (folder / "config.json").write_text(json.dumps(raw, indent=1))


# ---- AutoGPTQ, AutoAWQ: the packing of the libraries, on scales and zeros that are computed here -----------


def load_module(path: Path, name: str, stubs: dict[str, dict[str, Any]] | None = None) -> ModuleType:
    """A file of a package whose other files cannot be imported here."""
    for stub, members in (stubs or {}).items():
        module = ModuleType(stub)
        vars(module).update(members)
        sys.modules[stub] = module
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def affine(
    weight: torch.Tensor, bits: int, symmetric: bool, g_idx: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and zero points, `[out, groups]`, of round to nearest; `weight` becomes what they can say."""
    most = 2**bits - 1
    count = int(g_idx.max()) + 1
    weight = weight.detach()
    scales, zeros = torch.empty(len(weight), count), torch.empty(len(weight), count)
    for i in range(count):
        piece = weight[:, g_idx == i]
        low, high = piece.amin(1).clamp(max=0), piece.amax(1).clamp(min=0)
        if symmetric:
            high = torch.maximum(high, -low)
            low = -high
        scales[:, i] = ((high - low) / most).half().float()
        zeros[:, i] = 2 ** (bits - 1) if symmetric else (-low / scales[:, i]).round().clamp(1, most)
        codes = (piece / scales[:, i, None] + zeros[:, i, None]).round().clamp(0, most)
        weight[:, g_idx == i] = (codes - zeros[:, i, None]) * scales[:, i, None]
    return scales, zeros


def save_packed(
    model: PreTrainedModel, packed: dict[str, nn.Module], config: dict[str, Any], folder: Path
) -> None:
    """The checkpoint, with the packed modules' tensors in place of their weights, in float16."""
    folder.mkdir(parents=True, exist_ok=True)
    raw = model.config.to_dict() | {
        "architectures": [type(model).__name__],
        "dtype": "float16",
        "quantization_config": config,
    }
    (folder / "config.json").write_text(json.dumps(raw, indent=1, default=str))
    tensors = {
        name: tensor.half()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight" and name.removesuffix(".weight").removesuffix(".bias") not in packed
    }
    for name, module in packed.items():
        tensors |= {f"{name}.{key}": tensor.contiguous() for key, tensor in module.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def auto_gptq(
    wheels: Path,
    folder: Path,
    symmetric: bool,
    act_order: bool,
    bits: int = 4,
    v2: bool = False,
    bias: bool = False,
) -> None:
    """AutoGPTQ's `QuantLinear`."""
    module = load_module(wheels / "auto_gptq/nn_modules/qlinear/qlinear_cuda.py", "qlinear_cuda")
    model = cast(cast(llama(bias), torch.float16), torch.float32)
    generator = torch.Generator().manual_seed(4)
    packed: dict[str, nn.Module] = {}
    weights = {}
    orders: dict[tuple[str, ...], torch.Tensor] = {}
    for name, linear in quantized_linears(model).items():
        columns, kind = linear.in_features, name.rpartition(".")[2]
        g_idx = (torch.arange(columns) // GROUP).to(torch.int32)
        if act_order:  # matrices of one input have one Hessian, so one order
            one_input = kind in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
            key = (*name.split(".")[2:4], "input" if one_input else kind)
            order = orders.setdefault(key, torch.randperm(columns, generator=generator))
            g_idx = g_idx[torch.argsort(order)]
        scales, zeros = affine(linear.weight, bits, symmetric, g_idx)
        half = nn.Linear(columns, linear.out_features, linear.bias is not None).half()
        half.load_state_dict(linear.state_dict())
        layer = module.QuantLinear(bits, GROUP, columns, linear.out_features, linear.bias is not None)
        layer.pack(half, scales.half(), zeros.half(), g_idx)
        if v2:  # what GPTQModel's convert_gptq_v1_to_v2_format does to 4 bits
            layer.qzeros += 0x11111111
        packed[name] = layer
        weights[name] = linear.weight.detach().clone()
    config = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": GROUP,
        "desc_act": act_order,
        "sym": symmetric,
        "static_groups": False,
        "true_sequential": True,
        "damp_percent": 0.01,
        "checkpoint_format": "gptq_v2" if v2 else "gptq",
    }
    save_packed(model, packed, config, folder)
    save_expected(folder, run(with_weights(model, weights)))


def auto_awq(wheels: Path, folder: Path) -> None:
    """AutoAWQ's `WQLinear_GEMM`, and its own way back."""
    unpacking = load_module(wheels / "awq/utils/packing_utils.py", "packing_utils")
    stubs: dict[str, dict[str, Any]] = {
        "awq": {},
        "awq.utils": {},
        "awq.utils.module": {"try_import": lambda name: (None, "")},
        "awq.utils.utils": {"get_best_device": lambda: "cpu"},
        "awq.utils.packing_utils": {"dequantize_gemm": unpacking.dequantize_gemm},
    }
    module = load_module(wheels / "awq/modules/linear/gemm.py", "awq_gemm", stubs)
    model = cast(cast(llama(), torch.float16), torch.float32)
    packed: dict[str, nn.Module] = {}
    weights = {}
    for name, linear in quantized_linears(model).items():
        scales, zeros = affine(linear.weight, 4, False, torch.arange(linear.in_features) // GROUP)
        layer = module.WQLinear_GEMM.from_linear(linear, 4, GROUP, scales=scales.T, zeros=zeros.T)
        packed[name] = layer
        back = module.dequantize_gemm(layer.qweight, layer.qzeros, layer.scales.float(), 4, GROUP)
        weights[name] = back.T.float()
    config = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": GROUP,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": None,
    }
    save_packed(model, packed, config, folder)
    save_expected(folder, run(with_weights(model, weights)))


# ---- bitsandbytes, by Transformers -------------------------------------------------------------------------


def bitsandbytes(folder: Path, nested: bool | None) -> None:
    """NF4 (`nested`: with quantized scales) or, with None, LLM.int8()."""
    from bitsandbytes import functional
    from transformers import BitsAndBytesConfig

    source = folder.with_name("source")
    llama().save_pretrained(source)
    if nested is None:
        how = BitsAndBytesConfig(load_in_8bit=True)
    else:
        how = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=nested,
            bnb_4bit_compute_dtype=torch.float32,
        )
    model = AutoModelForCausalLM.from_pretrained(
        source, quantization_config=how, dtype=torch.bfloat16, device_map="cpu"
    )
    model.save_pretrained(folder)
    shutil.rmtree(source)
    weights = {}
    for name, module in model.named_modules():
        kind = type(module).__name__
        if kind == "Linear4bit":
            state = module.weight.quant_state
            state.dtype = torch.float32
            weights[name] = functional.dequantize_4bit(module.weight.data, state)
        elif kind == "Linear8bitLt":
            weight = module.weight
            scale = weight.SCB if weight.SCB is not None else module.state.SCB
            weights[name] = weight.data.float() * (scale.float()[:, None] / 127)
    save_expected(folder, run(with_weights(llama(), weights)))


def fixtures(wheels: Path) -> dict[str, Callable[[Path], None]]:
    """What writes each."""
    experts = ("lm_head", "re:.*mlp.gate$")
    return {
        "fp8_dynamic": lambda out: compressed(llama(), modifier("FP8_DYNAMIC"), out),
        "fp8_static": lambda out: compressed(llama(), modifier("FP8"), out, True),
        "fp8_static_kv": lambda out: compressed(
            llama(), modifier("FP8", kv_cache_scheme=KV_SCHEME), out, True
        ),
        "fp8_block": lambda out: compressed(llama(wide=True), modifier("FP8_BLOCK"), out),
        "fp8_deepseek": fine_grained_fp8,
        "w8a8": lambda out: compressed(llama(), modifier("W8A8"), out),
        "w8a16": lambda out: compressed(llama(), in_groups(8, True), out),
        "w8a16_asym": lambda out: compressed(llama(), in_groups(8, False), out),
        "w4a16": lambda out: compressed(llama(), in_groups(4, True), out),
        "w4a16_asym": lambda out: compressed(llama(True), in_groups(4, False), out),
        "actorder_static": lambda out: compressed(llama(), gptq_static(), out, True),
        "actorder_group": actorder_group,
        "mixed": lambda out: compressed(llama(), mixed(), out),
        "moe_fp8": lambda out: mixture(modifier("FP8_DYNAMIC", experts), out),
        "moe_w4a16": lambda out: mixture(in_groups(4, True, ignore=experts), out),
        "gptq": lambda out: auto_gptq(wheels, out, symmetric=True, act_order=False),
        "gptq_asym_bias": lambda out: auto_gptq(wheels, out, symmetric=False, act_order=False, bias=True),
        "gptq_desc_act": lambda out: auto_gptq(wheels, out, symmetric=False, act_order=True),
        "gptq_v2": lambda out: auto_gptq(wheels, out, symmetric=False, act_order=True, v2=True),
        "gptq_8bit": lambda out: auto_gptq(wheels, out, symmetric=True, act_order=False, bits=8),
        "awq": lambda out: auto_awq(wheels, out),
        "bnb_nf4": lambda out: bitsandbytes(out, False),
        "bnb_nf4_nested": lambda out: bitsandbytes(out, True),
        "bnb_int8": lambda out: bitsandbytes(out, None),
    }


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--wheels", type=Path, required=True)
    parser.add_argument("--only")
    given = parser.parse_args()
    for name, make in fixtures(given.wheels).items():
        if given.only in (None, name):
            folder = given.out / name
            shutil.rmtree(folder, ignore_errors=True)
            make(folder)
            print(name, sum(path.stat().st_size for path in folder.iterdir()))


if __name__ == "__main__":
    main()
