"""What each tensor-parallel rank reads of a checkpoint's files: its own bytes, and no others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from octavo.models import read_ahead, weights
from octavo.models.gguf_config import model_config_from_gguf
from octavo.models.gguf_file import GGUFFile
from octavo.models.gguf_weights import gguf_weights
from octavo.models.interface import CausalLM
from octavo.models.loader import iterate_weights, load_model_config
from octavo.models.loading import build_model, load_targets, load_weights
from octavo.models.locate import find_model
from octavo.models.mapped_file import MappedFile
from octavo.models.quantized import checkpoint_quantization
from octavo.models.safetensors_file import list_files, read_header
from octavo.models.stage import stage_part
from octavo.parallel.state import TensorParallelGroup, use_group
from octavo.quantization.scheme import setting
from tests import tiny
from tests.quantization.checkpoints import FOLDER

Method = Callable[[MappedFile, int, int], None]


class Watched:
    """Which bytes of a folder's one file are brought into memory, or asked of the disk."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch):
        (self.path,) = list_files(folder)
        header = read_header(self.path)
        self.touched = np.zeros(header.size, bool)
        self.stored = np.zeros(header.size, bool)
        for stored in header.tensors.values():
            self.stored[stored.offset : stored.offset + stored.nbytes] = True
        for name in ("populate", "announce"):
            monkeypatch.setattr(MappedFile, name, self._watch(getattr(MappedFile, name)))

    def _watch(
        self, method: Callable[[MappedFile, int, int], None]
    ) -> Callable[[MappedFile, int, int], None]:
        def watched(file: MappedFile, offset: int, nbytes: int) -> None:
            self.touched[offset : offset + nbytes] = True
            method(file, offset, nbytes)

        return watched


def load(
    folder: Path, group: TensorParallelGroup, expert_parallel: bool = False, stage: int | None = None
) -> tuple[CausalLM, int]:
    """A rank's model (or what it has on a stage of two), and the bytes of its parameters before any was
    repacked."""
    source = find_model(str(folder))
    config = load_model_config(source)
    build = partial(
        build_model, config, dtype=torch.float32, max_model_len=64, block_size=8,
        quantization=checkpoint_quantization(source, config, "auto"), expert_parallel=expert_parallel,
    )  # fmt: skip
    with use_group(group):
        part = None if stage is None else stage_part(build(device="meta"), stage, 2, None)
        model = build(device="cpu", part=part)
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    given = iterate_weights(source, config, load_targets(model), "auto", torch.float32, "cpu", progress=False)
    load_weights(model, given)
    return model, nbytes


@pytest.fixture(autouse=True)
def runs_of_any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "LEAST_RUN", 1)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(
    ("variant", "joined", "expert_parallel"),
    [
        ("llama", False, False), ("qwen2", False, False), ("phi3", False, False),
        ("mixtral", False, False), ("mixtral", False, True), ("mixtral", True, False),
        ("mixtral", True, True),
    ],
)  # fmt: skip
def test_a_rank_reads_the_bytes_that_it_keeps(
    variant: str,
    joined: bool,
    expert_parallel: bool,
    size: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Parameters are float32 as the files are, so that one byte becomes one."""
    folder = tiny.checkpoint(variant)
    if joined:
        tiny.reference(variant).save_pretrained(tmp_path, save_original_format=False)
        folder = tmp_path
    watched, everyone = Watched(folder, monkeypatch), 0
    for rank in range(size):
        watched.touched[:] = False
        _, kept = load(folder, TensorParallelGroup(rank, size), expert_parallel)
        assert not (watched.touched & ~watched.stored).any()
        assert int(watched.touched.sum()) == kept
        everyone |= watched.touched
    assert (everyone == watched.stored).all()


@pytest.mark.parametrize("variant", ["llama", "llama-tied", "mixtral"])
def test_a_stage_reads_its_own_layers(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two stages of two ranks, with whole experts."""
    watched, everyone = Watched(tiny.checkpoint(variant), monkeypatch), 0
    for stage in range(2):
        for rank in range(2):
            watched.touched[:] = False
            _, kept = load(tiny.checkpoint(variant), TensorParallelGroup(rank, 2), True, stage)
            assert int(watched.touched.sum()) == kept
            everyone |= watched.touched
    assert (everyone == watched.stored).all()


@pytest.mark.parametrize("name", ["w4a16", "awq", "gptq", "bnb_nf4", "moe_fp8", "moe_w4a16"])
def test_quantized_tensors_are_cut_too(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ranks together read once what is split, and twice what every rank has whole."""
    watched = Watched(FOLDER / name, monkeypatch)
    touched = []
    for rank in range(2):
        watched.touched[:] = False
        load(FOLDER / name, TensorParallelGroup(rank, 2))
        touched.append(watched.touched.copy())
    both = {}
    for key, stored in read_header(watched.path).tensors.items():
        piece = slice(stored.offset, stored.offset + stored.nbytes)
        assert (touched[0] | touched[1])[piece].all(), key
        both[key] = int((touched[0] & touched[1])[piece].sum())
    for key, count in both.items():
        if key.endswith((".weight", ".qweight", ".weight_packed")):
            assert (count > 0) == ("norm" in key or "gate.weight" in key), key


@pytest.mark.parametrize("qtype", ["F32", "F16", "Q8_0"])
@pytest.mark.parametrize("quantization", [None, "gguf"])
@pytest.mark.parametrize("variant", ["llama", "phi3", "mixtral"])
def test_rows_of_a_gguf_file(
    variant: str,
    quantization: str | None,
    qtype: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rank decodes its own rows, heads (whose rows are permuted in the file) and experts, what lies between
    the parts of a fused matrix, and of matrices split by columns all: to the bit as of whole tensors."""
    model = tiny.build(variant, intermediate_size=128)
    file = GGUFFile(tiny.gguf_file(variant, tmp_path / "m.gguf", qtype, model=model))
    config, asked = model_config_from_gguf(file), [0]
    plain = MappedFile.populate

    def populate(self: MappedFile, offset: int, nbytes: int) -> None:
        asked[0] += nbytes
        plain(self, offset, nbytes)

    monkeypatch.setattr(MappedFile, "populate", populate)

    def read(rank: int, everything: bool) -> tuple[dict[str, torch.Tensor], int]:
        with use_group(TensorParallelGroup(rank, 2)):
            built = build_model(
                config, dtype=torch.float32, device="cpu", max_model_len=64, block_size=8,
                quantization=None if quantization is None else setting(quantization), expert_parallel=True,
            )  # fmt: skip
        targets = load_targets(built)
        if everything:
            targets = {name: replace(target, regions=None) for name, target in targets.items()}
        asked[0] = 0
        load_weights(built, gguf_weights(file, config, targets, torch.float32, torch.device("cpu"))[1])
        return {name: t for name, t in (*built.named_parameters(), *built.named_buffers())}, asked[0]

    total = sum(tensor.nbytes for tensor in file.tensors.values())
    for rank in range(2):
        (ours, few), (whole, all_bytes) = read(rank, False), read(rank, True)
        assert ours.keys() == whole.keys()
        for name, tensor in ours.items():
            assert torch.equal(tensor.view(torch.uint8), whole[name].view(torch.uint8)), name
        assert all_bytes == total
        assert few < {"llama": 0.75, "phi3": 0.8, "mixtral": 0.6}[variant] * total


def test_short_runs_are_joined_with_what_lies_between(monkeypatch: pytest.MonkeyPatch) -> None:
    """A column of pages would be read as a whole all the same."""
    monkeypatch.setattr(weights, "LEAST_RUN", read_ahead.LEAST_RUN)
    folder = tiny.checkpoint("llama")
    watched = Watched(folder, monkeypatch)
    load(folder, TensorParallelGroup(1, 2))
    for key, stored in read_header(watched.path).tensors.items():
        share = watched.touched[stored.offset : stored.offset + stored.nbytes].mean()
        assert share == (1.0 if "norm" in key or "o_proj" in key or "down_proj" in key else 0.5), key


def test_large_matrices_are_read_by_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `FileTensor`s, whose pieces of a matrix cut by columns are runs of single rows."""
    monkeypatch.setattr(read_ahead, "_LARGE_CPU", 1 << 10)
    folder = tiny.checkpoint("llama")
    watched = Watched(folder, monkeypatch)
    for rank in range(2):
        watched.touched[:] = False
        model, kept = load(folder, TensorParallelGroup(rank, 2))
        assert int(watched.touched.sum()) == kept
        assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())
