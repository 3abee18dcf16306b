"""A checkpoint's tensors against what a built model takes, by name and shape, before any is read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from octavo.errors import ModelError
from octavo.layers.layer import LoadTarget

# Buffers that older checkpoints store although they follow from the config.
IGNORED_SUFFIXES = (
    ".rotary_emb.inv_freq",
    ".attn.bias",
    ".attn.masked_bias",
    ".self_attn.bias",
    ".self_attn.masked_bias",
    ".attention.bias",
    ".attention.masked_bias",
)

# Parts of a multimodal checkpoint that nothing here runs.
IGNORED_PREFIXES = ("vision_tower.", "multi_modal_projector.")

Targets = Mapping[str, LoadTarget]


def left_out(prefix: str) -> dict[str, LoadTarget]:
    """A target for all that a checkpoint may hold under `prefix` and the model has no use for."""
    return {f"{prefix}.*": LoadTarget((), lambda tensor: None, optional=True)}


def ignored(name: str, targets: Targets) -> bool:
    """Whether a checkpoint's tensor is not loaded: whatever the model, or `left_out` of this one's."""
    if name.endswith(IGNORED_SUFFIXES) or name.startswith(IGNORED_PREFIXES):
        return True
    dots = [i for i, character in enumerate(name) if character == "."]
    return any(f"{name[:i]}.*" in targets for i in dots)


def canonical(targets: Targets) -> dict[str, tuple[int, ...]]:
    """Name and shape of each tensor that a complete checkpoint holds, in one spelling."""
    return {
        name: target.shape for name, target in targets.items() if not target.optional and not target.covers
    }


def missing(given: Iterable[str], targets: Targets) -> list[str]:
    """Tensors that a checkpoint with the names `given` lacks."""
    have = set(given)
    for name in list(have):
        have.update(targets[name].covers)
    return [name for name in canonical(targets) if name not in have]


def check_tensors(
    found: Mapping[str, tuple[int, ...]],
    targets: Targets,
    where: Path | str,
    architecture: str,
) -> list[str]:
    """The names to load, after checking that they are just those that the model takes.

    Args:
        found: shape of every stored tensor by name.
        targets: what the model takes.
        where: the file or folder, for messages.
        architecture: of the model, for messages.

    Raises:
        ModelError: a tensor is missing, given in two spellings, has another shape, or has no place.
    """
    names = [name for name in found if name in targets]
    for name in missing(names, targets):
        raise ModelError(f"{where}: tensor {name!r} is missing: fetch the model again, or check its config")
    for name, shape in found.items():
        if name not in targets:
            if ignored(name, targets):
                continue
            raise ModelError(
                f"{where}: tensor {name!r} has no place in {architecture}: use a checkpoint of a "
                "supported kind"
            )
        if not targets[name].takes(shape):
            raise ModelError(
                f"{where}: tensor {name!r} has shape {list(shape)} where the config asks for "
                f"{list(targets[name].shape)}: check that weights and config belong together"
            )
        for other in targets[name].covers:
            if other in found:
                raise ModelError(f"{where}: {other!r} is given again by {name!r}: remove one of the two")
    return names
