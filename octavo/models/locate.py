"""From what the user named to the files of a model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from octavo.errors import ModelError
from octavo.models import pull


@dataclass(frozen=True)
class ModelSource:
    """Where a model lies.

    Attributes:
        kind: "folder" (Hugging Face's layout, with a config.json) or "gguf" (one file).
        path: the folder or the file.
        name: what the user called it, or the default model's name.
    """

    kind: Literal["folder", "gguf"]
    path: Path
    name: str


def find_model(name: str | None) -> ModelSource:
    """Find a model by folder, GGUF file, or nothing for the embedded default one.

    A folder without config.json that holds exactly one `.gguf` file stands for that file. The
    default model's own name (`SmolLM2-135M-Instruct`) also finds it, once pulled.

    Raises:
        ModelError: nothing there, or not a model; the message says what to give instead.
    """
    if name is None:
        path = pull.find_default()
        if path is None:
            raise ModelError(
                f"no model was named and the default one is not at {pull.default_model_path()}: "
                "run `octavo pull`, or name a folder or a .gguf file"
            )
        return ModelSource("gguf", path, pull.DEFAULT_MODEL)
    path = Path(name).expanduser()
    if path.is_dir():
        return _in_folder(path, name)
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ModelError(f"model {name!r} is a file but not a .gguf one: name a folder or a .gguf file")
        return ModelSource("gguf", path, name)
    if name == pull.DEFAULT_MODEL:
        return find_model(None)
    raise ModelError(
        f"model {name!r} is neither a folder nor a .gguf file here: download it and give its folder "
        "(hub ids are not supported by this version)"
    )


def _in_folder(path: Path, name: str) -> ModelSource:
    if (path / "config.json").is_file():
        return ModelSource("folder", path, name)
    ggufs = sorted(p for p in path.iterdir() if p.suffix.lower() == ".gguf" and p.is_file())
    if len(ggufs) == 1:
        return ModelSource("gguf", ggufs[0], name)
    if ggufs:
        shown = ", ".join(p.name for p in ggufs[:4])
        raise ModelError(f"model folder {name!r} holds {len(ggufs)} GGUF files ({shown}): name one of them")
    raise ModelError(
        f"model folder {name!r} has no config.json and no .gguf file: give a folder that holds a checkpoint"
    )
