"""Quantized checkpoints that are made here: read back, by Transformers too, and after an interruption."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo import QuantizationModifier, oneshot
from octavo.errors import ConfigError, ModelError
from octavo.models.safetensors_file import read_header
from octavo.quantization import rounding
from octavo.quantization.compress import oneshot as module
from octavo.quantization.compress.progress import FILE
from octavo.quantization.compress.recipe import read_recipe
from tests import tiny
from tests.quantization.checkpoints import FOLDER, HOPPER, load, logits, pretend, source_folder, spread

TOKENS = torch.randint(3, 120, (24,), generator=torch.Generator().manual_seed(7))
SCHEMES = ["FP8_DYNAMIC", "FP8_BLOCK", "W8A8", "W8A16", "W4A16"]


def make(folder: Path, scheme: str, source: Path | None = None, **more: Any) -> Path:
    if scheme == "W4A16":
        more.setdefault("group_size", 32)
    modifier = QuantizationModifier(targets="Linear", scheme=scheme, **{"ignore": ["lm_head"], **more})
    return oneshot(source or source_folder(scheme == "FP8_BLOCK"), modifier, folder, progress=False)


def transformers_logits(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Of Transformers' model with compressed-tensors: activations as they are, and quantized."""
    pytest.importorskip("compressed_tensors", reason="which needs Python 3.11")
    from compressed_tensors.quantization import disable_quantization
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        quantized = model(TOKENS[None]).logits[0].clone()
        for part in model.modules():
            disable_quantization(part)
        return model(TOKENS[None]).logits[0], quantized


@pytest.mark.parametrize("scheme", SCHEMES)
def test_transformers_reads_the_same_model(
    scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make(tmp_path / "out", scheme)
    plain, quantized = transformers_logits(folder)
    assert float((logits(load(folder, dequantize=True), TOKENS) - plain).abs().max()) < 1e-4
    pretend(monkeypatch, HOPPER)
    found, noise = logits(load(folder), TOKENS), spread(quantized, plain)
    if scheme in ("W8A16", "W4A16"):
        assert noise == 0 and spread(found, plain) < 1e-4
    else:  # a row that rounds otherwise by the last bit of a float goes its own way
        assert 0.5 * noise < spread(found, plain) < 1.5 * noise


@pytest.mark.parametrize(
    ("scheme", "fixture"), [("FP8_DYNAMIC", "fp8_dynamic"), ("FP8_BLOCK", "fp8_block"), ("W8A8", "w8a8")]
)
def test_files_are_those_of_llm_compressor(scheme: str, fixture: str, tmp_path: Path) -> None:
    """The same tensors, types, shapes and scales (codes: `test_rounding`); the config in the same words."""
    folder = make(tmp_path / "out", scheme)
    ours, theirs = load_file(folder / "model.safetensors"), load_file(FOLDER / fixture / "model.safetensors")
    assert {k: (t.dtype, t.shape) for k, t in ours.items()} == {
        k: (t.dtype, t.shape) for k, t in theirs.items()
    }
    for key, tensor in theirs.items():
        if ours[key].dtype is torch.bfloat16:
            assert torch.equal(ours[key], tensor), key
    entries = [
        json.loads((path / "config.json").read_text())["quantization_config"]
        for path in (folder, FOLDER / fixture)
    ]
    assert entries[0]["ignore"] == entries[1]["ignore"] == ["lm_head"]
    for part in ("weights", "input_activations"):
        want = entries[1]["config_groups"]["group_0"][part]
        for word, value in entries[0]["config_groups"]["group_0"][part].items():
            assert want[word] == value, (part, word)


def test_the_folder_is_whole(tmp_path: Path) -> None:
    source = tiny.checkpoint("llama")
    folder = make(tmp_path / "out", "FP8_DYNAMIC", source)
    for path in source.iterdir():
        if path.name.startswith(("tokenizer", "generation_config")):
            assert (folder / path.name).read_bytes() == path.read_bytes()
    assert not [p.name for p in folder.iterdir() if p.name.startswith(".") or p.name.endswith(".part")]
    assert read_recipe(folder / "recipe.yaml").scheme == "FP8_DYNAMIC"
    card = (folder / "README.md").read_text()
    assert (
        f"torch {torch.__version__}" in card and "scheme: FP8_DYNAMIC" in card and str(tmp_path) not in card
    )


def test_searched_scales_are_nearer_than_plain_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = load(make(tmp_path / "a", "W8A16"), dequantize=True)
    want = logits(plain, TOKENS)
    searched = spread(logits(load(make(tmp_path / "b", "W4A16"), dequantize=True), TOKENS), want)
    monkeypatch.setattr(module, "THOROUGH", ())
    nearest = spread(logits(load(make(tmp_path / "c", "W4A16"), dequantize=True), TOKENS), want)
    assert searched < nearest


def test_routers_and_ignored_layers_stay(tmp_path: Path) -> None:
    source = tiny.checkpoint("qwen3-moe")
    ignore = ["lm_head", "re:.*layers.0.self_attn", "model.layers.1.mlp.experts.0.up_proj"]
    folder = make(tmp_path / "out", "FP8_DYNAMIC", source, ignore=ignore)
    before, after = load_file(source / "model.safetensors"), load_file(folder / "model.safetensors")
    kept = json.loads((folder / "config.json").read_text())["quantization_config"]["ignore"]
    assert {"lm_head", "model.layers.0.mlp.gate", "model.layers.0.self_attn.q_proj", ignore[2]} <= set(kept)
    assert "model.embed_tokens" not in kept
    for layer in kept:
        if f"{layer}.weight" in before:
            assert torch.equal(before[f"{layer}.weight"], after[f"{layer}.weight"])
    assert after["model.layers.1.mlp.experts.1.down_proj.weight"].dtype is torch.float8_e4m3fn
    load(folder)


def in_shards(folder: Path) -> Path:
    """The source in three files."""
    tensors = load_file(source_folder() / "model.safetensors")
    folder.mkdir()
    names = sorted(tensors)
    weight_map = {}
    for i in range(3):
        file = f"model-{i + 1:05}-of-00003.safetensors"
        part = {name: tensors[name] for name in names[i::3]}
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    shutil.copy(source_folder() / "config.json", folder)
    return folder


def test_a_run_that_was_cut_short_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = in_shards(tmp_path / "in")
    whole = make(tmp_path / "whole", "W8A8", source)
    made, rounds = [], rounding.round_matrix

    def fails_in_the_last_file(name: str, *args: Any, **settings: Any) -> Any:
        made.append(name)
        if len(made) == 12:
            raise KeyboardInterrupt
        return rounds(name, *args, **settings)

    monkeypatch.setattr(module, "round_matrix", fails_in_the_last_file)
    folder = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        make(folder, "W8A8", source)
    finished = json.loads((folder / FILE).read_text())["finished"]
    assert 1 <= len(finished) < 3 and not list(folder.glob(".*.part"))
    assert not (folder / "config.json").exists()  # nobody takes it for a model
    with pytest.raises(ConfigError, match="holds an unfinished run of another recipe"):
        make(folder, "FP8_DYNAMIC", source)
    first = next(iter(finished))
    times = {name: (folder / name).stat().st_mtime_ns for name in finished}
    if len(finished) > 1:  # one that was changed since is made anew
        with (folder / first).open("r+b") as file:
            file.seek(-1, 2)
            file.write(b"\x55")
    make(folder, "W8A8", source)
    for path in whole.iterdir():
        if path.suffix != ".md":
            assert (folder / path.name).read_bytes() == path.read_bytes(), path.name
    assert not (folder / FILE).exists()
    kept = [name for name in finished if (folder / name).stat().st_mtime_ns == times[name]]
    assert kept == list(finished)[1:] or len(finished) == 1
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    for name, file in index["weight_map"].items():
        assert name in read_header(folder / file).tensors
    assert index["metadata"]["total_size"] == sum(
        t.nbytes
        for file in set(index["weight_map"].values())
        for t in read_header(folder / file).tensors.values()
    )
    load(folder)


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = SimpleNamespace(free=1_000)
    monkeypatch.setattr(module.shutil, "disk_usage", lambda folder: free)
    with pytest.raises(ConfigError, match=r"out': 0.1 MB are to be written, and 0.0 MB are free: make"):
        make(tmp_path / "out", "W8A8")
    free.free = 1 << 30

    def fails(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(module.SafetensorsWriter, "add", fails)
        with pytest.raises(ConfigError, match=r"cannot be written \(No space left on device\): mend that"):
            make(tmp_path / "out", "W8A8")
    assert [p.name for p in (tmp_path / "out").iterdir()] == [FILE]
    load(make(tmp_path / "out", "W8A8"))


def test_a_damaged_source_leaves_no_file(tmp_path: Path) -> None:
    source = tmp_path / "in"
    shutil.copytree(source_folder(), source)
    found = load_file(source / "model.safetensors")
    found["model.layers.1.mlp.up_proj.weight"][3, 5] = float("inf")
    save_file(found, source / "model.safetensors")
    with pytest.raises(ModelError, match="layers.1.mlp.up_proj.weight holds inf, which cannot be quantized"):
        make(tmp_path / "out", "FP8_DYNAMIC", source)
    assert [p.name for p in (tmp_path / "out").iterdir()] == [FILE]


@pytest.mark.parametrize(
    ("scheme", "more", "told"),
    [
        ("W8A8", {"ignore": []}, "lm_head has no matrix of its own in .*: add lm_head to ignore"),
        (
            "W8A8",
            {"ignore": ["lm_haed"]},
            "ignore: 'lm_haed' is no layer of the model: did you mean lm_head?",
        ),
        ("W8A8", {"targets": "Liner"}, "targets: 'Liner' is no layer of the model: did you mean Linear?"),
        ("W8A8", {"targets": ["re:.*qq_proj"]}, "targets: 're:.*qq_proj' matches no layer"),
        ("W8A8", {"ignore": ["re:.*"]}, "targets match no layer of the model, or ignore all"),
        ("W4A16", {"group_size": 128}, "64 columns, and 128 share an entry"),
        ("FP8_BLOCK", {}, "has 192 columns, which are no groups of 128"),
    ],
)
def test_a_recipe_that_does_not_fit(scheme: str, more: dict[str, Any], told: str, tmp_path: Path) -> None:
    modifier = QuantizationModifier(**{"scheme": scheme, "ignore": ["lm_head"], **more})
    with pytest.raises((ConfigError, ModelError), match=told):
        oneshot(source_folder(), modifier, tmp_path / "out", progress=False)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("device", ["tpu", "cuda:99", ""])
def test_a_device_that_is_not_there(device: str, tmp_path: Path) -> None:
    modifier = QuantizationModifier(targets="Linear", scheme="W8A8", ignore=["lm_head"])
    with pytest.raises(ConfigError, match=f"device='{device}' .*: choose auto, cpu or cuda"):
        oneshot(source_folder(), modifier, tmp_path / "out", device=device, progress=False)
    assert not (tmp_path / "out").exists()


def test_all_threads_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading files sets PyTorch to one thread; rounding has those that the process has."""
    before, seen = torch.get_num_threads(), set()
    plain = module.round_matrix

    def counted(*args: Any, **more: Any) -> Any:
        seen.add(torch.get_num_threads())
        return plain(*args, **more)

    monkeypatch.setattr(module, "round_matrix", counted)
    torch.set_num_threads(3)
    try:
        make(tmp_path / "out", "W8A8")
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert seen == {3}


def test_models_and_folders_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="is quantized already, by gptq"):
        make(tmp_path / "out", "W8A8", FOLDER / "gptq")
    gguf = tiny.gguf_file("llama", tmp_path / "m.gguf", "F16")
    with pytest.raises(ModelError, match="is a GGUF file, which cannot be quantized by a recipe"):
        make(tmp_path / "out", "W8A8", gguf)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "precious.txt").write_text("mine")
    with pytest.raises(ConfigError, match="is not empty: name another"):
        make(tmp_path / "full", "W8A8")
    with pytest.raises(ConfigError, match="is the model's own folder"):
        make(source_folder(), "W8A8")
