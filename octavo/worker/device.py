"""Which device, dtype and threads a worker uses. Nothing touches CUDA before the setting is read."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from typing import Literal

import torch
from torch import nn

from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.kernels.cpu import half
from octavo.kernels.quant_ops import has_kernels
from octavo.models.config import ModelConfig
from octavo.models.locate import ModelSource
from octavo.models.quantized import checkpoint_quantization
from octavo.planning.hardware import detect_cpu, usable_cores
from octavo.quantization.checkpoint_method import mode_of
from octavo.quantization.checkpoint_runners import dequantized_instead
from octavo.quantization.linear_method import cpu_lacks
from octavo.quantization.local_hardware import hardware_of
from octavo.quantization.online import NAMES as ONLINE
from octavo.quantization.online import online
from octavo.quantization.scheme import FORMATS, QuantizationConfig, setting

logger = logging.getLogger(__name__)

_HALF_FILES = (1, 32)  # GGUF's "general.file_type" of files in float16 and bfloat16
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def choose_device(name: str) -> torch.device:
    """The device of a setting: auto, cpu, cuda or cuda:N (counted among the visible ones); cuda is the
    process's current one.

    Raises:
        ConfigError: no such device.
    """
    if name == "cpu":
        return torch.device("cpu")
    if name == "auto" and not torch.cuda.is_available():
        return torch.device("cpu")
    kind, _, index = name.partition(":")
    if not torch.cuda.is_available():
        raise ConfigError(
            f"device={name!r}: PyTorch {torch.__version__} sees no CUDA device here; use device='cpu'"
        )
    number = int(index) if index.isdigit() else torch.cuda.current_device()
    if (index and not index.isdigit()) or number >= torch.cuda.device_count():
        raise ConfigError(f"device={name!r}: only cuda:0 to cuda:{torch.cuda.device_count() - 1} are visible")
    torch.cuda.set_device(number)
    return torch.device("cuda", number)


def choose_dtype(
    name: str, model: ModelConfig, device: torch.device, capability: tuple[int, int] | None = None
) -> str:
    """The name of the dtype that weights and activations have.

    `auto` is the checkpoint's own, but float32 on a CPU where the checkpoint's is slow: float16 on
    any, bfloat16 on one that does not multiply it itself.

    Args:
        capability: compute capability of a GPU that is not here; None: ask the device.
    """
    if name != "auto":
        return name
    if device.type == "cpu" and model.dtype != "float32":
        return "bfloat16" if detect_cpu().fast_bfloat16 else "float32"
    if device.type == "cuda" and model.dtype == "bfloat16":
        if (capability or torch.cuda.get_device_capability(device)) < (8, 0):
            return "float16"
    return model.dtype


def choose_quantization(
    name: str | None,
    source: ModelSource,
    load_format: str,
    device: torch.device,
    model: ModelConfig,
    dtype: str,
    strict: bool = False,
) -> QuantizationConfig | None:
    """How weights are stored, as `build_model` takes it: None for plain numbers in the model's dtype.

    By default weights of a quantized checkpoint are kept as they are where the device has kernels for them, a
    GGUF file's encodings on a CPU alone. 16-bit floats are computed on in float32 ("half") on a CPU that has
    kernels for those, unless it multiplies them itself, may, and is faster so.

    Args:
        name: the setting.
        model: whose weights they are.
        dtype: the name of the activations' dtype, as `choose_dtype` gives it.
        strict: refuse where something else is computed than the checkpoint, or the setting, asks for.

    Raises:
        ConfigError: a setting that does not fit the model or the device.
        ModelError: a checkpoint quantized by a method that is not supported.
    """
    found = checkpoint_quantization(source, model, load_format)
    if found is not None:
        if name not in (None, "none", found.format):
            raise ConfigError(
                f"quantization={name!r}: {source.name} is quantized already, by {found.format}: leave it "
                "out, or use 'none' to expand it"
            )
        dense: Literal["plain", "half"] = "half" if _keeps_half(device, model.dtype, dtype) else "plain"
        found = replace(found, dense=dense, dequantize=name == "none")
        if strict:
            _check_strict(found, device)
        return found
    stored = source.kind == "gguf" and load_format != "dummy"
    plain = not stored or model.extra.get("general.file_type") in _HALF_FILES
    # Encoded numbers are expanded to the activations' dtype; floats beside float32 stay as they are.
    half = _keeps_half(device, model.dtype if plain and dtype == "float32" else dtype, dtype)
    if name in ONLINE and not (name == "int8" and device.type == "cpu"):  # which a CPU has a method for
        made = replace(online(name), dense="half" if half else "plain")
        if strict:
            _check_strict(made, device)
        return made
    if name in FORMATS:
        raise ConfigError(f"quantization={name!r}: {source.name} is not quantized so: leave it out")
    if name == "gguf" and not stored:
        reason = "random weights have none" if source.kind == "gguf" else f"{source.name} is none"
        raise ConfigError(
            f"quantization='gguf' keeps the encodings of a GGUF file, and {reason}: leave it out"
        )
    if name is not None and name != "none":
        return setting(name)
    if name is None and not plain and device.type == "cpu" and has_kernels():
        return setting("gguf")
    return setting("half") if half else None


def choose_kv_dtype(config: EngineConfig, model: ModelConfig, quantization: QuantizationConfig | None) -> str:
    """The type of the KV cache, as `build_model` takes it: `auto` is that of a checkpoint which has scales
    for keys and values, but for what serves no cache in 8 bits; else the model's.

    Args:
        config: the engine's settings.
        quantization: of the model's weights.
    """
    lacks = config.batch_invariant or model.latent is not None
    if config.kv_cache_dtype != "auto" or quantization is None or quantization.dequantize or lacks:
        return config.kv_cache_dtype
    return quantization.kv_cache or "auto"


def _keeps_half(device: torch.device, kept: str, dtype: str) -> bool:
    """Whether weights of type `kept` stay so on a CPU that computes on them in float32."""
    halves = ("bfloat16", "float16")
    lacks = dtype in halves and cpu_lacks(DTYPES[dtype])
    computes_wide = dtype == "float32" or lacks or (dtype == "bfloat16" and detect_cpu().widens_bfloat16)
    return device.type == "cpu" and kept in halves and computes_wide and half.panel() > 0


def _check_strict(found: QuantizationConfig, device: torch.device) -> None:
    for scheme in found.schemes:
        running = mode_of(found, scheme, hardware_of(device))
        if running.reason is not None:
            raise ConfigError(
                f"quantization_strict: {scheme.name} would run as {running.mode}, since {running.reason}: "
                "leave quantization_strict out, or use other hardware"
            )


def check_strictly_kept(model: nn.Module) -> None:
    """Refuse, for quantization_strict, matrices that turned out to have no form of the kernels.

    Raises:
        ConfigError: naming how many there are, and why.
    """
    for reason, count in dequantized_instead(model).items():
        raise ConfigError(
            f"quantization_strict: {count} of the matrices would be dequantized, since {reason}: leave "
            "quantization_strict out, or use other hardware"
        )


def set_threads(config: EngineConfig, device: torch.device) -> int:
    """Set PyTorch's threads for the calling thread; returns their number.

    On a CPU as many as physical cores that this process may use, shared by parallel ranks, or
    OMP_NUM_THREADS; beside a GPU one, since the host only prepares small tensors and idle workers would get
    in its way.
    """
    if config.num_threads is not None:
        threads = config.num_threads
    elif device.type == "cuda":
        threads = 1
    elif os.environ.get("OMP_NUM_THREADS", "").isdigit():
        threads = max(1, int(os.environ["OMP_NUM_THREADS"]))
    else:
        threads = max(1, min(detect_cpu().physical_cores, usable_cores()) // config.num_ranks)
    torch.set_num_threads(threads)
    return threads
