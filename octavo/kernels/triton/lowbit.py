"""Products with weights of 8 and 4 bits on a GPU, by the names of `octavo.kernels.lowbit_ops`.

What a GPU has no kernel for runs by its plain twin in `octavo.kernels.reference_lowbit`.
"""

from __future__ import annotations

from octavo.kernels.triton.weight_only import tiles_linear, weight_only_linear

__all__ = ["tiles_linear", "weight_only_linear"]
