"""Memory that holds NaN until somebody writes it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from octavo.kernels.triton.workspace import workspace


def poison(monkeypatch: pytest.MonkeyPatch, device: str | torch.device) -> None:
    """From here on `torch.empty` gives NaN, and the kernels' scratch memory holds it."""
    empty = torch.empty

    def filled(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = empty(*args, **kwargs)
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch, "empty", filled)
    with torch.inference_mode():  # in which an engine may have made it
        workspace(torch.zeros(0, device=device).device).floats.fill_(float("nan"))
