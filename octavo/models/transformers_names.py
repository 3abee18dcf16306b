"""Names of a checkpoint's tensors, and where they go in a model of Transformers.

Transformers renames some tensors while it loads, and stacks the experts of a mixture; its own tables
(`transformers.conversion_mapping`) say which. A checkpoint of a bare decoder leaves out the prefix under
which the model with a head holds it, and the other way round.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from octavo.errors import ModelError
from octavo.layers.layer import LoadTarget
from octavo.models.aliases import with_prefix


def conversions(model: Any) -> tuple[list[Any], list[Any]]:
    """Transformers' renamings and conversions for a model, in order.

    Raises:
        ModelError: a kind that is not known here.
    """
    from transformers import conversion_mapping, core_model_loading

    found = conversion_mapping.get_model_conversion_mapping(model)
    converters = [c for c in found if isinstance(c, core_model_loading.WeightConverter)]
    renamings = [c for c in found if not isinstance(c, core_model_loading.WeightConverter)]
    group = getattr(core_model_loading, "GroupWeightRename", ())
    if any(isinstance(c, group) for c in renamings):
        raise ModelError(
            f"{type(model).__name__}: how transformers renames its checkpoints' tensors depends on their "
            "order, which is not supported: use another model"
        )
    return renamings, converters


def renaming(model: Any, renamings: list[Any]) -> Callable[[str, dict[str, LoadTarget]], str | None]:
    """From a checkpoint's name to a target's (see `AliasTargets`), by Transformers' table and the prefix."""
    prefix = model.base_model_prefix

    @functools.cache
    def renamed(name: str) -> str:
        for transform in renamings:
            name = transform.rename_source_key(name)[0]
        return name

    def rename(name: str, targets: dict[str, LoadTarget]) -> str | None:
        other = renamed(name)
        if other != name and dict.__contains__(targets, other):
            return other
        return with_prefix(prefix, other, targets)

    return rename


def expert_targets(name: str, parameter: torch.Tensor, converters: list[Any]) -> dict[str, LoadTarget]:
    """Targets of a stack of experts that checkpoints hold one by one; {} if it is no such stack.

    The stack itself, under its own name, stands for all of them.

    Args:
        name: of the parameter.
        parameter: `[experts, rows, columns]`, or whatever else the model holds.
        converters: Transformers' conversions.

    Raises:
        ModelError: the parameter is made in another way than by stacking.
    """
    for converter in converters:
        targets = [pattern.removesuffix("$") for pattern in converter._original_target_patterns]
        match = next((t for t in targets if re.search(rf"{t}$", name)), None)
        if match is None:
            continue
        kinds = [type(operation).__name__ for operation in converter.operations]
        dims = [getattr(operation, "dim", None) for operation in converter.operations]
        stacked = (["MergeModulelist"], [0]), (["MergeModulelist", "Concatenate"], [0, 1])
        if (kinds, dims) not in stacked or len(targets) > 1 or parameter.ndim < 2:
            raise ModelError(
                f"{name} is made of a checkpoint's tensors by {', '.join(kinds)}, which is not supported: "
                "use another model"
            )
        return _pieces(name, parameter, match, converter._original_source_patterns)
    return {}


def _pieces(name: str, parameter: torch.Tensor, target: str, sources: list[str]) -> dict[str, LoadTarget]:
    base = re.sub(rf"{target}$", "", name)
    experts, rows = parameter.shape[0], parameter.shape[1] // len(sources)
    targets: dict[str, LoadTarget] = {}
    for expert in range(experts):
        for part, source in enumerate(sources):
            where = (expert, slice(part * rows, (part + 1) * rows)) if len(sources) > 1 else (expert,)
            shape = tuple(parameter[where].shape)
            piece = base + source.replace("*", str(expert)).removesuffix("$")
            targets[piece] = LoadTarget(shape, partial(_store, parameter, where))
    whole = LoadTarget(tuple(parameter.shape), partial(_store, parameter, ...), covers=tuple(targets))
    return {**targets, name: whole}


def _store(parameter: torch.Tensor, where: Any, tensor: torch.Tensor) -> None:
    parameter[where].copy_(tensor)
