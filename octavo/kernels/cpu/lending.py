"""Memory for the tensors of large steps, of which the next step takes the same again."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from octavo.kernels.cpu.step_memory import Lender, StepMemory, can_lend

ALLOCATE = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
_LEAST = 1 << 16  # bytes of a tensor that is lent memory


class Seen(TorchDispatchMode):
    """Sees PyTorch's operations, and nothing is compiled within it."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """PyTorch would have its compiler leave this mode alone, and import it for that: 122 MB, and seconds
        in the middle of a step."""
        return False


class Lending(Seen):
    """Within it the tensors that kernels make lie in memory of its own, each as long as somebody holds it.

    What the C library's allocator keeps of a prompt's step is twice what its tensors take at once
    (SmolLM2-135M in 16 bits, 2048 rows: 37 MB, for 20), and asking the system for each anew costs a tenth of
    the step.

    Attributes:
        memory: where they lie. It stays, for the next step.
    """

    def __init__(self) -> None:
        super().__init__()
        self.memory = StepMemory()
        self._lender = Lender(self.memory)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func._schema.name.rpartition("::")[2] in ALLOCATE and can_lend(out) and out.nbytes >= _LEAST:
            return self._lender.empty(out.shape, out.stride(), out.dtype)
        return out
