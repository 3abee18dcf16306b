"""Names of a checkpoint's files: numbered parts, and what lies beside the weights under the same suffix."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from octavo.errors import ModelError

# Mistral's own layout beside Hugging Face's, and LoRA adapters: not weights in our names.
NOT_WEIGHTS = ("consolidated", "adapter_model")
_SHARD = re.compile(r"(?P<stem>.+)-(?P<no>\d{5})-of-(?P<count>\d{5})(?P<suffix>\.\w+)")


def is_shard(name: str) -> bool:
    """Whether a name is of the form `stem-00002-of-00005.suffix`."""
    return _SHARD.fullmatch(name) is not None


def shard_numbers(name: str) -> tuple[str, int, int] | None:
    """Of `stem-00002-of-00005.suffix`: (`stem.suffix`, 2, 5); None for other names."""
    match = _SHARD.fullmatch(name)
    return (match["stem"] + match["suffix"], int(match["no"]), int(match["count"])) if match else None


def shard_name(name: str, no: int) -> str:
    """The name of another part of the same whole."""
    match = _SHARD.fullmatch(name)
    assert match is not None
    return f"{match['stem']}-{no:05d}-of-{match['count']}{match['suffix']}"


def missing_shards(names: Sequence[str]) -> list[str]:
    """Names that those of `names` which are numbered say should be there too (the first few)."""
    have = set(names)
    out: list[str] = []
    for stem, count, suffix in {
        (m["stem"], m["count"], m["suffix"]) for m in map(_SHARD.fullmatch, names) if m
    }:
        for no in range(1, int(count) + 1):
            other = f"{stem}-{no:05d}-of-{count}{suffix}"
            if other not in have:
                out.append(other)
                if len(out) == 8:  # enough to tell
                    return out
    return sorted(out)


def check_shards(files: Sequence[Path]) -> None:
    """Refuse files of one folder that are numbered and not all there.

    Raises:
        ModelError: names the first that is missing.
    """
    lacking = missing_shards([path.name for path in files])
    if lacking:
        raise ModelError(
            f"{files[0].with_name(lacking[0])}: missing, though a file beside it counts it: fetch the "
            "model's other files"
        )
