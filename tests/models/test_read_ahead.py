"""Reading ahead of a consumer and giving back behind it: the right bytes, once in memory."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from octavo.errors import ModelError
from octavo.models.file_tensor import PIECE_BYTES, FileTensor, Staging
from octavo.models.mapped_file import MappedFile, touched_ahead
from octavo.models.read_ahead import ReadAhead, Span, read_spans

CPU = torch.device("cpu")
MIB = 1 << 20


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """48 MiB of random bytes."""
    path = tmp_path_factory.mktemp("big") / "big.bin"
    path.write_bytes(os.urandom(MIB) * 24 + os.urandom(MIB) * 24)
    return path


def mapped(path: Path) -> MappedFile:
    return MappedFile(path, path.stat().st_size)


def resident(path: Path) -> int:
    """Bytes of a file that this process holds through mappings."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line[0] in "0123456789abcdef" and "-" in line.split()[0]:
            inside = line.endswith(str(path))
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1]) << 10
    return total


def spans_of(path: Path, sizes: list[int], start: int = 0) -> list[Span]:
    file, spans = mapped(path), []
    for size in sizes:
        spans.append(Span(file, start, size))
        start += size
    return spans


def test_every_span_has_its_bytes(big: Path, tmp_path: Path) -> None:
    """Small and large ones, empty ones, gaps, two files."""
    small = tmp_path / "small"
    small.write_bytes(os.urandom(10_000))
    spans = [
        *spans_of(small, [1, 0, 4095, 5000]),
        *spans_of(big, [3, 17 * MIB + 5, 0, 100, 2 * MIB], start=4096),
        *spans_of(big, [20 * MIB], start=24 * MIB),
    ]
    count = 0
    for span, tensor in zip(spans, read_spans(spans, CPU), strict=True):
        with span.file.path.open("rb") as file:
            file.seek(span.offset)
            expected = torch.frombuffer(bytearray(file.read(span.nbytes) or b"x"), dtype=torch.uint8)
        target = torch.empty(span.nbytes, dtype=torch.uint8)
        target.copy_(tensor)
        assert torch.equal(target, expected[: span.nbytes])
        assert isinstance(tensor, FileTensor) == (span.nbytes > 2 * PIECE_BYTES)
        count += 1
    assert count == len(spans)
    assert list(read_spans([], CPU)) == []


def test_memory_is_given_back_behind_the_consumer(big: Path) -> None:
    target = torch.empty(40 * MIB, dtype=torch.uint8)
    peaks = []
    for index, tensor in enumerate(read_spans(spans_of(big, [40 * MIB, 4 * MIB, 4 * MIB]), CPU)):
        if index == 0:
            reader = tensor.reader  # type: ignore[attr-defined]
            after = reader.after

            def watched(address: int, nbytes: int, after: object = after) -> None:
                after(address, nbytes)  # type: ignore[operator]
                peaks.append(resident(big))

            reader.after = watched
            target.copy_(tensor)
        else:
            target[: 4 * MIB].copy_(tensor)
        peaks.append(resident(big))
    assert len(peaks) > 4 and max(peaks) <= 20 * MIB


def test_no_thread_is_left(big: Path) -> None:
    before = set(threading.enumerate())
    threads = torch.get_num_threads()
    weights = read_spans(spans_of(big, [MIB] * 40), CPU)
    next(weights)
    assert {t.name for t in set(threading.enumerate()) - before} == {"octavo-read-ahead"}
    weights.close()  # type: ignore[attr-defined]
    assert set(threading.enumerate()) == before
    assert torch.get_num_threads() == threads


def same(a: torch.Tensor, b: torch.Tensor) -> None:
    """Equal in every element; the random bytes make numbers of every kind."""
    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@pytest.fixture
def matrix(big: Path) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """A float16 matrix [2048, 8200] as a FileTensor, and in ordinary memory."""
    raw = next(weights := read_spans(spans_of(big, [2048 * 8200 * 2], start=64), CPU))
    tensor = raw.view(torch.float16).view(2048, 8200)
    data = torch.frombuffer(bytearray(big.read_bytes()), dtype=torch.uint8)[64 : 64 + tensor.nbytes]
    yield tensor, data.view(torch.float16).view(2048, 8200).clone()
    weights.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.bfloat16])
def test_pieces_of_rows_and_columns(matrix: tuple[torch.Tensor, torch.Tensor], dtype: torch.dtype) -> None:
    tensor, plain = matrix
    for rows, columns in (
        (slice(None), slice(None)),
        (slice(7, 1999), slice(None)),
        (slice(3, 9), slice(1, 9)),
    ):
        piece = tensor[rows, columns]
        assert isinstance(piece, FileTensor)
        expected = plain[rows, columns].to(dtype)
        target = torch.zeros_like(expected)
        assert target.copy_(piece) is target
        same(target, expected)
    column = torch.empty(2048, 5, dtype=dtype)
    column.copy_(tensor.narrow(1, 4000, 5))
    same(column, plain[:, 4000:4005].to(dtype))


def test_what_is_no_view_is_a_plain_tensor(matrix: tuple[torch.Tensor, torch.Tensor]) -> None:
    """A plain tensor's memory is nobody's file: giving it back would lose it."""
    tensor, plain = matrix
    for made in (
        tensor.clone(),
        tensor.t().contiguous().t(),
        tensor.float().half(),
        tensor + 0,
        tensor[:, [1]],
    ):
        assert type(made) is torch.Tensor
    assert isinstance(tensor.t(), FileTensor) and isinstance(tensor.unflatten(0, (2, -1)), FileTensor)
    assert all(type(part) is torch.Tensor for part in tensor.chunk(2))
    copy = tensor.clone()
    target = torch.empty_like(copy)
    target.copy_(copy)
    same(copy, plain)
    same(target, plain)
    three = torch.empty(2, 1024, 8200, dtype=torch.float16)
    three.copy_(tensor.unflatten(0, (2, -1)))
    same(three.flatten(0, 1), plain)
    with pytest.raises(RuntimeError):
        torch.empty(3, 3).copy_(tensor)
    broadcast = torch.empty(2, 8200)
    broadcast.copy_(tensor[0])
    same(broadcast[1], plain[0].float())


class _Plain:
    def before(self, address: int, nbytes: int) -> None:
        pass

    after = before

    def staging(self, device: torch.device) -> Staging:
        raise AssertionError


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_staging(device: str) -> None:
    """Pieces through a few slots, in turn: converted, of columns, and rows longer than a slot."""
    staging = Staging(torch.device(device))
    source = torch.randn(3000, 4096)
    wide = torch.randn(3, PIECE_BYTES // 4 + 100)
    for view, dtype in (
        (source, torch.float32),
        (source, torch.bfloat16),
        (source[:, 100:4000], torch.float16),
        (source[5:2900:3], torch.float32),
        (wide, torch.float32),
        (source[0], torch.float32),
    ):
        target = torch.zeros(view.shape, dtype=dtype, device=device)
        staging.copy(target, view, _Plain())
        assert torch.equal(target.cpu(), view.to(dtype))
    staging.close()


def test_a_file_that_shrinks_while_it_is_read(big: Path, tmp_path: Path) -> None:
    """One line instead of the signal that ends a process which touches a page beyond the end."""
    path = tmp_path / "shrinks"
    path.write_bytes(big.read_bytes())
    for sizes in ([20 * MIB, 20 * MIB], [2 * MIB] * 20):
        path.write_bytes(big.read_bytes())
        weights = read_spans(spans_of(path, sizes), CPU)
        target = torch.empty(sizes[0], dtype=torch.uint8)
        target.copy_(next(weights))
        os.truncate(path, 5000)
        with pytest.raises(ModelError, match="bytes .* cannot be read: check the disk"):
            for tensor in weights:
                target.copy_(tensor)


def test_memory_touched_ahead_keeps_what_is_written() -> None:
    tensors = [
        torch.arange(3 * MIB, dtype=torch.int32),
        torch.arange(5),
        torch.empty(0),
        torch.ones(1).expand(9),
    ]
    with touched_ahead(tensors):
        tensors[0][::1000] = -1
    assert tensors[0][1000] == -1 and tensors[0][1001] == 1001 and tensors[1].tolist() == [0, 1, 2, 3, 4]
    assert not any(t.name == "octavo-touch" for t in threading.enumerate())


def test_reader_is_a_context(big: Path) -> None:
    with ReadAhead(spans_of(big, [MIB] * 8)) as ahead:
        first = ahead.take(0, CPU).clone()
        ahead.take(7, CPU)
        assert torch.equal(first, ahead._spans[0].file.bytes(0, MIB))


def test_many_small_tensors_cost_little(big: Path) -> None:
    """20 thousand tensors, as a mixture of experts stores: their names checked, and each handed out."""
    from octavo.layers.layer import LoadTarget
    from octavo.models.targets import check_tensors

    names = [f"model.layers.{i // 384}.mlp.experts.{i % 384}.weight" for i in range(20_000)]
    targets = {name: LoadTarget((512,), lambda tensor: None) for name in names}
    began = time.process_time()
    assert check_tensors(dict.fromkeys(names, (512,)), targets, big, "Many") == names
    target = torch.empty(512, dtype=torch.uint8)
    for tensor in read_spans(spans_of(big, [512] * len(names)), CPU):
        target.copy_(tensor)
    assert time.process_time() - began < 4  # alone 0.4
