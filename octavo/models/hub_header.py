"""What is known of a hub's model without its weights: a folder's config, or a GGUF file's header."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.errors import ModelError
from octavo.models import hub, pull
from octavo.models.gguf_part import GGUFPart
from octavo.models.hub_files import gguf_in, is_complete, wanted_files
from octavo.models.locate import ModelSource, find_model, overridden

if TYPE_CHECKING:
    from octavo.config import EngineConfig

# Of a repository, what describes a model: its config, and what makes one an embedding model.
_CONFIGS = ("config.json", "generation_config.json", "modules.json", "config_sentence_transformers.json")
_STEPS = (1 << 20, 4 << 20, 16 << 20, 64 << 20)  # bytes of a GGUF file until its header is whole


@contextlib.contextmanager
def described_model(config: EngineConfig) -> Iterator[ModelSource]:
    """The model that the settings name, as far as its config and its file's headers: of a model on the hub
    that is not in its cache no weights are fetched. It is there inside the block.

    Raises:
        ModelError, ConfigError: as `octavo.models.locate.configured_model`.
    """
    with _described(config) as source:
        yield overridden(source, config)


@contextlib.contextmanager
def _described(config: EngineConfig) -> Iterator[ModelSource]:
    name = config.model
    parsed = None
    if name and name != pull.DEFAULT_MODEL and not Path(name).expanduser().exists():
        parsed = hub.parse_hub_name(name)
    if name is None or parsed is None:
        yield find_model(name, revision=config.revision, load_format=config.load_format)
        return
    cache = hub.cache_root(config.download_dir)
    found = hub.cached_snapshot(parsed.repo, config.revision or "main", cache)
    if found is not None and is_complete(found.folder, parsed.tag, parsed.file, config.load_format, True):
        file = gguf_in(found.folder, parsed.tag, parsed.file, config.load_format)
        kind = "folder" if file is None else "gguf"
        yield ModelSource(kind, file or found.folder, name, found.commit)  # type: ignore[arg-type]
        return
    sizes, commit = hub.list_files(parsed.repo, config.revision, config.hf_token)
    files = wanted_files(list(sizes), parsed.tag, parsed.file, config.load_format, True, parsed.repo)
    with tempfile.TemporaryDirectory(prefix="octavo-plan-") as scratch:
        folder = Path(scratch)
        ggufs = [file for file in files if file.lower().endswith(".gguf")]
        if ggufs:
            for part in ggufs:
                _fetch_header(parsed.repo, commit, part, sizes[part], folder, config.hf_token)
            yield ModelSource("gguf", folder / Path(ggufs[0]).name, name, commit)
            return
        for part in (f for f in files if f in _CONFIGS or f.endswith("/config.json")):
            (folder / part).parent.mkdir(exist_ok=True)
            content = hub.read_beginning(parsed.repo, commit, part, sizes[part], config.hf_token)
            (folder / part).write_bytes(content)
        yield ModelSource("folder", folder, name, commit)


def _fetch_header(repo: str, commit: str, file: str, size: int, folder: Path, token: str | None) -> None:
    """A file of the same size in `folder` whose header is there, and whose tensors take no room on disk."""
    path = folder / Path(file).name
    for step in _STEPS:
        beginning = hub.read_beginning(repo, commit, file, min(step, size), token)
        with path.open("wb") as out:
            out.write(beginning)
            out.truncate(size)
        if step >= size or _is_whole(path, len(beginning)):
            return
    raise ModelError(f"{file} of {repo!r} has a header of more than {_STEPS[-1]} bytes: fetch it whole first")


def _is_whole(path: Path, there: int) -> bool:
    """Whether the first `there` bytes of a GGUF file hold its header."""
    try:
        # Of a split model's part alone: the others may not be there yet.
        tensors = GGUFPart(path).tensors.values()
    except ModelError:
        return False
    return min((t.offset for t in tensors), default=0) <= there
