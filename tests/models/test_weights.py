"""Weights of checkpoint folders and random ones: the right numbers, once, or one line that says why not."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.errors import ModelError
from octavo.models.loader import iterate_weights, load_generation_config, load_model_config
from octavo.models.loading import targets_of
from octavo.models.locate import find_model
from octavo.models.safetensors_file import INDEX
from octavo.models.targets import canonical
from tests import tiny


def load(folder: Path, load_format: str = "auto", **options: Any) -> dict[str, torch.Tensor]:
    source = find_model(str(folder))
    config = load_model_config(source)
    options = {"dtype": torch.float32, "device": "cpu", "progress": False, **options}
    pairs = list(iterate_weights(source, config, targets_of(config), load_format, **options))
    assert len({name for name, _ in pairs}) == len(pairs)
    targets = targets_of(config)
    wanted = canonical(targets)
    assert {n: tuple(t.shape) for n, t in pairs if not targets[n].optional} == wanted
    return dict(pairs)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    shutil.copytree(tiny.checkpoint("llama"), folder)
    return folder


def rewrite(folder: Path, change: Any, **options: Any) -> None:
    """Load the folder's tensors, change the dict, save it again."""
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, **options)


@pytest.mark.parametrize("variant", ["llama", "llama-tied", "llama-biases", "mistral", "qwen2", "qwen3"])
def test_safetensors_equal_transformers(variant: str) -> None:
    weights = load(tiny.checkpoint(variant))
    state = tiny.reference(variant).state_dict()
    for name, tensor in weights.items():
        assert torch.equal(tensor, state[name])


def test_tensors_are_views_of_one_mapping() -> None:
    """Never twice in RAM: every tensor lies at its file offset from one base address, uncopied."""
    from octavo.models.safetensors_file import read_header

    folder = tiny.checkpoint("llama")
    header = read_header(folder / "model.safetensors")
    weights = load(folder)
    bases = {tensor.data_ptr() - header.tensors[name].offset for name, tensor in weights.items()}
    assert len(bases) == 1


def test_shards_by_index(tmp_path: Path) -> None:
    tiny.reference("qwen2").save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    whole = load(tiny.checkpoint("qwen2"))
    parts = load(tmp_path)
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    (shard := sorted(tmp_path.glob("*.safetensors"))[1]).unlink()
    with pytest.raises(ModelError, match=rf"{shard.name}: missing, though {INDEX} names it.*fetch"):
        load(tmp_path)


def test_bfloat16_comes_as_stored(copy: Path) -> None:
    rewrite(copy, lambda t: t.update({k: v.bfloat16() for k, v in t.items()}))
    weights = load(copy)
    state = tiny.reference("llama").state_dict()
    assert all(torch.equal(tensor, state[name].bfloat16()) for name, tensor in weights.items())


def test_misaligned_tensors_are_read(copy: Path) -> None:
    """A header of odd length is legal in the format, though the library pads it."""
    path = copy / "model.safetensors"
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    path.write_bytes(struct.pack("<Q", length + 1) + data[8 : 8 + length] + b" " + data[8 + length :])
    state = tiny.reference("llama").state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in load(copy).items())


def test_derived_buffers_are_left_out_and_a_stored_head_of_a_tied_model_is_not(tmp_path: Path) -> None:
    shutil.copytree(tiny.checkpoint("llama-tied"), tmp_path / "m")

    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    rewrite(tmp_path / "m", add)
    names = load(tmp_path / "m")
    assert "lm_head.weight" in names  # the head compares it: one matrix if equal, its own otherwise
    assert not any("inv_freq" in name for name in names)


def test_torch_files_are_read_without_running_code(copy: Path) -> None:
    state = tiny.reference("llama").state_dict()
    (copy / "model.safetensors").unlink()
    torch.save(dict(state), copy / "pytorch_model.bin")
    weights = load(copy)
    assert all(torch.equal(tensor, state[name]) for name, tensor in weights.items())
    with pytest.raises(ModelError, match="no safetensors file"):
        load(copy, "safetensors")

    class Evil:
        def __reduce__(self) -> Any:
            return (Path.touch, (copy / "owned",))

    torch.save({"model.norm.weight": Evil()}, copy / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin: cannot be loaded safely"):
        load(copy)
    assert not (copy / "owned").exists()


def _truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def _cut_header(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:50])


def _garbage(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 40) + b"x" * 200)


def _empty(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")


def _drop(folder: Path) -> None:
    rewrite(folder, lambda t: t.pop("model.layers.1.mlp.up_proj.weight"))


def _reshape(folder: Path) -> None:
    rewrite(folder, lambda t: t.update({"model.norm.weight": torch.ones(65)}))


def _surplus(folder: Path) -> None:
    rewrite(folder, lambda t: t.update({"model.layers.0.mlp.router.weight": torch.ones(4)}))


def _type(folder: Path) -> None:
    rewrite(folder, lambda t: t.update({"model.norm.weight": torch.ones(64, dtype=torch.int8)}))


def _wrong_config(folder: Path) -> None:
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, "num_hidden_layers": 4}))


def _no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


@pytest.mark.parametrize(
    "damage, words",
    [
        (_truncate, ["model.safetensors: truncated", "fetch"]),
        (_cut_header, ["model.safetensors: truncated"]),
        (_garbage, ["model.safetensors: corrupt"]),
        (_empty, ["model.safetensors: truncated", "(0 bytes)"]),
        (_drop, ["'model.layers.1.mlp.up_proj.weight' is missing"]),
        (_reshape, ["'model.norm.weight' has shape [65]", "[64]"]),
        (_surplus, ["'model.layers.0.mlp.router.weight' has no place"]),
        (_type, ["'model.norm.weight' has type I8"]),
        (_wrong_config, ["model.layers.3.input_layernorm.weight' is missing", "config"]),
        (_no_weights, ["no safetensors file", "--load-format dummy"]),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_damage_is_named_in_one_line(copy: Path, damage: Any, words: list[str]) -> None:
    damage(copy)
    with pytest.raises(ModelError) as caught:
        load(copy)
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_format_that_does_not_fit(copy: Path) -> None:
    with pytest.raises(ModelError, match="load_format='gguf' does not fit"):
        load(copy, "gguf")


def test_dummy_needs_a_config_alone(tmp_path: Path) -> None:
    raw = json.loads((tiny.checkpoint("qwen2") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw))
    weights = load(tmp_path, "dummy", seed=3)
    assert torch.equal(weights["model.norm.weight"], torch.ones(64))
    assert torch.equal(weights["model.layers.0.self_attn.q_proj.bias"], torch.zeros(64))
    for name in ("model.embed_tokens.weight", "model.layers.2.mlp.down_proj.weight", "lm_head.weight"):
        matrix = weights[name]
        assert matrix.std().item() == pytest.approx(0.02, rel=0.03)
        assert abs(matrix.mean().item()) < 2e-3
        assert matrix.abs().max().item() <= 0.02 * 3**0.5 * 1.0001
        rows = torch.corrcoef(matrix[:16]).fill_diagonal_(0)
        assert rows.abs().max().item() < 0.6


def test_dummy_is_a_function_of_config_seed_and_name(copy: Path) -> None:
    once, again, other = (load(copy, "dummy", seed=seed) for seed in (3, 3, 4))
    name = "model.layers.0.mlp.gate_proj.weight"
    assert all(torch.equal(once[key], again[key]) for key in once)
    assert not torch.equal(once[name], other[name])
    assert not torch.equal(once[name], once["model.layers.0.mlp.up_proj.weight"])
    half = load(copy, "dummy", seed=3, dtype=torch.bfloat16)
    assert torch.equal(half[name], once[name].bfloat16())


def test_dummy_does_not_depend_on_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    from octavo.models import dummy

    args = ("w", (37, 41), 0.02, torch.float32, torch.device("cpu"), 5)
    whole = dummy.random_weight(*args)
    monkeypatch.setattr(dummy, "_CPU_CHUNK", 100)
    assert torch.equal(dummy.random_weight(*args), whole)
    # Pinned, so that a fingerprint of random weights means the same in every version.
    assert [round(x, 6) for x in whole[0, :4].tolist()] == [0.022428, 0.017067, 0.016131, -0.009479]


@pytest.mark.gpu
def test_dummy_is_the_same_on_a_gpu(copy: Path) -> None:
    here = load(copy, "dummy", dtype=torch.bfloat16)
    there = load(copy, "dummy", dtype=torch.bfloat16, device="cuda")
    assert all(torch.equal(here[name], there[name].cpu()) for name in here)


def test_generation_config_of_a_folder(copy: Path) -> None:
    (copy / "generation_config.json").write_text('{"temperature": 0.7, "eos_token_id": [2, 9]}')
    source = find_model(str(copy))
    assert load_generation_config(source) == {"temperature": 0.7}
    assert load_model_config(source).eos_token_ids == (2, 9)


def test_thread_setting_survives_an_unfinished_load(copy: Path) -> None:
    before = torch.get_num_threads()
    source = find_model(str(copy))
    config = load_model_config(source)
    weights = iterate_weights(
        source, config, targets_of(config), "dummy", torch.float32, "cpu", progress=False
    )
    next(weights)
    del weights
    assert torch.get_num_threads() == before
