"""A digest that identifies a model's weights without reading them all."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.errors import ModelError
from octavo.models.bin_file import list_bins
from octavo.models.config import ModelConfig
from octavo.models.gguf_file import GGUFFile
from octavo.models.locate import ModelSource
from octavo.models.safetensors_file import list_files, read_header

if TYPE_CHECKING:
    import torch

PAGE = 4096
PAGES_PER_TENSOR = 4
PAGES_PER_BIN = 256
# Fields that no weight and no KV value depends on.
_NOT_WEIGHTS = ("extra", "bos_token_id", "eos_token_ids")


def fingerprint(source: ModelSource, config: ModelConfig, load_format: str, seed: int) -> bytes:
    """32 bytes that are equal for equal weights, whatever folder or machine they lie on.

    SHA-256 over these records, each preceded by its length as 8 bytes little-endian:

    1. the ASCII text `octavo-weights-1`;
    2. the config: JSON of `ModelConfig`'s fields but extra, bos_token_id and eos_token_ids (`rope`
       nested), keys sorted, no spaces, ASCII; with `extra` where Transformers' code runs the model, which
       reads more of it than the other fields hold;
    3. for random weights (`load_format` dummy): the text `dummy:` and the seed in decimal; nothing else.
    4. Otherwise for every file of weights, in the order of names (a GGUF model is one file whose name
       counts as `gguf`, so that it may be renamed; the parts of a split one count as `gguf` each):
       its name in UTF-8;
       its size in bytes, 8 bytes little-endian;
       its header: of safetensors the JSON as stored, of GGUF every byte before the first tensor's
       data; empty for PyTorch's `.bin`;
       and its sampled pages as one record: for every tensor in the order of its bytes, and every
       k of 0, 1, 2, 3, up to 4096 bytes from byte floor(k * n / 4) of the tensor's n bytes on, not
       past the tensor's end (tensors of up to 16 KiB are read whole). A `.bin` counts as one tensor
       with 256 such k.

    A change elsewhere in a large tensor goes unseen; training and quantization change all of it.
    Of a model in memory the same is taken of each tensor, in the order of their names: the name, the size in
    bytes, dtype and shape as text (`float32[64,32]`), and the sampled pages.

    The commit of a model from the hub doesn't enter, so that a copy in a folder has the same digest, and
    so have commits that change other files than the weights. One model in other files (a GGUF model
    split or joined, safetensors cut otherwise) has another.

    Args:
        seed: used with `load_format` dummy alone.

    Raises:
        ModelError: files that are missing, truncated or corrupt.
    """
    digest = hashlib.sha256()

    def add(record: bytes) -> None:
        digest.update(struct.pack("<Q", len(record)))
        digest.update(record)

    add(b"octavo-weights-1")
    skipped = [key for key in _NOT_WEIGHTS if key != "extra" or config.implementation == "octavo"]
    fields = {key: value for key, value in asdict(config).items() if key not in skipped}
    add(json.dumps(fields, sort_keys=True, separators=(",", ":")).encode("ascii"))
    if load_format == "dummy":
        add(f"dummy:{seed}".encode("ascii"))
        return digest.digest()
    if source.held is not None:
        for name, tensor in sorted(source.held.tensors.items()):
            add(name.encode())
            add(struct.pack("<Q", tensor.nbytes))
            dtype, sizes = str(tensor.dtype).removeprefix("torch."), ",".join(map(str, tensor.shape))
            add(f"{dtype}[{sizes}]".encode("ascii"))
            add(sample_tensor(tensor))
        return digest.digest()
    for name, path, header, spans, pages in _files(source, load_format):
        add(name.encode())
        add(struct.pack("<Q", path.stat().st_size))
        add(header)
        add(_sample(path, spans, pages))
    return digest.digest()


def _files(
    source: ModelSource, load_format: str
) -> Iterator[tuple[str, Path, bytes, list[tuple[int, int]], int]]:
    """Each file's name, path, header, spans (offset, bytes) to sample, and pages to take of each."""
    if source.kind == "gguf":
        for part in GGUFFile(source.path).parts:
            spans = sorted((t.offset, t.nbytes) for t in part.tensors.values())
            with part.path.open("rb") as file:
                header = file.read(spans[0][0] if spans else -1)
            yield "gguf", part.path, header, spans, PAGES_PER_TENSOR
        return
    files = list_files(source.path) if load_format != "pt" else []
    for path in sorted(files):
        parsed = read_header(path)
        spans = [(t.offset, t.nbytes) for t in parsed.tensors.values()]
        yield path.name, path, parsed.raw, spans, PAGES_PER_TENSOR
    if not files:
        bins = list_bins(source.path)
        if not bins:
            raise ModelError(f"{source.path}: no safetensors file: fetch the model's weights")
        for path in bins:
            yield path.name, path, b"", [(0, path.stat().st_size)], PAGES_PER_BIN


def sample_tensor(tensor: torch.Tensor) -> bytes:
    """The sampled pages of a tensor's bytes in row-major order."""
    import torch

    size = tensor.nbytes
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    starts = [k * size // PAGES_PER_TENSOR for k in range(PAGES_PER_TENSOR)]
    return b"".join(bytes(raw[start : start + PAGE].cpu().numpy()) for start in starts)


def _sample(path: Path, spans: list[tuple[int, int]], pages: int) -> bytes:
    out = []
    with path.open("rb", buffering=0) as file:
        descriptor = file.fileno()
        for offset, size in spans:
            for k in range(pages):
                start = k * size // pages
                out.append(os.pread(descriptor, min(PAGE, size - start), offset + start))
    return b"".join(out)
