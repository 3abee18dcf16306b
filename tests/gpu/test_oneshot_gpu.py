"""`octavo quantize` rounds on the device as on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from octavo import QuantizationModifier, oneshot
from tests.quantization.checkpoints import source_folder

pytestmark = pytest.mark.gpu


def made(folder: Path, scheme: str, device: str) -> dict[str, torch.Tensor]:
    size = 32 if scheme == "W4A16" else None
    recipe = QuantizationModifier(targets="Linear", scheme=scheme, ignore=["lm_head"], group_size=size)
    oneshot(source_folder(scheme == "FP8_BLOCK"), recipe, folder, device=device, progress=False)
    return {k: v for path in sorted(folder.glob("*.safetensors")) for k, v in load_file(path).items()}


@pytest.mark.parametrize("scheme", ["FP8_DYNAMIC", "FP8_BLOCK", "W8A8", "W8A16", "W4A16"])
def test_the_same_checkpoint(scheme: str, tmp_path: Path) -> None:
    ours, plain = made(tmp_path / "gpu", scheme, "cuda"), made(tmp_path / "cpu", scheme, "cpu")
    assert ours.keys() == plain.keys()
    same = total = 0
    for name, tensor in plain.items():
        assert (ours[name].dtype, ours[name].shape) == (tensor.dtype, tensor.shape), name
        a, b = (t.contiguous().view(-1).view(torch.uint8) for t in (ours[name], tensor))
        same, total = same + int((a == b).sum()), total + len(a)
    # Sums of squared errors, by which a group of 4 bits chooses its scale, are added in another order.
    assert same >= (0.98 if scheme == "W4A16" else 1.0) * total
