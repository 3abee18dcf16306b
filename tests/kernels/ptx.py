"""What straight-line PTX computes, for the few instructions that unpack codes, as PTX's manual has it."""

from __future__ import annotations

import re
import struct

import torch

_PAIRS = {"bf16x2": torch.bfloat16, "f16x2": torch.float16}


def run(code: str, inputs: dict[str, int]) -> dict[str, int]:
    """The bits that code leaves in registers, from those in `inputs`."""
    registers = dict(inputs)

    def value(operand: str) -> int:
        if operand in registers:
            return registers[operand]
        if operand.startswith("0f"):
            return int(operand[2:], 16)
        return int(operand, 0)

    for line in code.strip().strip("{}").strip().splitlines():
        name, _, rest = line.strip().rstrip(";").partition(" ")
        if name.startswith("."):
            continue
        target, *operands = re.split(r",\s*", rest)
        registers[target] = _result(name, *(value(operand) for operand in operands)) & 0xFFFFFFFF
    return registers


def _result(name: str, a: int, b: int = 0, c: int = 0, d: int = 0) -> int:
    if name == "mov.b32":
        return a
    if name == "shr.b32":
        return a >> b
    if name == "and.b32":
        return a & b
    if name == "xor.b32":
        return a ^ b
    if name == "lop3.b32":
        found = 0
        for bit in range(32):
            index = (a >> bit & 1) << 2 | (b >> bit & 1) << 1 | c >> bit & 1
            found |= (d >> index & 1) << bit
        return found
    if name == "prmt.b32":
        eight, found = (a | b << 32).to_bytes(8, "little"), 0
        for i in range(4):
            which = c >> 4 * i & 15
            assert which < 8  # else it would repeat a sign
            found |= eight[which] << 8 * i
        return found
    if name == "sub.f32":
        return int(torch.tensor(_float32(a) - _float32(b), dtype=torch.float32).view(torch.int32))
    kind = name.removeprefix("fma.rn.")
    assert kind in _PAIRS, name
    found = 0
    for half in range(2):
        x, y, z = (_number(operand >> 16 * half & 0xFFFF, _PAIRS[kind]) for operand in (a, b, c))
        rounded = torch.tensor(x * y + z, dtype=torch.float64).to(_PAIRS[kind])
        found |= (int(rounded.view(torch.int16)) & 0xFFFF) << 16 * half
    return found


def _float32(bits: int) -> float:
    return struct.unpack("<f", struct.pack("<I", bits))[0]


def _number(bits: int, kind: torch.dtype) -> float:
    return float(torch.tensor(bits, dtype=torch.int32).to(torch.int16).view(kind))


def halves(bits: int, kind: torch.dtype) -> list[float]:
    """The two numbers in a register."""
    return [_number(bits >> 16 * half & 0xFFFF, kind) for half in range(2)]
