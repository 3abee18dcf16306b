"""NVIDIA cards that a plan can be made for without having one: the vendor's figures, and their sources.

`memory` is what CUDA reports as a card's total (`torch.cuda.mem_get_info`, and PyTorch's out-of-memory
messages): less than the datasheet's, since the driver keeps some, and ECC more. It differs by about 1%
between drivers. Rates are dense ones (datasheets often print twice that, "with sparsity").
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, field

from octavo.errors import ConfigError

GIB = 1 << 30
_DATASHEETS = "https://www.nvidia.com/content/dam/en-zz/Solutions"
_A100 = f"{_DATASHEETS}/Data-Center/a100/pdf/nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf"
_H100 = "https://resources.nvidia.com/en-us-tensor-core/nvidia-tensor-core-gpu-datasheet"
_H200 = "https://nvdam.widen.net/s/nb5zzzsjdf/hpc-datasheet-sc23-h200-datasheet-3002446"
_L4 = "https://www.nvidia.com/en-us/data-center/l4/"
_L40S = "https://resources.nvidia.com/en-us-l40s/l40s-datasheet-28413"
_A10 = f"{_DATASHEETS}/Data-Center/a10/pdf/a10-datasheet.pdf"
_T4 = f"{_DATASHEETS}/Data-Center/tesla-t4/t4-tensor-core-datasheet-951643.pdf"
_V100 = (
    "https://images.nvidia.com/content/technologies/volta/pdf/volta-v100-datasheet-update-us-1165301-r5.pdf"
)
_B200 = "https://resources.nvidia.com/en-us-blackwell-architecture"
_AMPERE = "https://www.nvidia.com/content/PDF/nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2.pdf"
_ADA = "https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf"
_BLACKWELL = (
    "https://images.nvidia.com/aem-dam/Solutions/geforce/blackwell/nvidia-rtx-blackwell-gpu-architecture.pdf"
)


@dataclass(frozen=True)
class Card:
    """One kind of card.

    Attributes:
        name: as the command line takes it, whatever the case and with or without dashes.
        memory: bytes that CUDA reports as its total.
        bandwidth: bytes per second of its memory, by the datasheet.
        capability: compute capability.
        flops: dense rates of its tensor cores by dtype, operations per second (float32 products as
            float32, not TF32, where that is told).
        source: the vendor's page or datasheet.
        aliases: other names.
    """

    name: str
    memory: int
    bandwidth: float
    capability: tuple[int, int]
    flops: dict[str, float]
    source: str
    aliases: tuple[str, ...] = field(default=())


def _card(
    name: str,
    gib: float,
    gb_per_s: float,
    capability: tuple[int, int],
    source: str,
    *aliases: str,
    half: float,
    fp8: float | None = None,
    int8: float | None = None,
    float32: float | None = None,
) -> Card:
    """A card from GiB, GB/s and 10^12 operations/s; `half` is float16's, and bfloat16's from Ampere on."""
    rates = {"float16": half, "bfloat16": half if capability >= (8, 0) else None, "fp8": fp8}
    rates |= {"int8": int8, "float32": float32}
    flops = {dtype: rate * 1e12 for dtype, rate in rates.items() if rate is not None}
    return Card(name, int(gib * GIB), gb_per_s * 1e9, capability, flops, source, aliases)


CARDS = (
    _card("T4", 14.75, 320, (7, 5), _T4, half=65, int8=130, float32=8.1),
    _card("V100-16G", 15.77, 900, (7, 0), _V100, half=125, float32=15.7),
    _card("V100-32G", 31.74, 900, (7, 0), _V100, half=125, float32=15.7),
    _card("A10", 22.06, 600, (8, 6), _A10, half=125, int8=250, float32=31.2),
    _card("A100-40G", 39.39, 1555, (8, 0), _A100, half=312, int8=624, float32=19.5),
    _card("A100-80G", 79.15, 2039, (8, 0), _A100, half=312, int8=624, float32=19.5),
    _card("RTX-3090", 23.69, 936, (8, 6), _AMPERE, half=71, int8=284, float32=35.6),
    _card("RTX-4090", 23.52, 1008, (8, 9), _ADA, half=165.2, fp8=330.3, int8=660.6, float32=82.6),
    _card("RTX-5090", 31.36, 1792, (12, 0), _BLACKWELL, half=209.5, fp8=419, int8=838, float32=104.8),
    _card("L4", 22.03, 300, (8, 9), _L4, half=121, fp8=242.5, int8=242.5, float32=30.3),
    _card("L40S", 44.39, 864, (8, 9), _L40S, half=362, fp8=733, int8=733, float32=91.6),
    _card("H100-SXM", 79.11, 3350, (9, 0), _H100, half=989, fp8=1979, int8=1979, float32=67),
    _card("H100-PCIe", 79.11, 2000, (9, 0), _H100, half=756, fp8=1513, int8=1513, float32=51),
    _card("H200", 139.80, 4800, (9, 0), _H200, "H200-SXM", half=989, fp8=1979, int8=1979, float32=67),
    _card("B200", 178.35, 8000, (10, 0), _B200, half=2250, fp8=4500, int8=4500, float32=75),
)


def find_card(name: str) -> Card:
    """The card that a user names: `A100-40G`, `a100 40gb`, `NVIDIA H200`, `RTX 4090`…

    Raises:
        ConfigError: unknown, or one of several.
    """
    wanted = _plain(name)
    exact = [c for c in CARDS if wanted in map(_plain, (c.name, *c.aliases))]
    near = exact or [c for c in CARDS if wanted and _plain(c.name).startswith(wanted)]
    if len(near) == 1:
        return near[0]
    if near:
        raise ConfigError(f"gpu={name!r} is one of several: say {' or '.join(c.name for c in near)}")
    close = difflib.get_close_matches(wanted, [_plain(c.name) for c in CARDS], 1)
    hint = next((f" (did you mean {c.name}?)" for c in CARDS if _plain(c.name) in close), "")
    raise ConfigError(f"gpu={name!r} is not known: choose {', '.join(c.name for c in CARDS)}{hint}")


def _plain(name: str) -> str:
    """A name without what people write differently."""
    text = re.sub(r"[\s_-]+", "", name.lower())
    text = re.sub(r"^(nvidia|geforce|tesla)+", "", text)
    return re.sub(r"(\d)gi?b$", r"\1g", text).removeprefix("rtx")
