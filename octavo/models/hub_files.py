"""Which files of a hub repository make one model: by their names alone, the same listed or cached."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from octavo.errors import ModelError
from octavo.models.safetensors_file import indexed_names
from octavo.models.shards import NOT_WEIGHTS, is_shard, missing_shards, shard_numbers

# Beside the weights: configuration, tokenizers of every kind, chat templates, pooling of embedding models.
_COMPANION = re.compile(
    r"[^/]+\.(json|model|txt|tiktoken|jinja)|(additional_chat_templates/[^/]+\.jinja)|\d_\w+/config\.json"
)
_TOKENIZER_ONLY = re.compile(r"(?!.*\.index\.json$).+")


def wanted_files(
    names: Sequence[str],
    tag: str | None,
    file: str | None,
    load_format: str,
    weights: bool,
    repo: str,
) -> list[str]:
    """Of a repository's files those to fetch.

    Raises:
        ModelError: no weights of that form, or several GGUF models to choose from.
    """
    companions = [n for n in names if _COMPANION.fullmatch(n)]
    ggufs = [n for n in names if n.lower().endswith(".gguf") and ".." not in n.split("/")]
    named = tag is not None or file is not None
    if not named and "config.json" not in names and not ggufs:
        raise ModelError(f"repository {repo!r} holds no model that can be run: it has no config.json")
    if named or load_format == "gguf" or "config.json" not in names or not _folder_weights(names, "auto"):
        if ggufs or named or load_format == "gguf":
            return _gguf(ggufs, tag, file, repo)
    if not weights or load_format == "dummy":
        return [n for n in companions if _TOKENIZER_ONLY.fullmatch(n)]
    found = _folder_weights(names, load_format)
    if not found:
        what = {"safetensors": "safetensors", "pt": "pytorch_model*.bin"}.get(
            load_format, "safetensors or .bin"
        )
        raise ModelError(f"repository {repo!r} holds no {what} files: name another one, or --load-format")
    suffix = ".bin" if found[0].endswith(".bin") else ".safetensors"
    other = ".bin.index.json" if suffix == ".safetensors" else ".safetensors.index.json"
    return [n for n in companions if not n.endswith(other)] + found


def _folder_weights(names: Sequence[str], load_format: str) -> list[str]:
    top = [n for n in names if "/" not in n]
    tensors = [n for n in top if n.endswith(".safetensors") and not n.startswith(NOT_WEIGHTS)]
    bins = [n for n in top if n.startswith("pytorch_model") and n.endswith(".bin")]
    if load_format != "pt" and tensors:
        if "model.safetensors.index.json" in top:
            sharded = [n for n in tensors if is_shard(n)]
            return sharded or tensors
        return ["model.safetensors"] if "model.safetensors" in tensors else tensors
    return bins if load_format in ("auto", "pt") else []


def _gguf(ggufs: Sequence[str], tag: str | None, file: str | None, repo: str) -> list[str]:
    chosen = [ggufs[i] for i in choose_gguf(ggufs, tag, file, f"repository {repo!r}", repo)]
    lacking = missing_shards(chosen)
    if lacking:
        raise ModelError(f"repository {repo!r} lacks {lacking[0]}, a part of the model: name another one")
    return chosen


def choose_gguf(
    ggufs: Sequence[str], tag: str | None, file: str | None, where: str, called: str | None = None
) -> list[int]:
    """Indexes of the one GGUF model meant among files: one file, or all parts of a split one, in order.

    Args:
        ggufs: paths in the repository or folder.
        tag: an encoding's name to look for among the words of a path, whatever its case.
        file: one of the files (of a split model any part).
        where: what holds them, for messages.
        called: what stands before `:TAG` and `/FILE` in what the user may write; None: a folder here.

    Raises:
        ModelError: none, or several.
    """
    if file is not None:
        if file not in ggufs:
            raise ModelError(f"{where} holds no file {file!r}: it has {_some(ggufs)}")
        group = _group_of(file)
        return _ordered(ggufs, [i for i, n in enumerate(ggufs) if _group_of(n) == group])
    groups: dict[str, list[int]] = {}
    for i, name in enumerate(ggufs):
        # The image half of a multimodal model, and importance matrices: not a language model.
        if not name.rpartition("/")[2].lower().startswith(("mmproj", "imatrix")):
            groups.setdefault(_group_of(name), []).append(i)
    if tag is not None:
        word = re.compile(rf"(^|[-._/]){re.escape(tag)}([-./]| in \d|$)", re.IGNORECASE)
        groups = {g: members for g, members in groups.items() if word.search(g)}
    if len(groups) == 1:
        return _ordered(ggufs, next(iter(groups.values())))
    if not groups:
        of = f" of {tag}" if tag else ""
        raise ModelError(f"{where} holds no GGUF file{of}: it has {_some(ggufs)}")
    how = f", as {called}:Q4_K_M or {called}/FILE.gguf" if called else " of them"
    raise ModelError(f"{where} holds {len(groups)} GGUF models ({_some(sorted(groups))}): name one{how}")


def _group_of(name: str) -> str:
    shard = shard_numbers(name)
    return f"{shard[0]} in {shard[2]} parts" if shard else name


def _ordered(ggufs: Sequence[str], indexes: list[int]) -> list[int]:
    return sorted(indexes, key=lambda i: ggufs[i])


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:4])
    return f"{shown}, …" if len(names) > 4 else shown or "none"


def gguf_in(folder: Path, tag: str | None, file: str | None, load_format: str) -> Path | None:
    """The GGUF file (of a split model the first part) that a snapshot stands for, or None if it stands
    for a checkpoint folder.

    Raises:
        ModelError: as `wanted_files`.
    """
    first = wanted_files(_names(folder), tag, file, load_format, False, folder.name)[0]
    return folder / first if first.lower().endswith(".gguf") else None


def _names(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def is_complete(folder: Path, tag: str | None, file: str | None, load_format: str, weights: bool) -> bool:
    """Whether a cached snapshot holds all that `wanted_files` would ask for, as far as its files tell."""
    try:
        files = wanted_files(_names(folder), tag, file, load_format, weights, folder.name)
    except ModelError:
        return False
    if missing_shards(files):
        return False
    index = next((n for n in files if n.endswith((".safetensors.index.json", ".bin.index.json"))), None)
    if index is None:
        return True
    try:
        return all((folder / name).is_file() for name in indexed_names(folder / index))
    except ModelError:
        return False
