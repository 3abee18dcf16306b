"""The quantization of a checkpoint, from its config and the names of its tensors."""

from __future__ import annotations

from dataclasses import replace

from octavo.errors import ModelError
from octavo.models.config import ModelConfig
from octavo.models.json_file import read_json
from octavo.models.locate import ModelSource
from octavo.models.safetensors_file import list_files, read_header
from octavo.quantization.read_config import (
    SIDE_FILES,
    limited_to,
    read_quantization,
    read_quantization_entry,
)
from octavo.quantization.scheme import QuantizationConfig


def checkpoint_quantization(
    source: ModelSource, config: ModelConfig, load_format: str
) -> QuantizationConfig | None:
    """How a folder's weights are quantized; None: they are not, or it is a GGUF file.

    Args:
        source: the model.
        config: its own.
        load_format: the setting: random weights are quantized as the config says, whatever files there are.

    Raises:
        ModelError: a method that is not supported, or a model that is run by Transformers' code.
    """
    if source.kind == "gguf":
        return None
    found = read_quantization(config.extra, str(source.path / "config.json"))
    if found is None:
        side = next((source.path / name for name in SIDE_FILES if (source.path / name).exists()), None)
        if side is None:
            return None
        found = read_quantization_entry(read_json(side), str(side))
    if config.implementation != "octavo":
        raise ModelError(
            f"{found.source}: {config.architecture}, quantized by {found.format}, is run by Transformers' "
            "code, which takes no quantized weights here: use the unquantized checkpoint"
        )
    if load_format == "dummy":
        return found
    names = {name for path in list_files(source.path) for name in read_header(path).tensors}
    return replace(limited_to(found, names), kv_cache=found.kv_cache) if names else found
