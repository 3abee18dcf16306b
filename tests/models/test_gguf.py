"""GGUF files: config, names, row order and every encoding, against the `gguf` package and Transformers."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from octavo import LLM
from octavo.config import EngineConfig
from octavo.errors import ConfigError, ModelError
from octavo.models.gguf_config import generation_config_from_gguf, model_config_from_gguf
from octavo.models.gguf_families import FAMILIES
from octavo.models.gguf_file import GGUFFile
from octavo.models.gguf_quants import dequantize
from octavo.models.gguf_weights import hf_name
from octavo.models.hf_config import model_config_from_folder
from octavo.models.loader import iterate_weights, load_generation_config, load_model_config
from octavo.models.loading import targets_of
from octavo.models.locate import find_model
from octavo.models.pooling_config import pooling_settings
from octavo.tokenization.tokenizer import load_tokenizer
from tests import tiny
from tests.tiny.gguf_writer import ARCHITECTURES

CPU = torch.device("cpu")


def load(path: Path, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    source = find_model(str(path))
    config = load_model_config(source)
    return dict(iterate_weights(source, config, targets_of(config), "auto", dtype, "cpu", progress=False))


def _decodable() -> list[str]:
    names = []
    for kind in gguf.GGMLQuantizationType:
        block, size = gguf.GGML_QUANT_SIZES[kind]
        try:
            gguf.quants.dequantize(np.zeros((1, size), np.uint8), kind)
        except NotImplementedError:
            continue
        names.append(kind.name)
    return names


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # random scales may be NaN or huge
@pytest.mark.parametrize("name", _decodable())
def test_every_encoding_is_bit_equal_to_the_package(name: str) -> None:
    kind = gguf.GGMLQuantizationType[name]
    block, size = gguf.GGML_QUANT_SIZES[kind]
    rows, columns = 9, 1024
    raw = np.random.default_rng(kind).integers(0, 256, (rows, columns // block * size), dtype=np.uint8)
    want = torch.from_numpy(gguf.quants.dequantize(raw, kind).copy())
    got = dequantize(torch.from_numpy(raw.reshape(-1)), name, (rows, columns), torch.float32, CPU)
    same = (got.view(torch.int32) == want.view(torch.int32)) | (got.isnan() & want.isnan())
    assert bool(same.all())
    narrow = dequantize(torch.from_numpy(raw.reshape(-1)), name, (rows, columns), torch.bfloat16, CPU)
    assert torch.equal(narrow.nan_to_num(), want.bfloat16().nan_to_num())


@pytest.mark.parametrize("name", ["Q4_1", "Q6_K"])
def test_decoding_in_pieces(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from octavo.models import gguf_quants

    kind = gguf.GGMLQuantizationType[name]
    block, size = gguf.GGML_QUANT_SIZES[kind]
    raw = torch.from_numpy(np.random.default_rng(0).integers(0, 60, 21 * size, dtype=np.uint8))
    args: Any = (raw, name, (3, 7 * block))
    whole = [dequantize(*args, dtype, CPU) for dtype in (torch.float32, torch.bfloat16)]
    monkeypatch.setattr(gguf_quants, "_CPU_ELEMENTS", 4 * block)
    pieces = [dequantize(*args, dtype, CPU) for dtype in (torch.float32, torch.bfloat16)]
    assert all(torch.equal(a, b) for a, b in zip(whole, pieces, strict=True))


@pytest.mark.proves("GGUF")
@pytest.mark.parametrize("variant", ["llama", "llama-tied", "llama-biases", "mistral", "qwen2", "qwen3"])
def test_weights_and_config_equal_the_folder_s(variant: str, tmp_path: Path) -> None:
    path = tiny.gguf_file(variant, tmp_path / "model.gguf")
    weights = load(path)
    state = tiny.reference(variant).state_dict()
    for name, tensor in weights.items():
        assert torch.equal(tensor, state[name]), name
    ours = load_model_config(find_model(str(path)))
    theirs = model_config_from_folder(tiny.checkpoint(variant))
    for field in ("num_heads", "num_kv_heads", "head_dim", "vocab_size", "num_layers", "rope", "dtype"):
        assert getattr(ours, field) == getattr(theirs, field)
    for field in ("tie_word_embeddings", "attention_bias", "qk_norm", "eos_token_ids", "context_length"):
        assert getattr(ours, field) == getattr(theirs, field)
    assert ours.rms_norm_eps == pytest.approx(theirs.rms_norm_eps, rel=1e-6)


def test_quantized_matrices_are_permuted_by_whole_rows(tmp_path: Path) -> None:
    kind = gguf.GGMLQuantizationType.Q8_0
    weights = load(tiny.gguf_file("llama", tmp_path / "m.gguf", "Q8_0"))
    for name, tensor in tiny.reference("llama").state_dict().items():
        if tensor.ndim > 1:
            tensor = torch.from_numpy(
                gguf.quants.dequantize(gguf.quants.quantize(tensor.numpy(), kind), kind)
            )
        assert torch.equal(weights[name], tensor), name
    assert load_model_config(find_model(str(tmp_path / "m.gguf"))).dtype == "bfloat16"


@pytest.mark.parametrize("variant", ["linear", "yarn"])
def test_rope_scaling_is_read(variant: str, tmp_path: Path) -> None:
    config = load_model_config(find_model(str(tiny.gguf_file(variant, tmp_path / "m.gguf"))))
    assert config.rope == model_config_from_folder(tiny.checkpoint(variant)).rope


def test_llama3_frequencies_come_from_the_tensor(tmp_path: Path) -> None:
    """llama.cpp stores a divisor per frequency: what results is what the llama3 rule computes."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    path = tiny.gguf_file("llama3", tmp_path / "m.gguf")
    rope = load_model_config(find_model(str(path))).rope
    assert (rope.kind, rope.params["attention_factor"]) == ("longrope", 1.0)
    assert rope.params["short_factor"] == rope.params["long_factor"]
    plain = rope.theta ** -(torch.arange(0, rope.dim, 2, dtype=torch.float64) / rope.dim)
    ours = plain / torch.tensor(rope.params["long_factor"], dtype=torch.float64)
    theirs, factor = ROPE_INIT_FUNCTIONS["llama3"](tiny.reference("llama3").config, CPU)
    assert factor == 1.0
    torch.testing.assert_close(ours.float(), theirs, rtol=1e-6, atol=0)
    assert "rope_freqs.weight" not in load(path)


def test_a_matrix_stored_twice_is_tied_at_the_better_precision(tmp_path: Path) -> None:
    """Some quantizers give a tied model an `output.weight` of more bits: it serves for both ends."""
    tied, untied = tmp_path / "tied.gguf", tmp_path / "untied.gguf"
    _with_output(tied, same=True)
    _with_output(untied, same=False)
    weights = load(tied)
    assert "lm_head.weight" not in weights
    embedding = tiny.reference("qwen2-tied").state_dict()["model.embed_tokens.weight"]
    assert torch.equal(weights["model.embed_tokens.weight"], _through(embedding, "Q8_0"))
    weights = load(untied)
    assert torch.equal(weights["model.embed_tokens.weight"], _through(embedding, "Q4_0"))
    assert not torch.equal(weights["model.embed_tokens.weight"], weights["lm_head.weight"])


def _through(tensor: torch.Tensor, qtype: str) -> torch.Tensor:
    kind = gguf.GGMLQuantizationType[qtype]
    return torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(tensor.numpy(), kind), kind))


def _with_output(path: Path, same: bool) -> None:
    q4 = GGUFFile(tiny.gguf_file("qwen2-tied", path, "Q4_0"))
    embedding = tiny.reference("qwen2-tied").state_dict()["model.embed_tokens.weight"].numpy()
    output = embedding if same else np.random.default_rng(0).standard_normal(embedding.shape, np.float32)
    writer = gguf.GGUFWriter(path.with_suffix(".new"), q4.architecture)
    for key, value in q4.metadata.items():
        if key.startswith("general.architecture") or isinstance(value, (list, np.ndarray)):
            continue
        add = {
            str: writer.add_string,
            int: writer.add_uint32,
            float: writer.add_float32,
            bool: writer.add_bool,
        }
        add[type(value)](key, value)
    for tensor in q4.tensors.values():
        kind = gguf.GGMLQuantizationType(tensor.ggml_type)
        data = q4.data(tensor.name)
        shaped = data.view(np.float32) if kind == 0 else data.reshape(tensor.shape[0], -1)
        writer.add_tensor(tensor.name, shaped.copy(), raw_dtype=kind)
    kind = gguf.GGMLQuantizationType.Q8_0
    writer.add_tensor("output.weight", gguf.quants.quantize(output, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    path.with_suffix(".new").replace(path)


def test_sampling_defaults_and_several_eos_ids(tmp_path: Path) -> None:
    path = tiny.gguf_file(
        "llama",
        tmp_path / "m.gguf",
        general__sampling__temp=0.5,
        general__sampling__top_k=30,
        tokenizer__ggml__eot_token_id=7,
    )
    source = find_model(str(path))
    assert load_generation_config(source) == {"temperature": 0.5, "top_k": 30}
    assert load_model_config(source).eos_token_ids == (tiny.EOS, 7)


def test_names() -> None:
    llama = FAMILIES["llama"]
    assert hf_name("blk.12.ffn_down.weight", llama) == "model.layers.12.mlp.down_proj.weight"
    assert hf_name("output.weight", llama) == "lm_head.weight"
    assert hf_name("output_norm.weight", llama) == "model.norm.weight"
    assert hf_name("blk.0.ffn_up_shexp.bias", llama) is None
    experts = "model.layers.3.block_sparse_moe.experts"
    assert hf_name("blk.3.ffn_up_exps.weight", llama) == f"{experts}.w3.weight"
    assert hf_name("blk.3.ffn_down.17.weight", llama) == f"{experts}.17.w2.weight"
    assert hf_name("blk.3.attn_q.17.weight", llama) is None
    assert hf_name("something.weight", llama) is None


def _overwrite(path: Path, old: bytes, new: bytes) -> None:
    data = path.read_bytes()
    assert data.count(old) >= 1 and len(old) == len(new)
    path.write_bytes(data.replace(old, new))


@pytest.mark.parametrize(
    "old, new, words",
    [
        (b"blk.1.ffn_up", b"blk.9.ffn_up", ["model.layers.1.mlp.up_proj.weight' is missing"]),
        (b"blk.1.ffn_up", b"blk.1.ffn_xy", ["'blk.1.ffn_xy.weight' has no place"]),
        (b"token_embd.weight", b"token_embq.weight", ["'token_embd.weight' is missing"]),
    ],
)
def test_wrong_tensors_are_named(old: bytes, new: bytes, words: list[str], tmp_path: Path) -> None:
    path = tiny.gguf_file("llama", tmp_path / "m.gguf")
    _overwrite(path, old, new)
    with pytest.raises(ModelError) as caught:
        load(path)
    assert all(word in str(caught.value) for word in words) and "\n" not in str(caught.value)


def test_truncated_and_foreign_files(tmp_path: Path) -> None:
    path = tiny.gguf_file("llama", tmp_path / "m.gguf")
    data = path.read_bytes()
    for length in (len(data) - 64, len(data) // 2, 3000, 100, 10, 4, 0):
        path.write_bytes(data[:length])
        with pytest.raises(ModelError, match=re.escape(str(path))) as caught:
            load(path)
        assert "\n" not in str(caught.value)
    path.write_bytes(b"PK\x03\x04" + data[4:])
    with pytest.raises(ModelError, match="not a GGUF file"):
        load(path)


def test_wrong_shape_is_named(tmp_path: Path) -> None:
    path = tiny.gguf_file("llama", tmp_path / "m.gguf", llama__feed_forward_length=160)
    with pytest.raises(ModelError, match=r"mlp\.gate_proj\.weight' has shape \[96, 64\].*\[160, 64\]"):
        load(path)


@pytest.mark.parametrize(
    "metadata, words",
    [
        ({"qwen2__expert_count": 8}, "'qwen2' with experts"),
        ({"split__count": 3}, "part 1 of 3 of a model, which its name"),
        ({"llama__rope__scaling__type": "spiral"}, "'spiral'"),
    ],
)
def test_unsupported_models_are_refused(metadata: dict[str, Any], words: str, tmp_path: Path) -> None:
    variant = next(iter(metadata)).partition("__")[0]
    path = tiny.gguf_file(variant if variant in tiny.VARIANTS else "llama", tmp_path / "m.gguf", **metadata)
    with pytest.raises(ModelError, match=words):
        model_config_from_gguf(GGUFFile(path))


def test_unknown_architecture_lists_the_known(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match="'mamba' is not supported: use a file of llama, qwen2, qwen3"):
        load_model_config(find_model(str(tmp_path / "m.gguf")))


def test_undecodable_encoding_is_named(tmp_path: Path) -> None:
    path = tiny.gguf_file("llama", tmp_path / "m.gguf", "Q8_0")
    data = path.read_bytes()
    at = data.index(b"blk.0.ffn_up.weight") + len(b"blk.0.ffn_up.weight") + 4 + 16
    kind = gguf.GGMLQuantizationType.I8
    path.write_bytes(data[:at] + int(kind).to_bytes(4, "little") + data[at + 4 :])
    with pytest.raises(ModelError, match=r"'blk\.0\.ffn_up\.weight' is stored as I8"):
        load(path)


def test_default_model_reads_right(default_model: Path) -> None:
    file = GGUFFile(default_model)
    config = model_config_from_gguf(file)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (30, 9, 3, 64)
    assert (config.vocab_size, config.context_length, config.rope.theta) == (49152, 8192, 100000.0)
    assert config.tie_word_embeddings and config.eos_token_ids == (2,) and config.dtype == "bfloat16"
    assert generation_config_from_gguf(file) == {}
    weights = load(default_model, torch.bfloat16)
    assert all(bool(t.isfinite().all()) for t in weights.values())
    # One q matrix by hand: decoded by the package, rows put back by index.
    tensor = file.tensors["blk.3.attn_q.weight"]
    raw = file.data(tensor.name).reshape(tensor.shape[0], -1)
    rows = torch.from_numpy(gguf.quants.dequantize(raw, gguf.GGMLQuantizationType(tensor.ggml_type)))
    order = [h * 64 + 2 * (i % 32) + i // 32 for h in range(9) for i in range(64)]
    assert torch.equal(weights["model.layers.3.self_attn.q_proj.weight"], rows[order].bfloat16())


@pytest.mark.slow
def test_default_model_is_bit_equal_to_transformers(default_model: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    shape = dict(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        empty = LlamaForCausalLM(LlamaConfig(**shape))
    theirs = load_gguf_checkpoint(str(default_model), return_tensors=True, model_to_load=empty)["tensors"]
    ours = load(default_model)
    assert ours.keys() == theirs.keys() and len(ours) == 272
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["Q4_1", "Q5_0", "Q8_0", "Q3_K", "Q4_K", "Q6_K"])
def test_decoding_on_a_gpu_is_bit_equal(name: str) -> None:
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    raw = torch.randint(0, 60, (64 * size,), dtype=torch.uint8)
    here, there = (
        dequantize(raw, name, (64, block), torch.float32, torch.device(d)) for d in ("cpu", "cuda")
    )
    assert torch.equal(here, there.cpu())


@pytest.mark.parametrize("key", [
    "split__count", "llama__attention__sliding_window", "tokenizer__ggml__eot_token_id",
    "general__sampling__temp", "general__alignment", "tokenizer__ggml__add_eos_token",
    "llama__expert_count", "llama__rope__scaling__type", "llama__rope__scaling__original_context_length",
    "granite__residual_scale", "gemma2__attn_logit_softcapping", "gemma3__rope__freq_base_swa",
    "gemma3__attention__sliding_window_pattern",
])  # fmt: skip
@pytest.mark.parametrize("value", ["x", float("nan"), float("inf"), -1.5])
def test_metadata_of_the_wrong_kind_are_the_files_fault(key: str, value: Any, tmp_path: Path) -> None:
    variant = key.split("__")[0]
    path = tiny.gguf_file(
        variant if variant in tiny.VARIANTS else "llama", tmp_path / "m.gguf", **{key: value}
    )
    for read in (load_model_config, load_generation_config, lambda source: load_tokenizer(source.path)):
        try:
            read(find_model(str(path)))
        except ModelError as error:
            assert str(error).startswith(str(path))


def test_contexts_that_no_memory_holds_are_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    raw = json.loads((tiny.checkpoint("llama") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"max_position_embeddings": (1 << 31) - 1}))
    with pytest.raises(ConfigError, match="weights need"):
        LLM(str(tmp_path), load_format="dummy", skip_tokenizer_init=True, device="cpu")


@pytest.mark.parametrize(
    ("variant", "key", "neutral", "other"),
    [
        ("llama", "attention__causal", True, False),
        ("llama", "attention__clamp_kqv", 0.0, 8.0),
        ("llama", "attention__scale", 0.0, 0.5),
        ("qwen2", "logit_scale", 1.0, 0.5),
        ("qwen2", "final_logit_softcapping", 0.0, 30.0),
        ("mixtral", "expert_gating_func", 1, 2),
        ("mixtral", "expert_weights_norm", True, False),
        ("qwen3-moe", "expert_weights_scale", 1.0, 2.5),
    ],
)
def test_arithmetic_that_a_family_does_not_do_is_refused(
    tmp_path: Path, variant: str, key: str, neutral: Any, other: Any
) -> None:
    arch = ARCHITECTURES[tiny.reference(variant).config.model_type]
    path = tmp_path / "m.gguf"
    plain = model_config_from_gguf(GGUFFile(tiny.gguf_file(variant, path)))
    same = model_config_from_gguf(GGUFFile(tiny.gguf_file(variant, path, **{f"{arch}__{key}": neutral})))
    assert replace(same, extra=plain.extra) == plain
    file = GGUFFile(tiny.gguf_file(variant, path, **{f"{arch}__{key}": other}))
    with pytest.raises(ModelError, match=f"{key.replace('__', '.')}={other!r} is not supported"):
        model_config_from_gguf(file)


def test_pooling_type_makes_an_embedding_model(tmp_path: Path) -> None:
    def settings(**metadata: Any) -> Any:
        path = tiny.gguf_file("qwen3", tmp_path / "m.gguf", **metadata)
        source = find_model(str(path))
        return pooling_settings(EngineConfig(model=str(path)), source, load_model_config(source))

    assert settings() is None
    assert settings(qwen3__pooling_type=0) is None
    for number, kind in ((1, "MEAN"), (2, "CLS"), (3, "LAST")):
        assert settings(qwen3__pooling_type=number).pooling_type == kind
    with pytest.raises(ModelError, match="pooling_type 4 is not supported"):
        settings(qwen3__pooling_type=4)
