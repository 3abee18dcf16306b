"""Config, generation defaults and weights of a model, whatever files it lies in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from octavo.errors import ModelError
from octavo.models.config import ModelConfig
from octavo.models.gguf_config import generation_config_from_gguf, model_config_from_gguf
from octavo.models.gguf_file import GGUFFile
from octavo.models.hf_config import (
    generation_config_from_folder,
    model_config_from_dict,
)
from octavo.models.json_file import read_json
from octavo.models.locate import ModelSource
from octavo.models.plausible import check_layers
from octavo.models.transformers_config import is_native, model_config_from_raw, with_head

if TYPE_CHECKING:
    import torch

    from octavo.models.targets import Targets


def load_model_config(source: ModelSource, model_impl: str = "auto") -> ModelConfig:
    """The architecture of a model, and whose code runs it.

    Args:
        model_impl: the setting: auto takes Octavo's own families where one knows the architecture, and
            Transformers' code otherwise.

    Raises:
        ModelError: missing or malformed files, or an architecture that is not supported.
    """
    if source.kind == "gguf":
        if model_impl == "transformers":
            raise ModelError(
                f"{source.name}: model_impl='transformers' reads folders only, not GGUF files: leave it auto"
            )
        file = GGUFFile(source.path)
        check_layers(file.metadata, str(file.path))
        return model_config_from_gguf(file)
    generation, where = source.path / "generation_config.json", source.config_name
    raw = _merged(read_json(source.path / "config.json"), source.overrides or {})
    check_layers(raw, where)
    causal = with_head(raw)
    given = read_json(generation) if generation.exists() else {}
    if is_native(causal, model_impl):
        found = model_config_from_dict(causal, given, where)
        return found if causal is raw else replace(found, extra=raw)
    return model_config_from_raw(raw, given, where)


def _merged(raw: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """A config with some of its values others; of one that is an object itself, some of those within."""
    merged = dict(raw)
    for name, value in overrides.items():
        inner = raw.get(name)
        both = isinstance(inner, dict) and isinstance(value, dict)
        merged[name] = _merged(inner, value) if both else value  # type: ignore[arg-type]
    return merged


def load_generation_config(source: ModelSource) -> dict[str, float | int]:
    """Default sampling settings that the model states, under `SamplingParams`' names; {} if none.

    Among those of `GENERATION_FIELDS`.

    Raises:
        ModelError: malformed files.
    """
    if source.kind == "gguf":
        return generation_config_from_gguf(GGUFFile(source.path))
    return generation_config_from_folder(source.path)


def iterate_weights(
    source: ModelSource,
    config: ModelConfig,
    targets: Targets,
    load_format: str,
    dtype: torch.dtype,
    device: torch.device | str,
    progress: bool = True,
    seed: int = 0,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every weight under its Hugging Face name (`model.layers.0.self_attn.q_proj.weight`), once each.

    They are what `targets` (see `load_targets`) asks for: names and shapes are checked before the first
    is yielded. A tensor is the consumer's to copy from until it asks for the next.

    Args:
        targets: what the model takes.
        load_format: auto, safetensors, pt, gguf or dummy (random weights by `seed`).
        dtype: of GGUF's and random weights; those of a folder come in the checkpoint's own type, as
            views of the mapped file on the CPU, and the consumer's copy converts them.
        device: where GGUF's and random weights are made, and where the consumer copies a folder's.
        progress: show a bar on stderr when it is a terminal.

    Raises:
        ModelError: weights that are missing, truncated, corrupt, misshapen, or not of this format.
    """
    import torch

    from octavo.models.read_ahead import AsRead

    device = torch.device(device)
    if load_format == "dummy":
        from octavo.models.dummy import dummy_weights

        unit = "el"
        total, weights = dummy_weights(config, targets, dtype, device, seed)
    elif source.held is not None and load_format == "auto":
        from octavo.models.in_memory import InMemory, held_weights

        total, weights = held_weights(source.held, targets, config.architecture)
        return InMemory(source.name, _counted(weights, total, "B", f"Loading {source.name}", progress))
    elif source.kind == "gguf" and load_format in ("auto", "gguf"):
        from octavo.models.gguf_weights import gguf_weights

        unit = "el"
        total, weights = gguf_weights(GGUFFile(source.path), config, targets, dtype, device)
    elif source.kind == "folder" and load_format in ("auto", "safetensors", "pt"):
        from octavo.models.weights import folder_weights

        unit = "B"
        total, weights = folder_weights(source.path, targets, config.architecture, load_format, device)
    else:
        kinds = {"gguf": "a .gguf file", "pt": "a folder with .bin files"}
        wanted = kinds.get(load_format, "a folder with safetensors files")
        what = source.path if source.held is None else source.name
        raise ModelError(f"load_format={load_format!r} does not fit {what}: give {wanted}, or leave it auto")
    counted = _counted(weights, total, unit, f"Loading {source.path.name}", progress)
    return AsRead(counted) if unit == "B" else counted


def _counted(
    weights: Iterator[tuple[str, torch.Tensor]], total: int, unit: str, title: str, progress: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights, under a bar on stderr when it is a terminal (and `progress`)."""
    from tqdm import tqdm

    with tqdm(total=total, unit=unit, unit_scale=True, desc=title, disable=None if progress else True) as bar:
        for name, tensor in weights:
            yield name, tensor
            bar.update(tensor.numel() if unit == "el" else tensor.numel() * tensor.element_size())
