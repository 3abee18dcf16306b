"""Models on the Hugging Face hub: found in its cache, or fetched into it with huggingface_hub.

The cache is the hub's own (https://huggingface.co/docs/huggingface_hub/guides/manage-cache), so that
what other programs fetched is found and what is fetched here is theirs too: `models--org--name` with
`refs/<branch or tag>` (a file that holds a commit), `snapshots/<commit>/` (links by the files' names)
and `blobs/`. A snapshot whose wanted files are all there is used without asking anybody if the
revision is a commit, if `HF_HUB_OFFLINE` is set, or if the hub cannot be reached.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import logging
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.errors import ModelError, first_line
from octavo.models.hub_files import is_complete, wanted_files

logger = logging.getLogger(__name__)

_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHORT_COMMIT = re.compile(r"[0-9a-f]{7,39}")
_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,94}[A-Za-z0-9_])?"
_ID = re.compile(rf"(?P<repo>{_PART}(?:/{_PART})?)(?::(?P<tag>[A-Za-z0-9_.-]+))?")
_ID_AND_FILE = re.compile(rf"(?P<repo>{_PART}/{_PART})/(?P<file>(?:[^/\\]+/)*[^/\\]+\.gguf)", re.IGNORECASE)


@dataclass(frozen=True)
class HubName:
    """What a user named on the hub.

    Attributes:
        repo: `org/name`, or the one name of the hub's oldest models.
        tag: an encoding of GGUF files (`Q4_K_M` of `org/name:Q4_K_M`), or None.
        file: a GGUF file of the repository by its path there, or None.
    """

    repo: str
    tag: str | None = None
    file: str | None = None


@dataclass(frozen=True)
class Snapshot:
    """A commit's files in the cache: the folder that holds them, and the commit's 40 digits."""

    folder: Path
    commit: str


def parse_hub_name(name: str) -> HubName | None:
    """`org/name`, `org/name:Q4_K_M` or `org/name/file.gguf`; None for what cannot be on the hub."""
    if ".." in name or "--" in name.partition(":")[0] or name.startswith((".", "/", "~")):
        return None
    if match := _ID_AND_FILE.fullmatch(name):
        return HubName(match["repo"], file=match["file"])
    match = _ID.fullmatch(name)
    if match is None or (match["tag"] is None and match["repo"].lower().endswith((".gguf", ".safetensors"))):
        return None
    return HubName(match["repo"], tag=match["tag"])


def cache_root(download_dir: str | None) -> Path:
    """The folder of the cache: `download_dir`, else huggingface_hub's (HF_HUB_CACHE, HF_HOME)."""
    if download_dir is not None:
        return Path(download_dir).expanduser()
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def cached_snapshot(repo: str, revision: str, cache: Path) -> Snapshot | None:
    """The snapshot of a branch, tag or commit (whole, or 7 or more digits) in the cache, if it is there.

    Its files may be incomplete.
    """
    folder = cache / ("models--" + repo.replace("/", "--"))
    commit = revision
    with contextlib.suppress(OSError, ValueError):
        commit = (folder / "refs" / revision).read_text(encoding="ascii").strip()
    if not _COMMIT.fullmatch(commit):
        if not _SHORT_COMMIT.fullmatch(commit):
            return None
        found = list((folder / "snapshots").glob(commit + "*"))
        if len(found) != 1 or not _COMMIT.fullmatch(found[0].name):
            return None
        commit = found[0].name
    snapshot = folder / "snapshots" / commit
    return Snapshot(snapshot, commit) if snapshot.is_dir() else None


def repository_of(folder: Path) -> Path | None:
    """The cache's folder of a repository, `models--org--name`, if `folder` is one of its snapshots."""
    resolved = folder.resolve()
    root = resolved.parent.parent
    is_snapshot = resolved.parent.name == "snapshots" and root.name.startswith("models--")
    return root if is_snapshot and _COMMIT.fullmatch(resolved.name) else None


def fetch(
    name: HubName,
    *,
    revision: str | None = None,
    download_dir: str | None = None,
    token: str | None = None,
    load_format: str = "auto",
    weights: bool = True,
) -> Snapshot:
    """The snapshot of a model on the hub, fetched as far as it is not in the cache.

    Of a repository come its configuration, its tokenizer and one form of its weights (safetensors;
    PyTorch's own only where there are none; one GGUF model of a repository that holds nothing else).

    Args:
        revision: branch, tag or commit; None is `main`.
        download_dir: a cache folder instead of the hub's own.
        token: of the hub; None takes HF_TOKEN or the stored login.
        load_format: the setting; "dummy" needs no weights.
        weights: False fetches the tokenizer alone.

    Raises:
        ModelError: not there, not allowed, not reachable and not in the cache, ambiguous, or no space.
    """
    from huggingface_hub import constants

    asked = revision or constants.DEFAULT_REVISION
    if ".." in asked:
        raise ModelError(f"revision {asked!r} is not a branch, tag or commit: give one of {name.repo!r}")
    cache = cache_root(download_dir)
    found = cached_snapshot(name.repo, asked, cache)
    complete = found is not None and is_complete(found.folder, name.tag, name.file, load_format, weights)
    if found is not None and complete and (_COMMIT.fullmatch(asked) or constants.HF_HUB_OFFLINE):
        return found
    if constants.HF_HUB_OFFLINE:
        what = "incomplete" if found else "not there"
        raise ModelError(
            f"model {name.repo!r} at revision {asked!r} is {what} in {cache}, and HF_HUB_OFFLINE forbids "
            "fetching it: unset that, or give a folder"
        )
    try:
        return _download(name, asked, cache, token, load_format, weights)
    except _Unreachable as error:
        if found is None or not complete:
            raise ModelError(
                f"model {name.repo!r} at revision {asked!r} is no folder here, is "
                f"{'incomplete' if found else 'not'} in {cache}, and {error}: check the name and the "
                "network, or fetch it elsewhere and give its folder"
            ) from None
        logger.warning("%s at revision %s: taken from the cache, for %s", name.repo, asked, error)
        return found


class _Unreachable(Exception):
    """The hub gave no answer."""


def _download(
    name: HubName, revision: str, cache: Path, token: str | None, load_format: str, weights: bool
) -> Snapshot:
    from huggingface_hub import snapshot_download

    sizes, commit = _listing(name.repo, revision, token)
    files = wanted_files(list(sizes), name.tag, name.file, load_format, weights, name.repo)
    there = cached_snapshot(name.repo, commit, cache)
    lacking = [f for f in files if there is None or not (there.folder / f).is_file()]
    if not lacking and there is not None and cached_snapshot(name.repo, revision, cache) == there:
        return there
    need, free = sum(sizes[f] for f in lacking), _free_space(cache)
    if need > free:
        raise ModelError(
            f"model {name.repo!r} needs {need} bytes in {cache} and {free} are free: make room, or name "
            "another folder with --download-dir"
        )
    with _one_line(name.repo, revision), _quiet_unless_terminal():
        folder = snapshot_download(
            name.repo,
            revision=revision,  # not the commit, so that the cache learns where the branch points
            cache_dir=cache,
            token=token,
            allow_patterns=[glob.escape(file) for file in files],
        )
    return Snapshot(Path(folder), Path(folder).name)


def _listing(repo: str, revision: str, token: str | None) -> tuple[dict[str, int], str]:
    """Bytes of each file of a repository by name, and the commit that a revision stands for."""
    from huggingface_hub import HfApi, constants

    with _one_line(repo, revision):
        info = HfApi(token=token).model_info(
            repo, revision=revision, timeout=constants.HF_HUB_ETAG_TIMEOUT, files_metadata=True
        )
    if not info.sha or not _COMMIT.fullmatch(info.sha):
        raise ModelError(f"the hub named no commit for {repo!r} at revision {revision!r}: try again")
    return {file.rfilename: file.size or 0 for file in info.siblings or ()}, info.sha


def list_files(repo: str, revision: str | None, token: str | None) -> tuple[dict[str, int], str]:
    """Bytes of each file of a repository by name, and the commit that a revision (None: `main`) stands for.

    Raises:
        ModelError: not there, not allowed or not reachable.
    """
    asked = revision or "main"
    try:
        return _listing(repo, asked, token)
    except _Unreachable as error:
        raise _not_here(repo, asked, error) from None


def read_beginning(repo: str, commit: str, file: str, size: int, token: str | None) -> bytes:
    """The first `size` bytes of a repository's file; nothing is kept.

    Raises:
        ModelError: not there, not allowed or not reachable.
    """
    import httpx
    from huggingface_hub import constants, hf_hub_url
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

    headers = {**build_hf_headers(token=token), "Range": f"bytes=0-{max(0, size - 1)}"}
    headers["Accept-Encoding"] = "identity"
    url = hf_hub_url(repo, file, revision=commit)
    out = bytearray()
    try:
        with _one_line(repo, commit):
            seconds = constants.HF_HUB_DOWNLOAD_TIMEOUT
            with httpx.stream(
                "GET", url, headers=headers, follow_redirects=True, timeout=seconds
            ) as response:
                hf_raise_for_status(response)
                for chunk in response.iter_bytes():
                    out += chunk
                    if len(out) >= size:  # a server may send more than was asked for
                        break
    except _Unreachable as error:
        raise _not_here(repo, commit, error) from None
    return bytes(out[:size])


def _not_here(repo: str, revision: str, error: _Unreachable) -> ModelError:
    return ModelError(
        f"model {repo!r} at revision {revision!r} is no folder here, is not in the cache, and {error}: check "
        "the name and the network, or give a folder"
    )


def _free_space(folder: Path) -> int:
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free


@contextlib.contextmanager
def _quiet_unless_terminal() -> Iterator[None]:
    """Bars of huggingface_hub on a terminal only, as ours."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if sys.stderr.isatty() or are_progress_bars_disabled() or "HF_HUB_DISABLE_PROGRESS_BARS" in os.environ:
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


@contextlib.contextmanager
def _one_line(repo: str, revision: str) -> Iterator[None]:
    """Turn what huggingface_hub and the network under it raise into one line with the remedy."""
    import httpx
    from huggingface_hub import constants, errors

    told: list[tuple[type[Exception], Callable[[Any], str]]] = [
        (
            errors.GatedRepoError,
            lambda e: (
                f"model {repo!r} is gated: accept its terms at {constants.ENDPOINT}/{repo}, and set "
                "HF_TOKEN to a token of that account"
            ),
        ),
        (
            errors.RepositoryNotFoundError,
            lambda e: (
                f"model {repo!r} is neither a folder here nor a model that the hub shows you: check the "
                "name, or set HF_TOKEN if it is private"
            ),
        ),
        (
            errors.RevisionNotFoundError,
            lambda e: f"model {repo!r} has no revision {revision!r}: give a branch, tag or commit of it",
        ),
        (errors.HFValidationError, lambda e: f"model {repo!r} is not a hub id: give org/name, or a folder"),
        (errors.HfHubHTTPError, lambda e: _refusal(repo, revision, e.response.status_code)),
        (
            errors.XetDownloadError,
            lambda e: f"model {repo!r} could not be fetched ({first_line(e)}): try again",
        ),
    ]
    try:
        yield
    except (errors.OfflineModeIsEnabled, httpx.TransportError) as error:
        raise _Unreachable(f"{constants.ENDPOINT} does not answer ({first_line(error)})") from None
    except tuple(kind for kind, _ in told) as error:
        status = getattr(getattr(error, "response", None), "status_code", 0)
        if status >= 500:
            raise _Unreachable(f"{constants.ENDPOINT} answers with status {status}") from None
        raise ModelError(next(tell(error) for kind, tell in told if isinstance(error, kind))) from None
    except errors.LocalEntryNotFoundError as error:
        raise _Unreachable(f"{constants.ENDPOINT} stopped answering ({first_line(error)})") from None
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise ModelError(
                f"no space left for model {repo!r}: make room, or name another folder with --download-dir"
            ) from None
        raise ModelError(
            f"model {repo!r} could not be fetched ({first_line(error)}): check the cache folder and the "
            "network"
        ) from None


def _refusal(repo: str, revision: str, status: int) -> str:
    if status in (401, 403):
        return (
            f"the hub refuses model {repo!r} at revision {revision!r} (status {status}): check that HF_TOKEN "
            "is valid and may read it"
        )
    return f"the hub answers with status {status} to model {repo!r} at revision {revision!r}: try again later"
