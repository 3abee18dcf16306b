"""Checkpoint tensors that go by several names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from octavo.layers.layer import LoadTarget


class AliasTargets(dict[str, LoadTarget]):
    """Targets that are also found under other names.

    Iteration and length are those of the targets under their own names.

    Args:
        targets: by their own names.
        rename: from a name in a checkpoint to the target's own, or None where it has none.
    """

    def __init__(
        self,
        targets: Mapping[str, LoadTarget],
        rename: Callable[[str, dict[str, LoadTarget]], str | None],
    ):
        super().__init__(targets)
        self._rename = rename

    def __missing__(self, name: str) -> LoadTarget:
        other = self._rename(name, self)
        if other is None or other == name or not dict.__contains__(self, other):
            raise KeyError(name)
        target = dict.__getitem__(self, other)
        return replace(target, covers=(other, *target.covers))

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self.get(name) is not None

    def get(self, name: str, default: Any = None) -> Any:
        """The target under any of its names."""
        try:
            return self[name]
        except KeyError:
            return default


def with_prefix(prefix: str, name: str, targets: dict[str, LoadTarget]) -> str | None:
    """`name` with or without the base model's prefix, whichever is a target."""
    other = name.removeprefix(f"{prefix}.") if name.startswith(f"{prefix}.") else f"{prefix}.{name}"
    return other if dict.__contains__(targets, other) else None
