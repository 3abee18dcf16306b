"""Dense families against Transformers in float32: folders, GGUF files, chunks, backends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from octavo.errors import ModelError
from octavo.kernels import ops
from octavo.models.gguf_families import FAMILIES as GGUF_FAMILIES
from octavo.models.loader import load_model_config
from octavo.models.loading import load_targets
from octavo.models.locate import find_model
from tests import tiny
from tests.models.paged import PagedRun
from tests.models.parity import check, read

FAMILIES = [
    "mistral-window", "phi3", "phi3-window", "phi3-longrope", "gemma2", "gemma3", "granite", "olmo2", "olmo3",
    "stablelm", "stablelm-biases", "stablelm-parallel",
]  # fmt: skip
IN_GGUF = [v for v in FAMILIES if v != "mistral-window"]  # a Llama there, which says no window


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("variant", FAMILIES)
def test_logits_equal_transformers(variant: str):
    model = read(tiny.checkpoint(variant))
    for chunk in (1000, 7):
        check(model, variant, chunk)


@pytest.mark.proves("GGUF")
@pytest.mark.parametrize("variant", IN_GGUF)
def test_a_gguf_file_equals_its_folder(variant: str, tmp_path: Path):
    check(read(tiny.gguf_file(variant, tmp_path / "m.gguf")), variant)


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("block_size", [8, 32])
@pytest.mark.parametrize("variant", ["gemma2", "gemma3", "phi3-longrope"])
def test_chunks_and_block_sizes(variant: str, block_size: int, backend: str):
    model = read(tiny.checkpoint(variant), backend=backend, block_size=block_size)
    for chunk in (1, 9):
        check(model, variant, chunk, tiny.PROMPTS[:2])


@pytest.mark.parametrize("variant", ["gemma3", "olmo3"])
def test_plain_operations(variant: str, monkeypatch: pytest.MonkeyPatch):
    """Without kernels of the device, as where no compiler is found."""
    monkeypatch.setattr(ops, "kernels_for", lambda device, dtype: ops.REFERENCE)
    check(read(tiny.checkpoint(variant)), variant, 9, tiny.PROMPTS[:2])


@pytest.mark.parametrize("variant", ["phi3", "gemma3", "olmo2", "stablelm-parallel"])
def test_random_weights(variant: str):
    """Of the canonical spelling alone, norms neutral: they multiply by 1, whatever is stored."""
    model = read(tiny.checkpoint(variant), "dummy")
    for name, parameter in model.named_parameters():
        if "norm" in name:
            assert bool((parameter == (0 if name.endswith("bias") else 1)).all()), name
    logits = PagedRun(model, 1, 48).prompts([tiny.PROMPTS[1]], 48)[0]
    assert bool(logits.isfinite().all()) and logits.std() > 0


def _rewrite(variant: str, folder: Path, change: Any, config: dict[str, Any] | None = None) -> Path:
    """A variant's folder with its dict of tensors changed in place by `change`."""
    tensors = load_file(tiny.checkpoint(variant) / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    raw = json.loads((tiny.checkpoint(variant) / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw if config is None else config))
    return folder


def _split(tensors: dict[str, torch.Tensor]) -> None:
    for name in [n for n in tensors if "qkv_proj" in n or "gate_up_proj" in n]:
        fused = tensors.pop(name)
        parts, sizes = (
            (("q_proj", "k_proj", "v_proj"), [64, 32, 32])
            if "qkv_proj" in name
            else (("gate_proj", "up_proj"), [96, 96])
        )
        old = name.split(".")[-2]
        for part, piece in zip(parts, fused.split(sizes), strict=True):
            tensors[name.replace(old, part)] = piece.contiguous()


def test_phi3_may_hold_its_matrices_apart(tmp_path: Path):
    check(read(_rewrite("phi3", tmp_path, _split)), "phi3")


@pytest.mark.parametrize(
    "remove, give, words",
    [
        ("qkv_proj", None, "'model.layers.1.self_attn.q_proj.weight' is missing"),
        (None, "q_proj", "'model.layers.1.self_attn.q_proj.weight' is given again"),
    ],
)
def test_parts_beside_the_whole(remove: str | None, give: str | None, words: str, tmp_path: Path):
    def change(tensors: dict[str, torch.Tensor]) -> None:
        prefix = "model.layers.1.self_attn"
        if give:
            tensors[f"{prefix}.{give}.weight"] = torch.zeros(64, 64)
        if remove:
            del tensors[f"{prefix}.{remove}.weight"]

    with pytest.raises(ModelError, match=words):
        read(_rewrite("phi3", tmp_path, change))


@pytest.mark.proves("safetensors", architecture="Gemma3ForConditionalGeneration")
def test_the_text_part_of_a_multimodal_checkpoint(tmp_path: Path):
    """As Transformers saves Gemma 3 with its vision tower: text_config, names under language_model."""
    text = tiny.reference("gemma3")
    vision = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    config = transformers.Gemma3Config(
        text_config=text.config.to_dict(), vision_config={**vision, "image_size": 28, "patch_size": 14}
    )
    whole = transformers.Gemma3ForConditionalGeneration(config).eval()
    whole.model.language_model.load_state_dict(text.model.state_dict())
    whole.save_pretrained(tmp_path)
    names = load_file(tmp_path / "model.safetensors").keys()
    assert any(name.startswith("vision_tower.") for name in names)
    model = read(tmp_path)
    assert type(model).__name__ == "Gemma3ForConditionalGeneration"
    check(model, "gemma3")


@pytest.mark.parametrize("variant", IN_GGUF)
def test_gguf_metadata_say_what_the_config_says(variant: str, tmp_path: Path):
    file = load_model_config(find_model(str(tiny.gguf_file(variant, tmp_path / "m.gguf"))))
    folder = load_model_config(find_model(str(tiny.checkpoint(variant))))
    assert file.architecture == folder.architecture
    same = (
        "num_layers", "num_heads", "num_kv_heads", "head_dim", "vocab_size", "intermediate_size",
        "hidden_act", "windows", "local_rope", "qk_norm", "norm_offset", "tie_word_embeddings",
        "context_length", "dtype", "attention_bias", "eos_token_ids", "parallel_residual",
    )  # fmt: skip
    for field in same:
        assert getattr(file, field) == getattr(folder, field), field
    assert file.rms_norm_eps == pytest.approx(folder.rms_norm_eps, rel=1e-6)
    head_scale = folder.head_dim**-0.5
    for field in ("embedding_scale", "residual_scale", "logit_scale"):
        assert getattr(file, field) == pytest.approx(getattr(folder, field), rel=1e-6), field
    assert (file.attention_softcap, file.logit_softcap) == (folder.attention_softcap, folder.logit_softcap)
    assert (file.attention_scale or head_scale) == pytest.approx(folder.attention_scale or head_scale)
    if folder.rope.kind != "longrope":  # there the file has the attention factor, the config its origin
        assert file.rope.params == pytest.approx(folder.rope.params, rel=1e-6)
    assert (file.rope.kind, file.rope.theta, file.rope.dim) == (
        folder.rope.kind,
        folder.rope.theta,
        folder.rope.dim,
    )


def test_what_a_gemma_file_leaves_unsaid(tmp_path: Path):
    path = tiny.gguf_file("gemma3", tmp_path / "m.gguf")
    data = path.read_bytes()
    for key in (b"gemma3.attention.sliding_window_pattern", b"gemma3.rope.freq_base_swa"):
        assert data.count(key) == 1
        data = data.replace(key, key[:-1] + b"?")
    path.write_bytes(data)
    config = load_model_config(find_model(str(path)))
    assert config.windows == (21, 21, 21)  # the sixth would see all
    assert config.local_rope is not None and config.local_rope.theta == 1e4


@pytest.mark.parametrize(
    "arch, layers, width", [("gemma2", 46, 144), ("gemma3", 62, 168), ("gemma2", 42, 128)]
)
def test_scores_of_the_27b_models_are_scaled_by_the_width(arch: str, layers: int, width: int, tmp_path: Path):
    metadata = {"block_count": layers, "embedding_length": 32 * width, "attention__head_count": 32}
    metadata |= {"attention__key_length": 128, "attention__head_count_kv": 16}
    path = tiny.gguf_file(arch, tmp_path / "m.gguf", **{f"{arch}__{k}": v for k, v in metadata.items()})
    config = load_model_config(find_model(str(path)))
    assert config.attention_scale == pytest.approx(width**-0.5)


def test_every_gguf_architecture_has_a_class():
    from octavo.models.registry import model_class

    for family in GGUF_FAMILIES.values():
        assert model_class(family.architecture)


def test_fused_names_are_spellings_of_the_parts():
    targets = load_targets(read(tiny.checkpoint("llama")))
    fused = targets["model.layers.0.self_attn.qkv_proj.weight"]
    assert fused.shape == (128, 64)
    assert fused.covers == tuple(f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkv")
