"""The root of a worker's block keys: what makes KV values, as one digest (docs/prefix-cache.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.kv.keys import root_key
from octavo.layers.rotary import rope_variant
from octavo.models.fingerprint import fingerprint
from octavo.models.locate import ModelSource
from octavo.quantization.checkpoint_method import mode_of
from octavo.quantization.local_hardware import hardware_of

if TYPE_CHECKING:
    from octavo.worker.worker import Worker


def cache_root(worker: Worker, source: ModelSource, length: int) -> bytes:
    """The root of the keys of a worker that has loaded, 32 bytes.

    Args:
        source: the model's files.
        length: tokens of the context that it was built for.
    """
    config, model = worker.config, worker.model_config
    # The context's length enters only where the rotation depends on it, so that a restart with
    # another one keeps its keys.
    variant = rope_variant(model.rope, model.max_position_embeddings, length)
    return root_key(
        fingerprint(source, model, config.load_format, config.seed),
        _arithmetic(worker),
        _kv_format(worker),
        f"{model.rope!r}:{sorted(variant.items())!r}",
        config.block_size,
    )


def _kv_format(worker: Worker) -> str:
    """What decides how KV values are stored."""
    whole = worker.groups if worker.part is None else worker.part.groups  # the same on every stage
    groups = [f"{g.name}={','.join(map(str, g.layers))}:{g.format.describe()}" for g in whole]
    return ";".join(groups if worker.kv_scales is None else [*groups, worker.kv_scales.digest])


def _arithmetic(worker: Worker) -> str:
    """What decides how KV values are rounded."""
    invariant = "batch_invariant" if worker.config.batch_invariant else None
    kinds = (worker.dtype, _quantization(worker), invariant)
    return "+".join(kind for kind in kinds if kind is not None)


def _quantization(worker: Worker) -> str | None:
    """How weights are rounded, and what is computed with them."""
    config = worker.quantization
    if config is None or not config.rules:
        return None if config is None else config.format
    hardware = hardware_of(worker.device)
    modes = (f"{scheme.name}:{mode_of(config, scheme, hardware).mode}" for scheme in config.schemes)
    return ",".join((config.title, *modes))
