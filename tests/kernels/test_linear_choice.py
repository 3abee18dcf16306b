"""Tables of kernels for few rows: what they say, what stands in for what they do not say."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from octavo.kernels.triton import linear, linear_choice, skinny_linear
from octavo.kernels.triton.linear_choice import Chip, Choice, Shape
from octavo.kernels.triton.skinny_linear import SkinnyConfig

QKV, GATE_UP = Shape(4096, 6144, False), Shape(4096, 28672, True)
SKINNY = Choice("skinny", SkinnyConfig(64, 128, 4, 4, 2, 16, False))
TABLE = {
    QKV: {1: Choice("few_rows", (2, 1024, 4, 1)), 8: SKINNY, 32: Choice("cublas")},
    GATE_UP: {1: Choice("few_rows"), 64: SKINNY},
}
H200 = Chip(132, 227 << 10)


def test_tables_survive_their_files() -> None:
    data = json.loads(linear_choice.table_to_json(TABLE, "NVIDIA X1", ["x1"]))
    assert (data["chip"], data["serves"]) == ("NVIDIA X1", ["x1"])
    assert linear_choice.table_from_json(data) == TABLE


@pytest.mark.parametrize(
    ("rows", "shape", "want"),
    [
        (1, QKV, TABLE[QKV][1]),
        (2, QKV, SKINNY),
        (8, QKV, SKINNY),
        (9, QKV, Choice("cublas")),
        (33, QKV, None),
        (1, Shape(4096, 8192, False), TABLE[QKV][1]),  # the nearest
        (1, Shape(4096, 28672, False), None),  # is 2.2 factors of 2 away
        (5, Shape(5120, 20480, True), SKINNY),
        (1, Shape(1024, 1024, False), None),
    ],
)
def test_look_up(rows: int, shape: Shape, want: Choice | None) -> None:
    assert linear_choice.look_up(TABLE, rows, shape) == want
    assert linear_choice.look_up({}, rows, shape) is None


def test_a_cut_for_longer_rows_is_fitted() -> None:
    """As what a tensor-parallel rank has of a matrix: half of its inputs."""
    measured = Choice("few_rows", (2, 4096, 8, 1, 1, 3, 660))
    table = {Shape(4096, 4096, False): {1: measured, 8: SKINNY}}
    assert linear_choice.look_up(table, 1, Shape(4096, 4096, False)) == measured
    fitted = Choice("few_rows", (4, 2048, 8, 1, 1, 3, 660))
    assert linear_choice.look_up(table, 1, Shape(2048, 4096, False)) == fitted
    assert linear_choice.look_up(table, 1, Shape(7168, 4096, False)) == measured
    assert linear_choice.look_up(table, 8, Shape(2048, 4096, False)) == SKINNY


@pytest.mark.parametrize("chip", [H200, Chip(108, 163 << 10), Chip(46, 99 << 10)])
def test_defaults_fit(chip: Chip) -> None:
    """Shared memory holds the tiles, and the device is occupied."""
    for size_in, size_out, gated in [*TABLE, (1024, 4096, False), (2048, 1024, False), (64, 48, True)]:
        for rows in (1, 16, 17, 64, 128):
            c = linear_choice.default_config(rows, Shape(size_in, size_out, gated), chip)
            matrices = 2 if gated else 1
            tile = (c.block_out * matrices + max(16, rows)) * c.block_in * 2
            assert 3 <= c.stages and c.stages * tile <= chip.shared_memory
            if size_in >= 2048 and rows <= 64:
                assert -(-size_out // matrices // c.block_out) * c.splits >= chip.multiprocessors / 3


class Device:
    """Stands for the properties of a CUDA device."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str, major: int = 9):
        monkeypatch.setattr(
            torch.cuda,
            "get_device_properties",
            lambda device: SimpleNamespace(
                name=name, major=major, multi_processor_count=132, shared_memory_per_multiprocessor=228 << 10
            ),
        )
        linear_choice.choose.cache_clear()
        linear_choice.load_table.cache_clear()

    def choose(self, rows: int, shape: Shape) -> Choice:
        return linear_choice.choose(rows, *shape, torch.device("cuda"))


@pytest.fixture(autouse=True)
def fresh() -> None:
    linear_choice.choose.cache_clear()
    linear_choice.load_table.cache_clear()


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A table that serves X1 and X2 in the place of those that ship."""
    (tmp_path / "tuned").mkdir()
    text = linear_choice.table_to_json(TABLE, "NVIDIA X1", ["x1", "x2"])
    (tmp_path / "tuned/x1.json").write_text(text)
    monkeypatch.setattr(linear_choice, "__file__", str(tmp_path / "linear_choice.py"))


def test_choose(monkeypatch: pytest.MonkeyPatch, tables: None) -> None:
    for name in ("NVIDIA X1", "NVIDIA X2 80GB HBM3"):
        device = Device(monkeypatch, name)
        assert device.choose(1, QKV) == TABLE[QKV][1]
        assert device.choose(8, QKV) == SKINNY
        assert device.choose(257, QKV) == device.choose(0, QKV) == Choice("cublas")
    # Not measured: many rows, other chips. Too old: Turing.
    assert device.choose(64, QKV) == linear_choice.default_choice(64, QKV, H200)
    assert Device(monkeypatch, "NVIDIA X10").choose(8, QKV) == linear_choice.default_choice(8, QKV, H200)
    assert Device(monkeypatch, "NVIDIA X1", major=7).choose(1, QKV) == Choice("cublas")


def test_a_few_rows_kernel_is_not_asked_for_more(monkeypatch: pytest.MonkeyPatch, tables: None) -> None:
    monkeypatch.setattr(linear_choice, "table_from_json", lambda data: {QKV: {16: Choice("few_rows")}})
    device = Device(monkeypatch, "NVIDIA X1")
    assert device.choose(linear.MAX_ROWS, QKV).kind == "few_rows"
    assert device.choose(linear.MAX_ROWS + 1, QKV).kind != "few_rows"


def test_without_a_device() -> None:
    """Triton's interpreter gets choices too, that its kernels accept."""
    for rows in (1, 3, 20):
        choice = linear_choice.choose(rows, 64, 32, True, torch.device("cpu"))
        x, weight = torch.randn(rows, 64), torch.randn(32, 64)
        gate, up = (x @ weight.T).chunk(2, 1)
        if choice.kind == "skinny":
            assert isinstance(choice.config, SkinnyConfig)
            got = skinny_linear.skinny_linear(x, weight, None, "silu", choice.config)
        else:
            got = linear.few_rows_linear(x, weight, None, choice.config, "silu")
        torch.testing.assert_close(got, torch.nn.functional.silu(gate) * up, rtol=1e-4, atol=1e-4)


def test_shipped_tables() -> None:
    """Each parses, serves somebody, and its cuts fit the shared memory that they were found with."""
    paths = list((Path(linear_choice.__file__).parent / "tuned").glob("*.json"))
    assert paths
    for path in paths:
        data = json.loads(path.read_text())
        assert data["serves"] and all(word == word.lower() for word in data["serves"])
        table = linear_choice.table_from_json(data)
        assert table
        for shape, choices in table.items():
            for rows, choice in choices.items():
                assert choice.kind in ("few_rows", "skinny", "cublas")
                assert choice.kind != "few_rows" or rows <= linear.MAX_ROWS
                if choice.kind == "skinny":
                    assert isinstance(choice.config, SkinnyConfig)
                    tile_rows = choice.config.tile_rows or max(16, rows)
                    tile = choice.config.block_out * (2 if shape.gated else 1) + tile_rows
                    # A stage less where results are summed in registers.
                    assert (choice.config.stages - 1) * tile * choice.config.block_in * 2 <= 227 << 10
