"""Which device, dtype and threads a worker uses. Nothing touches CUDA before the setting is read."""

from __future__ import annotations

import logging
import os

import torch

from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.kernels.cpu import half
from octavo.kernels.quant_ops import has_kernels
from octavo.models.config import ModelConfig
from octavo.models.locate import ModelSource
from octavo.planning.hardware import detect_cpu, usable_cores
from octavo.quantization.linear_method import cpu_lacks

logger = logging.getLogger(__name__)

_HALF_FILES = (1, 32)  # GGUF's "general.file_type" of files in float16 and bfloat16
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def choose_device(name: str) -> torch.device:
    """The device of a setting: auto, cpu, cuda or cuda:N (counted among the visible ones).

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
    number = int(index) if index.isdigit() else 0
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
) -> str | None:
    """How weights are stored, as `build_model` takes it: None for plain numbers in the model's dtype.

    By default a GGUF file's encodings are kept on a CPU that has kernels for them. 16-bit floats are computed
    on in float32 ("half") on one that has kernels for those, unless it multiplies them itself and may.

    Args:
        name: the setting.
        model: whose weights they are.
        dtype: the name of the activations' dtype, as `choose_dtype` gives it.

    Raises:
        ConfigError: a setting that does not fit the model or the device.
    """
    stored = source.kind == "gguf" and load_format != "dummy"
    if name == "gguf" and not stored:
        reason = "random weights have none" if source.kind == "gguf" else f"{source.name} is none"
        raise ConfigError(
            f"quantization='gguf' keeps the encodings of a GGUF file, and {reason}: leave it out"
        )
    if name not in (None, "none"):
        return name
    plain = not stored or model.extra.get("general.file_type") in _HALF_FILES
    if name is None and not plain and device.type == "cpu" and has_kernels():
        return "gguf"
    # Encoded numbers are expanded to the activations' dtype; floats beside float32 stay as they are.
    kept = model.dtype if plain and dtype == "float32" else dtype
    halves = ("bfloat16", "float16")
    computes_wide = dtype == "float32" or (dtype in halves and cpu_lacks(DTYPES[dtype]))
    if device.type == "cpu" and kept in halves and computes_wide and half.panel():
        return "half"
    return None


def set_threads(config: EngineConfig, device: torch.device) -> int:
    """Set PyTorch's threads for the calling thread; returns their number.

    On a CPU as many as physical cores that this process may use, or OMP_NUM_THREADS; beside a GPU
    one, since the host only prepares small tensors and idle workers would get in its way.
    """
    if config.num_threads is not None:
        threads = config.num_threads
    elif device.type == "cuda":
        threads = 1
    elif os.environ.get("OMP_NUM_THREADS", "").isdigit():
        threads = max(1, int(os.environ["OMP_NUM_THREADS"]))
    else:
        threads = max(1, min(detect_cpu().physical_cores, usable_cores()))
    torch.set_num_threads(threads)
    return threads
