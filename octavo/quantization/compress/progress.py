"""What a run that was cut short has finished: kept in a file of the output folder until all is done."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from octavo.errors import ConfigError, ModelError
from octavo.models.json_file import read_json
from octavo.models.safetensors_file import SafetensorsHeader
from octavo.quantization.compress.safetensors_writer import file_digest
from octavo.version import __version__

FILE = ".octavo-quantize.json"


class Progress:
    """Finished files of an output folder, by name with their digests.

    A folder that holds anything but an unfinished run of the same work is refused, so that nothing is
    overwritten and no two recipes are mixed.

    Args:
        folder: the output folder; made if it is not there.
        headers: of the source's files.
        entry: the quantization that is made.

    Raises (on construction):
        ConfigError: the folder holds something else.
    """

    def __init__(self, folder: Path, headers: list[SafetensorsHeader], entry: dict[str, Any]):
        self.folder = folder
        digest = hashlib.sha256(json.dumps([__version__, entry], sort_keys=True).encode())
        for header in headers:
            modified = header.path.stat().st_mtime_ns
            digest.update(f"\n{header.path.name} {header.size} {modified} ".encode())
            digest.update(header.raw)
        self.work = digest.hexdigest()
        self.finished: dict[str, str] = {}
        self.resumed = False
        try:
            folder.mkdir(parents=True, exist_ok=True)
            found = [path.name for path in folder.iterdir()]
        except OSError as error:
            raise ConfigError(f"output_dir={str(folder)!r} cannot be used: {error.strerror}") from None
        if FILE in found:
            self._resume()
        elif found:
            raise ConfigError(f"output_dir={str(folder)!r} is not empty: name another, or empty it")
        else:
            self._save()

    def _resume(self) -> None:
        try:
            raw = read_json(self.folder / FILE)
            work, finished = raw["work"], dict(raw["finished"])
        except (ModelError, KeyError, TypeError, ValueError):
            raise ConfigError(f"{self.folder / FILE} is damaged: empty the folder and begin anew") from None
        if work != self.work:
            raise ConfigError(
                f"output_dir={str(self.folder)!r} holds an unfinished run of another recipe, model or "
                "version: name another, or empty it"
            )
        self.resumed = True
        self.finished = {str(name): str(digest) for name, digest in finished.items()}

    def has(self, name: str) -> bool:
        """Whether a file is finished, and still what it was."""
        path = self.folder / name
        return name in self.finished and path.is_file() and file_digest(path) == self.finished[name]

    def finish(self, name: str) -> None:
        """Note a file that has been written."""
        self.finished[name] = file_digest(self.folder / name)
        self._save()

    def end(self) -> None:
        """All is done."""
        (self.folder / FILE).unlink()

    def _save(self) -> None:
        part = self.folder / f"{FILE}.part"
        part.write_text(json.dumps({"work": self.work, "finished": self.finished}, indent=1))
        part.replace(self.folder / FILE)
