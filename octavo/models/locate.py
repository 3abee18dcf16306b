"""From what the user named to the files of a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from octavo.errors import ConfigError, ModelError
from octavo.models import hub, pull
from octavo.models.held import HeldModel, held_model
from octavo.models.hub_files import choose_gguf, gguf_in

if TYPE_CHECKING:
    from octavo.config import EngineConfig

# Files of a model that something reads: of these none may lie outside.
_READ = (".json", ".safetensors", ".bin", ".gguf", ".model", ".txt", ".tiktoken", ".jinja")


@dataclass(frozen=True)
class ModelSource:
    """Where a model lies.

    Attributes:
        kind: "folder" (Hugging Face's layout, with a config.json) or "gguf" (a file, or the first of
            the parts that a model is split into).
        path: the folder or the file.
        name: what the user called it, or the default model's name.
        revision: the commit of a model from the hub, else None.
        held: the model in memory whose weights are taken, instead of files of the folder; None: none is.
        overrides: what its config.json says otherwise than its file (`hf_overrides`).
    """

    kind: Literal["folder", "gguf"]
    path: Path
    name: str
    revision: str | None = None
    overrides: Mapping[str, Any] | None = None
    held: HeldModel | None = field(default=None, compare=False, repr=False)

    @property
    def config_name(self) -> str:
        """What messages call a folder's config."""
        return str(self.path / "config.json") if self.held is None else f"{self.name}'s config"


def configured_model(config: EngineConfig) -> ModelSource:
    """The model that the settings name; fetched if it is the hub's and not yet in its cache.

    Raises:
        ModelError: as `find_model`.
        ConfigError: `hf_overrides` for a model without a config.json.
    """
    found = find_model(
        config.model,
        revision=config.revision,
        download_dir=config.download_dir,
        token=config.hf_token,
        load_format=config.load_format,
    )
    return overridden(found, config)


def overridden(source: ModelSource, config: EngineConfig) -> ModelSource:
    """A model with what the settings say otherwise than its config.json.

    Raises:
        ConfigError: it has none.
    """
    given = config.hf_overrides
    if not given:
        return source
    if source.kind != "folder":
        raise ConfigError(
            f"hf_overrides is for a config.json, and {source.name} is a GGUF file: leave it out"
        )
    assert isinstance(given, dict)
    return replace(source, overrides=given)


def configured_tokenizer(config: EngineConfig, source: ModelSource) -> Path:
    """The folder or GGUF file of the tokenizer that the settings name, or the model's own.

    Raises:
        ModelError: as `find_model`.
    """
    if config.tokenizer is None or config.tokenizer == config.model:
        return source.path
    place = Path(config.tokenizer).expanduser()
    if place.exists():
        return place
    found = _on_hub(
        config.tokenizer,
        revision=config.tokenizer_revision,
        download_dir=config.download_dir,
        token=config.hf_token,
        load_format="auto",
        weights=False,
    )
    if found is None:
        raise ModelError(
            f"tokenizer {config.tokenizer!r} is neither a folder nor a file here nor a hub id: give one that "
            "exists"
        )
    return found.path


def find_model(
    name: str | None,
    *,
    revision: str | None = None,
    download_dir: str | None = None,
    token: str | None = None,
    load_format: str = "auto",
) -> ModelSource:
    """Find a model by folder, GGUF file, hub id, or nothing for the default one.

    What is here comes first. A folder without config.json that holds exactly one GGUF model stands
    for that; of a model split into parts any part may be named. The default model's own name
    (`SmolLM2-135M-Instruct`) also finds it, once pulled. Hub ids are `org/name`, and for GGUF files
    `org/name:Q4_K_M` or `org/name/file.gguf`.

    Args:
        revision, download_dir, token, load_format: as the settings of these names (`hf_token`).

    Raises:
        ModelError: nothing there, or not a model; the message says what to give instead.
    """
    if name is None:
        path = pull.find_default()
        if path is None:
            raise ModelError(
                f"no model was named and the default one is not at {pull.default_model_path()}: "
                "run `octavo pull`, or name a folder, a .gguf file or a hub id"
            )
        return ModelSource("gguf", path, pull.DEFAULT_MODEL)
    path = Path(name).expanduser()
    if name and path.exists():
        if revision is not None:
            raise ModelError(
                f"revision={revision!r} is for models of the hub, and {name!r} is here: leave it out"
            )
        if path.is_dir():
            return _in_folder(path, name)
        if not path.is_file() or path.suffix.lower() != ".gguf":
            raise ModelError(f"model {name!r} is a file but not a .gguf one: name a folder or a .gguf file")
        return ModelSource("gguf", path, name)
    if name == pull.DEFAULT_MODEL:
        return find_model(None)
    found = _on_hub(
        name, revision=revision, download_dir=download_dir, token=token, load_format=load_format, weights=True
    )
    if found is None:
        raise ModelError(
            f"model {name!r} is neither a folder nor a .gguf file here, nor a hub id (org/name, "
            "org/name:Q4_K_M, org/name/file.gguf): name one that exists"
        )
    return found


def _on_hub(
    name: str,
    *,
    revision: str | None,
    download_dir: str | None,
    token: str | None,
    load_format: str,
    weights: bool,
) -> ModelSource | None:
    parsed = hub.parse_hub_name(name)
    if parsed is None:
        return None
    found = hub.fetch(
        parsed,
        revision=revision,
        download_dir=download_dir,
        token=token,
        load_format=load_format,
        weights=weights,
    )
    # Links of a snapshot lead into the repository's `blobs`.
    check_links(found.folder, found.folder.parent.parent)
    file = gguf_in(found.folder, parsed.tag, parsed.file, load_format)
    if file is not None:
        return ModelSource("gguf", file, name, found.commit)
    return ModelSource("folder", found.folder, name, found.commit)


def _in_folder(path: Path, name: str) -> ModelSource:
    if (held := held_model(path)) is not None:
        return ModelSource("folder", path, held.name, held=held)
    check_links(path, hub.repository_of(path) or path)
    if (path / "config.json").is_file():
        return ModelSource("folder", path, name)
    ggufs = sorted(p for p in path.iterdir() if p.suffix.lower() == ".gguf" and p.is_file())
    if not ggufs:
        raise ModelError(
            f"model folder {name!r} has no config.json and no .gguf file: give a folder that holds a "
            "checkpoint"
        )
    chosen = choose_gguf([p.name for p in ggufs], None, None, f"model folder {name!r}")
    return ModelSource("gguf", ggufs[chosen[0]], name)


def check_links(folder: Path, root: Path) -> None:
    """Refuse a folder in which a file of a model is a link that leads out of `root`.

    Raises:
        ModelError: names the link.
    """
    inside = root.resolve()
    for path in folder.iterdir():
        if path.is_symlink() and path.suffix.lower() in _READ:
            target = path.resolve()
            if target != inside and inside not in target.parents:
                raise ModelError(
                    f"{path}: a link to {target}, outside of the model's folder: put the file itself there"
                )
