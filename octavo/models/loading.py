"""Building a model on its device, and filling it: every checkpoint tensor in its place, exactly once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

import torch

from octavo.errors import ModelError
from octavo.layers.backends import resolve_backend
from octavo.layers.layer import BuildContext, Layer, LoadTarget
from octavo.models.absent import remove_head
from octavo.models.ahead import own_threads
from octavo.models.config import ModelConfig
from octavo.models.in_memory import InMemory, SharedMatrices
from octavo.models.interface import CausalLM
from octavo.models.mapped_file import release_freed, touched_ahead
from octavo.models.plausible import check_sizes
from octavo.models.read_ahead import AsRead
from octavo.models.registry import model_class
from octavo.models.targets import Targets, ignored, missing
from octavo.parallel.state import tensor_parallel_group
from octavo.quantization.experts_method import experts_method
from octavo.quantization.linear_method import LinearMethod, linear_method
from octavo.quantization.scheme import QuantizationConfig

if TYPE_CHECKING:
    from octavo.models.stage import StagePart

logger = logging.getLogger(__name__)

_NAMES_SHOWN = 5
_MOST_AT_ONCE = 8  # layers that are in memory twice
_TRIM_BYTES = 32 << 20


def build_model(
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    attention_backend: str | None = None,
    max_model_len: int | None = None,
    block_size: int = 16,
    kv_dtype: str | None = None,
    quantization: QuantizationConfig | None = None,
    batch_invariant: bool = False,
    with_head: bool = True,
    expert_parallel: bool = False,
    part: StagePart | None = None,
) -> CausalLM:
    """Make a model whose parameters are allocated once, on the device, and not yet filled.

    Args:
        config: the architecture.
        dtype: of weights and activations.
        device: where it runs; "meta" makes shapes only, to measure sizes.
        attention_backend: torch, cpu or triton; None or "auto" takes the device's fastest.
        max_model_len: tokens of the longest context; None takes the config's.
        block_size: tokens per KV block.
        kv_dtype: of the KV cache, a name of `KVFormat`'s; None or "auto" takes `dtype`.
        quantization: how weights are stored; None: in `dtype`.
        batch_invariant: no row's result depends on the rows beside it, to the bit (on a GPU; not for the
            families that `octavo.worker.batch_invariance` refuses).
        with_head: False for embeddings: no output head is made, and a checkpoint's is passed over.
        expert_parallel: whether each of several ranks holds some experts whole, instead of a slice of each.
        part: what a pipeline stage has of the model; None: all.

    Raises:
        ModelError: an architecture, rope or activation that is not supported.
        ConfigError: settings that do not fit the model or the device.
    """
    check_sizes(config)
    device = torch.device(device)
    build = BuildContext(
        dtype=dtype,
        device=device,
        max_model_len=max_model_len or config.context_length,
        attention_backend=resolve_backend(attention_backend, device, batch_invariant),
        block_size=block_size,
        kv_dtype=str(dtype).removeprefix("torch.") if kv_dtype in (None, "auto") else kv_dtype,
        kv_offset=config.attention_bias,
        group=tensor_parallel_group(),
        linear_method=partial(_invariant_method() if batch_invariant else linear_method, quantization),
        experts_method=partial(experts_method, quantization),
        expert_parallel=expert_parallel,
    )
    model = model_class(config.architecture, config.implementation)(config)
    if not with_head:
        remove_head(model)
    if part is not None:
        from octavo.models.stage import keep_stage

        keep_stage(model, part)
    with torch.no_grad():
        for name, layer in _layers(model):
            layer.create_weights(build, name)
    model.assign_kv_groups()
    return model.eval()


def _invariant_method() -> Callable[..., LinearMethod]:
    from octavo.quantization.invariant_method import invariant_method  # needs Triton

    return invariant_method


def _layers(model: CausalLM) -> list[tuple[str, Layer]]:
    return [(name, module) for name, module in model.named_modules() if isinstance(module, Layer)]


def load_targets(model: CausalLM) -> Targets:
    """Every checkpoint tensor that the model takes, by Hugging Face's names, with its full shape.

    A model may also find a target under other names, over which the mapping does not iterate.
    """
    targets: dict[str, LoadTarget] = {}
    for name, layer in _layers(model):
        for key, target in layer.load_targets(name).items():
            assert key not in targets, key
            targets[key] = target
    return model.checkpoint_targets(targets)


def targets_of(config: ModelConfig) -> Targets:
    """The checkpoint tensors that a model of this config takes on one rank; nothing is allocated."""
    return load_targets(build_model(config, dtype=torch.float32, device="meta"))


@torch.no_grad()
def load_weights(model: CausalLM, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Fill a built model from full checkpoint tensors, in any order, then let the layers repack.

    Each rank is given the full tensors and copies its piece. A tensor may be of any float dtype and
    on any device, and is not kept, unless the weights are `InMemory`.

    Raises:
        ModelError: tensors that are missing, not expected, given twice or of a wrong shape; one line
            names them. The model is then unusable.
    """
    shared: SharedMatrices | None = None
    if isinstance(weights, AsRead):
        with touched_ahead(model.parameters()):
            _fill(model, weights)
    elif isinstance(weights, InMemory):
        with SharedMatrices(model) as shared:
            _fill(model, weights)
    else:
        _fill(model, weights)
    release_freed()  # of decoding
    _repack(model)
    release_freed()
    if shared is not None and isinstance(weights, InMemory):
        logger.info(
            "%s: %.1f MB of weights are shared with it, the others are copied: merged, repacked or converted",
            weights.name,
            shared.shared_bytes(model) / 1e6,
        )


def _repack(model: CausalLM) -> None:
    """Let every layer repack: on a CPU several at once, each on one thread, which takes half the time of
    one after the other on all threads (more where the machine is busy)."""
    layers = [layer for _, layer in _layers(model)]
    threads = min(torch.get_num_threads(), _MOST_AT_ONCE)
    if threads == 1 or any(p.device.type != "cpu" for p in model.parameters()):
        for layer in layers:
            layer.process_after_load()
        return

    def repack(layer: Layer) -> int:
        before = sum(p.nbytes for p in layer.parameters(recurse=False))
        with torch.no_grad():  # which is a thread's own setting
            layer.process_after_load()
        return before - sum(p.nbytes for p in layer.parameters(recurse=False))

    freed = 0
    with own_threads(threads, "octavo-repack") as pool:
        for nbytes in pool.map(repack, layers):
            freed += nbytes
            if freed >= _TRIM_BYTES:  # one thread's heap keeps what another's layer has freed
                release_freed()
                freed = 0


def _fill(model: CausalLM, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Copy every tensor to its place, and see that all places are filled."""
    targets = load_targets(model)
    seen: set[str] = set()
    unexpected: list[str] = []
    for name, tensor in weights:
        target = targets.get(name)
        if target is None:
            if not ignored(name, targets):
                unexpected.append(name)
            continue
        if name in seen:
            raise ModelError(f"weights: {name} is given twice: the checkpoint is corrupt, fetch it again")
        if not target.takes(tuple(tensor.shape)):
            raise ModelError(
                f"weights: {name} has shape {list(tensor.shape)}, but the config asks for "
                f"{list(target.shape)}: fetch the model again, with its own config"
            )
        target.load(tensor)
        seen.add(name)
    lacking = missing(seen, targets)
    if lacking or unexpected:
        kinds = (("missing", lacking), ("unexpected", unexpected))
        faults = [f"{len(names)} {what} ({_some(names)})" for what, names in kinds if names]
        raise ModelError(
            f"weights: {' and '.join(faults)}: the checkpoint is incomplete or not a "
            f"{model.config.architecture}, fetch it again"
        )


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:_NAMES_SHOWN])
    return shown if len(names) <= _NAMES_SHOWN else f"{shown}, …"
