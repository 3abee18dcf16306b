"""SentencePiece's compiled character normalization, checked before the `tokenizers` library walks it.

Format: 4 bytes with the size of a double-array trie (darts-clone), the trie (units of 4 bytes,
little-endian), then replacement texts, each ended by a zero byte. The library indexes the trie without
looking; a corrupt one would end the process's thread in the middle of a request.
"""

from __future__ import annotations

import numpy as np

from octavo.errors import ModelError

_BYTES = np.arange(1, 256, dtype=np.int64)


def check_charsmap(data: bytes, where: object) -> None:
    """Check that every walk from the root stays inside, and ends at the start of a text.

    Raises:
        ModelError: it does not.
    """
    problem = _problem(data)
    if problem:
        raise ModelError(
            f"{where}: corrupt tokenizer (its character map is broken: {problem}): fetch it again or name "
            "another one with --tokenizer"
        )


def _problem(data: bytes) -> str | None:
    if len(data) < 8:
        return f"{len(data)} bytes"
    size = int.from_bytes(data[:4], "little")
    if size % 4 or not 4 <= size <= len(data) - 4:
        return f"a trie of {size} bytes in {len(data)}"
    texts = data[4 + size :]
    try:
        texts.decode()
    except UnicodeDecodeError:
        return "its texts are not UTF-8"
    if texts and texts[-1]:
        return "its last text has no end"
    units = np.frombuffer(data, dtype="<u4", count=size // 4, offset=4).astype(np.int64)
    steps = (units >> 10) << ((units & (1 << 9)) >> 6)
    seen = np.zeros(len(units), dtype=bool)
    bases = np.array([steps[0]], dtype=np.int64)
    while len(bases):
        bases = np.unique(bases)
        if (bases | 0xFF).max() >= len(units):
            return "a step leads outside its trie"
        bases = bases[~seen[bases]]
        seen[bases] = True
        following: list[np.ndarray] = []
        for chunk in np.array_split(bases, len(bases) // 4096 + 1):  # bounded memory
            children = (chunk[:, None] ^ _BYTES).ravel()
            labels = np.tile(_BYTES, len(chunk))
            units_here = units[children]
            at = children[(units_here & ((1 << 31) | 0xFF)) == labels]
            following.append(at ^ steps[at])
            leaves = following[-1][(units[at] >> 8) & 1 == 1]
            if len(leaves) and leaves.max() >= len(units):
                return "a step leads outside its trie"
            values = units[leaves] & ((1 << 31) - 1)
            if any(value >= len(texts) or texts[value] & 0xC0 == 0x80 for value in values.tolist()):
                return "it names a text that does not exist"
        bases = np.concatenate(following) if following else np.array([], dtype=np.int64)
    return None
