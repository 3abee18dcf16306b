"""Writing rows into quantized caches, and reading them back, against the plain twins, bit for bit."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from octavo.kernels import reference, reference_kv
from octavo.kernels.triton import kv_encode, rotary_kv
from octavo.kernels.triton.kv_codes import KVCodes
from octavo.kv.format import KVFormat
from tests.kernels.attention_cases import Codes
from tests.kernels.ragged import kv_scales, quantize_cache


@dataclass(frozen=True)
class WriteCase:
    """Heads and sizes; `rot`: elements that are rotated; `norm`: dtype of the heads' norms, if any."""

    heads: int
    kv_heads: int
    dim: int
    rot: int
    block: int
    dtype: str
    norm: str | None = None


WRITE_CASES = [
    WriteCase(4, 2, 64, 64, 16, "bfloat16"),
    WriteCase(6, 3, 80, 32, 8, "float32"),
    WriteCase(3, 1, 96, 96, 32, "float16", "float16"),
    WriteCase(5, 5, 128, 128, 16, "bfloat16", "float32"),
    WriteCase(4, 1, 256, 64, 16, "float32", "float32"),
]


def awkward(x: torch.Tensor, kind: str) -> torch.Tensor:
    """Values of all magnitudes, among them halves between codes, subnormal ones, zeros, near infinities."""
    x = x * 10 ** torch.linspace(-6, 3, x.shape[-1], device=x.device)
    x[0] = 0.0
    x[1, 0, :8] = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 0.0, -0.0], device=x.device)
    x[2, 0] = 1e-7  # of which an INT8 scale is subnormal or 0
    if kind != "int8":
        x[3, 0, :6] = torch.tensor([1e9, -1e9, 448.0, 464.0, 57344.0, 61440.0], device=x.device)
        # All float32 that lie halfway between codes, and their neighbours.
        edges = (
            torch.arange(0x7F, device=x.device).to(torch.uint8).view(reference_kv.FP8_DTYPES[kind]).float()
        )
        middle = (edges[1:] + edges[:-1]) / 2
        middle = middle[middle.isfinite()]
        near = torch.cat((middle, middle.nextafter(middle * 2), middle.nextafter(middle * 0)))
        width = x[5:].numel()
        x[5:].view(-1)[: min(width, len(near))] = near[torch.randperm(len(near), device=x.device)][:width]
    return x


def quantized_rows(
    x: torch.Tensor, cache: torch.Tensor, part: int, slots: torch.Tensor, codes: KVCodes
) -> None:
    """The twin's way to store rows at slots."""
    centre = codes.centre if part == 0 else None
    if codes.dtype == "int8":
        reference_kv.write_int8(x, cache, part, slots, codes.block_size, codes.offset, centre)
        return
    assert codes.scale is not None
    found = reference_kv.quantize_fp8(x, codes.dtype, codes.scale[part], centre)
    cache[slots // codes.block_size, part, :, slots % codes.block_size] = found


def check_write(
    case: WriteCase, quantized: Codes, device: str, rows: int = 13, centred: bool = False
) -> None:
    """`write_kv` of awkward values, and `rotary_and_write_kv`, whose own rotated keys must be stored;
    rows of slot -1 and bytes of other slots are left alone. `centred`: keys less a vector."""
    seed = int.from_bytes(os.urandom(4), "little")
    g = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, case.dtype)
    blocks = rows // case.block + 2
    fmt = KVFormat(quantized.kind, case.block, case.kv_heads, case.dim, offset=quantized.offset)
    scale = None
    if quantized.kind != "int8":
        scale = torch.rand(2, case.kv_heads, generator=g).to(device) * 0.05 + 0.001
        scale[0, 0] = 1.0
    centre = torch.randn(case.kv_heads, case.dim, generator=g).to(device) if centred else None
    codes = KVCodes(quantized.kind, case.block, case.dim, quantized.offset, scale, centre=centre)
    slots = torch.randperm(blocks * case.block, generator=g)[:rows].to(device)
    slots[4] = -1
    kept = slots >= 0
    note = f"{case} {quantized} seed {seed}"

    def fresh() -> torch.Tensor:
        return torch.full((blocks, *fmt.layer_block_shape()), 0xA5, dtype=torch.uint8, device=device)

    def check(cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor, what: str) -> None:
        want = fresh()
        for part, x in enumerate((k, v)):
            quantized_rows(x[kept], want, part, slots[kept], codes)
        wrong = (cache != want).nonzero()
        assert len(wrong) == 0, f"{what} {note}: {len(wrong)} bytes differ, the first at {wrong[0].tolist()}"

    qkv = torch.randn(rows, case.heads + 2 * case.kv_heads, case.dim, generator=g).to(device)
    q, k, v = qkv.to(dtype).split([case.heads, case.kv_heads, case.kv_heads], 1)
    plain_k, plain_v = (awkward(x.float(), quantized.kind).to(dtype) for x in (k, v))
    cache = fresh()
    rotary_kv.write_kv(plain_k, plain_v, cache, slots, codes)
    check(cache, plain_k, plain_v, "write_kv")

    angle = torch.rand(40, case.rot // 2, generator=g).to(device) * 6
    cos_sin = torch.cat([angle.cos(), angle.sin()], -1)
    positions = torch.randint(40, (rows,), generator=g).to(device)
    weights = [None, None]
    if case.norm is not None:
        weights = [torch.rand(case.dim, generator=g).to(device, getattr(torch, case.norm)) for _ in range(2)]
    want_k = k.clone() if weights[1] is None else reference.rms_norm(k, weights[1], 1e-6)
    reference.rotary(q.clone(), want_k, cos_sin, positions)
    cache = fresh()
    rotary_kv.rotary_and_write_kv(q, k, v, cos_sin, positions, cache, slots, *weights, 1e-6, codes)
    torch.testing.assert_close(k, want_k, rtol=1.6e-2, atol=2e-2)
    check(cache, k, v, "rotary_and_write_kv")


def check_gather(quantized: Codes, device: str) -> None:
    """`gather_kv`: the values, rounded; blocks that the table names later hold NaN."""
    g = torch.Generator().manual_seed(int.from_bytes(os.urandom(4), "little"))
    blocks, heads, size, dim, rows = 9, 3, 8, 80, 37
    kv = torch.randn(blocks, 2, heads, size, dim, generator=g).to(device)
    table = torch.randperm(blocks, generator=g).to(device).int()
    kv[table[-(-rows // size) :].long()] = float("nan")
    scale = kv_scales(kv, quantized.kind)
    cache, values = quantize_cache(kv, quantized.kind, quantized.offset, scale)
    codes = KVCodes(quantized.kind, size, dim, quantized.offset, scale)
    for dtype in (torch.bfloat16, torch.float16):
        got = kv_encode.gather_kv(cache, codes, table, rows, dtype)
        want = values[table.long()].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :rows].to(dtype)
        torch.testing.assert_close(got, want, rtol=1e-2 if dtype == torch.bfloat16 else 2e-3, atol=1e-4)
