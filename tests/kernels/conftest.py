"""Runs Triton's kernels in its interpreter where there is no GPU."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import torch

if not torch.cuda.is_available() and importlib.util.find_spec("triton"):
    # Before any kernel is defined. Nothing else in the suite runs Triton on a CPU.
    os.environ["TRITON_INTERPRET"] = "1"

    from triton.runtime import interpreter

    _patch_tensor = interpreter._patch_lang_tensor

    def _patch_tensor_and_index(tensor: Any, scope: Any) -> None:
        # The interpreter's scalars are arrays of one element, which NumPy 2.4 no longer takes for
        # integers (as a loop's bound): https://numpy.org/doc/stable/release/2.4.0-notes.html
        _patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = _patch_tensor_and_index
