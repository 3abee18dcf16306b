"""The valid word that a user most likely meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def hint(given: object, known: Iterable[str]) -> str:
    """What to say after an unknown word: the nearest known one, or all of them."""
    words = list(known)
    folded = {word.lower(): word for word in words}
    near = difflib.get_close_matches(str(given).lower(), folded, 1, 0.5)
    return f"did you mean {folded[near[0]]}?" if near else f"choose {', '.join(words)}"
