"""A quantized checkpoint of a model, file by file."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from octavo.errors import ConfigError, first_line
from octavo.models.json_file import read_json
from octavo.models.locate import ModelSource, find_model
from octavo.models.mapped_file import MappedFile
from octavo.models.read_ahead import Span, read_spans
from octavo.models.safetensors_file import INDEX, SafetensorsHeader
from octavo.models.weights import TORCH_DTYPES
from octavo.quantization.compress.card import model_card
from octavo.quantization.compress.plan import Work, plan_work
from octavo.quantization.compress.progress import Progress
from octavo.quantization.compress.recipe import Recipe, read_recipe, recipe_text
from octavo.quantization.compress.safetensors_writer import SafetensorsWriter
from octavo.quantization.rounding import THOROUGH, round_matrix
from octavo.quantization.scheme import Rule

logger = logging.getLogger(__name__)

# What is taken over beside the weights; a README is our own.
_COPIED = (".json", ".jinja", ".model", ".txt", ".tiktoken")
_OWN = ("config.json", INDEX)


def oneshot(
    model: str | Path,
    recipe: Recipe,
    output_dir: str | Path,
    *,
    revision: str | None = None,
    download_dir: str | None = None,
    hf_token: str | None = None,
    device: str = "auto",
    progress: bool = True,
) -> Path:
    """Write a model quantized by a recipe: standard compressed-tensors, which vLLM and Transformers read too.

    The source is read file by file, and each becomes one; of a matrix little more than itself is in memory. A
    run that was cut short goes on where it was, if it is started again with the same arguments: files that
    are finished, and unchanged by their digests, are kept.

    Args:
        model: a folder with safetensors, or a hub id.
        recipe: a `QuantizationModifier`; or YAML, or the path of a file of it.
        output_dir: an empty folder, or one that will be made.
        revision, download_dir, hf_token: as the engine's settings.
        device: where numbers are rounded: "cpu", "cuda", "cuda:1"; "auto": on a GPU if there is one.
        progress: show a bar on stderr when it is a terminal.

    Returns:
        The folder.

    Raises:
        ConfigError: a recipe that is wrong or does not fit the model; an output folder that is in use, full
            or cannot be written; a device that is not there.
        ModelError: a model that cannot be read, or that is quantized already.
    """
    modifier = read_recipe(recipe)
    config = modifier.config
    where = rounding_device(device)
    source = find_model(
        str(model), revision=revision, download_dir=download_dir, token=hf_token, load_format="auto"
    )
    folder = Path(output_dir).expanduser()
    if source.kind == "folder" and folder.resolve() == source.path.resolve():
        raise ConfigError(f"output_dir={str(output_dir)!r} is the model's own folder: name another")
    work = plan_work(source, config)
    entry = {**modifier.entry, "ignore": work.ignore}
    state = Progress(folder, work.headers, entry)
    _check_space(work, state)
    try:
        _write_weights(work, state, where, progress)
        _write_rest(source, work, entry, folder)
        text = recipe_text(modifier)
        (folder / "recipe.yaml").write_text(text, "utf-8")
        (folder / "README.md").write_text(model_card(source, work, text), "utf-8")
        state.end()
    except OSError as error:
        raise ConfigError(
            f"output_dir={str(folder)!r} cannot be written ({error.strerror or error}): mend that and start "
            "again, which goes on with what is finished"
        ) from None
    return folder


def _check_space(work: Work, state: Progress) -> None:
    """Raises ConfigError: the disk has no room for what is still to be written."""
    sizes = {path.name: sum(e.nbytes for e in names.values()) for path, names in work.written.items()}
    needed = sum(size for name, size in sizes.items() if name not in state.finished)
    free = shutil.disk_usage(state.folder).free
    if needed > free:
        raise ConfigError(
            f"output_dir={str(state.folder)!r}: {needed / 1e6:.1f} MB are to be written, and "
            f"{free / 1e6:.1f} MB are free: make room, or name another folder"
        )


def rounding_device(name: str) -> torch.device:
    """The device of a name, "auto" included.

    Raises:
        ConfigError: no such device, or it is not there.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device={name!r} ({first_line(error)}): choose auto, cpu or cuda") from None
    return device


def _write_weights(work: Work, state: Progress, device: torch.device, progress: bool) -> None:
    from tqdm import tqdm

    threads = torch.get_num_threads()

    total = sum(t.nbytes for header in work.headers for t in header.tensors.values())
    hidden = None if progress else True
    with (
        torch.no_grad(),
        tqdm(total=total, unit="B", unit_scale=True, desc="Quantizing", disable=hidden) as bar,
    ):
        for header in work.headers:
            name = header.path.name
            if state.has(name):
                logger.info("%s is finished, and kept", state.folder / name)
                bar.update(sum(t.nbytes for t in header.tensors.values()))
                continue
            with SafetensorsWriter(state.folder / name, work.written[header.path]) as writer:
                for tensor_name, tensor in _tensors(header):
                    torch.set_num_threads(threads)  # which reading sets to one
                    for key, value in _made(tensor_name, tensor, work, device).items():
                        writer.add(key, value)
                    bar.update(tensor.nbytes)
            state.finish(name)


def _tensors(header: SafetensorsHeader) -> Iterator[tuple[str, torch.Tensor]]:
    """A file's tensors in the order of their bytes; each is there until the next is asked for."""
    file = MappedFile(header.path, header.size)
    tensors = list(header.tensors.values())
    spans = [Span(file, tensor.offset, tensor.nbytes) for tensor in tensors]
    for tensor, raw in zip(tensors, read_spans(spans, torch.device("cpu")), strict=True):
        dtype = TORCH_DTYPES[tensor.dtype]
        aligned = raw.clone() if tensor.offset % dtype.itemsize else raw
        yield tensor.name, aligned.view(dtype).view(tensor.shape)


def _made(name: str, tensor: torch.Tensor, work: Work, device: torch.device) -> dict[str, torch.Tensor]:
    """What is written of a tensor."""
    rule: Rule | None = work.layers.get(name.removesuffix(".weight")) if name.endswith(".weight") else None
    if rule is None:
        return {name: tensor}
    assert rule.scheme is not None
    made = round_matrix(
        name,
        tensor,
        rule.scheme,
        packed=rule.layout == "pack-quantized",
        device=device,
        scale_dtype=tensor.dtype,
        ends=THOROUGH,
    )
    layer = name.removesuffix(".weight")
    return {f"{layer}.{key}": value for key, value in made.items()}


def _write_rest(source: ModelSource, work: Work, entry: dict[str, Any], folder: Path) -> None:
    """Config, index, tokenizer and whatever else lies beside the weights."""
    raw = read_json(source.path / "config.json")
    raw["quantization_config"] = entry
    (folder / "config.json").write_text(json.dumps(raw, indent=2, ensure_ascii=False) + "\n", "utf-8")
    if len(work.headers) > 1 or (source.path / INDEX).exists():
        weight_map = {name: path.name for path, names in work.written.items() for name in names}
        size = sum(found.nbytes for names in work.written.values() for found in names.values())
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", "utf-8")
    for path in sorted(source.path.iterdir()):
        if path.is_file() and path.name not in _OWN and not path.name.startswith("."):
            if path.suffix.lower() in _COPIED or path.name.upper().startswith(("LICENSE", "NOTICE")):
                shutil.copyfile(path, folder / path.name)
