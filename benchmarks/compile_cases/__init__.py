"""Calls of the kernels' wrappers on CPU tensors, which `compile_gpu_kernels.py` compiles.

In the shapes of the models that the project is measured with, and awkward ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import attention_cases, moe_cases, other_cases, product_cases, product_cases_8bit, weight_only_cases


def cases() -> list[tuple[str, Callable[[], Any]]]:
    """All of them, by names that say what is called."""
    parts = (attention_cases, product_cases, product_cases_8bit, weight_only_cases, moe_cases, other_cases)
    return [case for part in parts for case in part.cases()]
