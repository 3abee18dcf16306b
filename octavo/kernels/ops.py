"""Small operations of layers and sampler, each by the fastest kernel for its tensors' device.

Signatures and meaning are those of `reference` and `reference_sampling`, which also run on devices without
kernels of their own and for dtypes that they do not take (float16 on a CPU). Where a device's kernels
cannot be had (no C++ compiler, no Triton), one warning says so and the plain versions run.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from octavo.kernels import reference, reference_sampling

logger = logging.getLogger(__name__)


class Kernels(NamedTuple):
    """One implementation of every operation, and its name for `octavo env` and the logs."""

    name: str
    rms_norm: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
    add_rms_norm: Callable[
        [torch.Tensor, torch.Tensor, torch.Tensor, float], tuple[torch.Tensor, torch.Tensor]
    ]
    layer_norm: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, float], torch.Tensor]
    add_layer_norm: Callable[
        [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, float],
        tuple[torch.Tensor, torch.Tensor],
    ]
    rotary: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
    silu_and_mul: Callable[[torch.Tensor], torch.Tensor]
    gelu_tanh_and_mul: Callable[[torch.Tensor], torch.Tensor]
    softcap: Callable[[torch.Tensor, float], torch.Tensor]
    argmax: Callable[[torch.Tensor], torch.Tensor]
    gumbel_argmax: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    logsumexp: Callable[[torch.Tensor], torch.Tensor]
    ranking_keys: Callable[[torch.Tensor], torch.Tensor]
    forbid_tokens: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
    look_up_part: Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]


REFERENCE = Kernels(
    "torch",
    reference.rms_norm,
    reference.add_rms_norm,
    reference.layer_norm,
    reference.add_layer_norm,
    reference.rotary,
    reference.silu_and_mul,
    reference.gelu_tanh_and_mul,
    reference.softcap,
    reference_sampling.argmax,
    reference_sampling.gumbel_argmax,
    reference_sampling.logsumexp,
    reference_sampling.ranking_keys,
    reference_sampling.forbid_tokens,
    reference.look_up_part,
)


def _cpu(dtype: torch.dtype) -> Kernels:
    cpu: Any = importlib.import_module("octavo.kernels.cpu.ops")
    if dtype not in (torch.float32, torch.bfloat16) or not cpu.available():
        return REFERENCE
    norm_act: Any = importlib.import_module("octavo.kernels.cpu.norm_act")
    return Kernels(
        "cpu",
        norm_act.rms_norm,
        norm_act.add_rms_norm,
        norm_act.layer_norm,
        norm_act.add_layer_norm,
        cpu.rotary,
        norm_act.silu_and_mul,
        norm_act.gelu_tanh_and_mul,
        norm_act.softcap,
        # NumPy's argmax of float32 is the fastest here: 6 against 38 µs for a row of 49152.
        reference_sampling.argmax if dtype is torch.float32 else cpu.argmax,
        cpu.gumbel_argmax,
        reference_sampling.logsumexp,
        reference_sampling.ranking_keys,
        reference_sampling.forbid_tokens,
        reference.look_up_part,
    )


def _triton(dtype: torch.dtype) -> Kernels:
    try:
        norm: Any = importlib.import_module("octavo.kernels.triton.norm")
    except ImportError as error:
        logger.warning("Triton is not available (%s): layers run in plain PyTorch, slowly", error)
        return REFERENCE
    rotary_kv: Any = importlib.import_module("octavo.kernels.triton.rotary_kv")
    activation: Any = importlib.import_module("octavo.kernels.triton.activation")
    sampling: Any = importlib.import_module("octavo.kernels.triton.sampling")
    logprobs: Any = importlib.import_module("octavo.kernels.triton.logprobs")
    embedding: Any = importlib.import_module("octavo.kernels.triton.embedding")
    bitmask: Any = importlib.import_module("octavo.kernels.triton.bitmask")

    def rotary(q: torch.Tensor, k: torch.Tensor, cos_sin: torch.Tensor, positions: torch.Tensor) -> None:
        rotary_kv.rotary_and_write_kv(q, k, k, cos_sin, positions)  # without a cache it only rotates

    return Kernels(
        "triton",
        norm.rms_norm,
        norm.add_rms_norm,
        norm.layer_norm,
        norm.add_layer_norm,
        rotary,
        activation.silu_and_mul,
        activation.gelu_tanh_and_mul,
        activation.softcap,
        sampling.argmax,
        sampling.gumbel_argmax,
        logprobs.logsumexp,
        logprobs.ranking_keys,
        bitmask.forbid_tokens,
        embedding.look_up_part,
    )


_BY_DEVICE: dict[str, Callable[[torch.dtype], Kernels]] = {"cpu": _cpu, "cuda": _triton}


@functools.cache
def kernels_for(device_type: str, dtype: torch.dtype) -> Kernels:
    """The operations that tensors of a device type ("cpu", "cuda", …) and dtype go through."""
    make = _BY_DEVICE.get(device_type)
    return REFERENCE if make is None else make(dtype)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `reference.rms_norm`."""
    return kernels_for(x.device.type, x.dtype).rms_norm(x, weight, eps)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `reference.add_rms_norm`: `residual` is overwritten."""
    return kernels_for(x.device.type, x.dtype).add_rms_norm(x, residual, weight, eps)


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    """See `reference.layer_norm`."""
    return kernels_for(x.device.type, x.dtype).layer_norm(x, weight, bias, eps)


def add_layer_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `reference.add_layer_norm`: `residual` is overwritten."""
    return kernels_for(x.device.type, x.dtype).add_layer_norm(x, residual, weight, bias, eps)


def rotary(q: torch.Tensor, k: torch.Tensor, cos_sin: torch.Tensor, positions: torch.Tensor) -> None:
    """See `reference.rotary`: `q` and `k` are overwritten."""
    kernels_for(q.device.type, q.dtype).rotary(q, k, cos_sin, positions)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """See `reference.silu_and_mul`."""
    return kernels_for(x.device.type, x.dtype).silu_and_mul(x)


def gelu_tanh_and_mul(x: torch.Tensor) -> torch.Tensor:
    """See `reference.gelu_tanh_and_mul`."""
    return kernels_for(x.device.type, x.dtype).gelu_tanh_and_mul(x)


GATED: dict[Callable[[torch.Tensor], torch.Tensor], str] = {
    silu_and_mul: "silu",
    gelu_tanh_and_mul: "gelu_tanh",
}
"""The gated activations that a product's kernel, or one that quantizes, takes in; by the kernels' names."""


def softcap(x: torch.Tensor, cap: float) -> torch.Tensor:
    """See `reference.softcap`: `x` is overwritten."""
    return kernels_for(x.device.type, x.dtype).softcap(x, cap)


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """See `reference_sampling.argmax`."""
    return kernels_for(logits.device.type, logits.dtype).argmax(logits)


def gumbel_argmax(
    logits: torch.Tensor, temperature: torch.Tensor, k0: torch.Tensor, k1: torch.Tensor
) -> torch.Tensor:
    """See `reference_sampling.gumbel_argmax`."""
    return kernels_for(logits.device.type, logits.dtype).gumbel_argmax(logits, temperature, k0, k1)


def logsumexp(logits: torch.Tensor) -> torch.Tensor:
    """See `reference_sampling.logsumexp`."""
    return kernels_for(logits.device.type, logits.dtype).logsumexp(logits)


def ranking_keys(logits: torch.Tensor) -> torch.Tensor:
    """See `reference_sampling.ranking_keys`."""
    return kernels_for(logits.device.type, logits.dtype).ranking_keys(logits)


def forbid_tokens(logits: torch.Tensor, rows: torch.Tensor, bits: torch.Tensor) -> None:
    """See `reference_sampling.forbid_tokens`: `logits` is overwritten."""
    kernels_for(logits.device.type, logits.dtype).forbid_tokens(logits, rows, bits)


def look_up_part(table: torch.Tensor, token_ids: torch.Tensor, first: int) -> torch.Tensor:
    """See `reference.look_up_part`."""
    return kernels_for(table.device.type, table.dtype).look_up_part(table, token_ids, first)
