"""What a parser of tool calls is: text in as it comes, plain text and calls out."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass, field

from octavo.server.tools.json_reader import SPACES
from octavo.server.tools.shape import CallShape, SpecialId


@dataclass(frozen=True)
class CallDelta:
    """What is new of one call. `id` and `name` come once, with its first delta; `arguments` is JSON text,
    to be joined."""

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None


@dataclass
class ToolDelta:
    """What some text added: plain text, and calls in their order."""

    content: str = ""
    calls: list[CallDelta] = field(default_factory=list)


class ToolParser(ABC):
    """Finds the calls in one answer. However the text is cut into pieces, the sum of what `feed` and `finish`
    return is the same; what is no call is content, whole and in its place. White space beside calls is
    dropped, but for what stands between two texts.

    Attributes:
        cut: at the end, whether the last call that was told is not complete.

    Without `guaranteed` a call is told once its JSON is complete, so that no client ever gets a beginning
    of something that then turns out to be none; with it, as it comes.

    Args:
        names: the tools that the request offers.
        guaranteed: a grammar makes sure that calls are well formed.
    """

    @classmethod
    def shape(cls, special_id: SpecialId) -> CallShape | None:
        """How calls are written, for grammars; None where their arguments are not JSON."""
        return None

    markers: tuple[str, ...] = ()
    """Texts of the format that may be special tokens, which then must not be left out of the text."""

    def __init__(self, names: Collection[str], guaranteed: bool = False):
        self._names = frozenset(names)
        self._guaranteed = guaranteed
        self.cut = False
        self._delta = ToolDelta()
        self._count = 0
        self._ids: set[str] = set()
        self._spaces = ""
        self._shown = False
        self._after_call = False

    def feed(self, text: str) -> ToolDelta:
        """Read on; what can be told now."""
        self._read(text)
        return self._take()

    def finish(self) -> ToolDelta:
        """No text follows: what was held back. A call that is not complete is content, unless it is being
        told already."""
        self._end()
        if not self._after_call:
            self._delta.content += self._spaces
        return self._take()

    @property
    def num_calls(self) -> int:
        """Calls that were told."""
        return self._count

    @abstractmethod
    def _read(self, text: str) -> None: ...

    @abstractmethod
    def _end(self) -> None: ...

    def _take(self) -> ToolDelta:
        delta, self._delta = self._delta, ToolDelta()
        return delta

    def _content(self, text: str) -> None:
        """Tell text that belongs to no call."""
        if self._after_call:
            text = text.lstrip(SPACES)
            if not text:
                return
            self._after_call = False
        whole = self._spaces + text
        shown = whole.rstrip(SPACES)
        self._spaces = whole[len(shown) :]
        self._shown = self._shown or bool(shown)
        self._delta.content += shown

    def _begin_call(self, name: str, call_id: str | None = None) -> None:
        """Tell a new call; `_arguments` goes on with it."""
        self._spaces, self._after_call = self._spaces if self._shown else "", True
        if not call_id or call_id in self._ids:
            call_id = self._new_id()
        self._ids.add(call_id)
        self._delta.calls.append(CallDelta(self._count, "", call_id, name))
        self._count += 1

    def _arguments(self, text: str) -> None:
        """Go on with the last call's arguments."""
        calls = self._delta.calls
        if calls and calls[-1].index == self._count - 1:
            last = calls.pop()
            calls.append(CallDelta(last.index, last.arguments + text, last.id, last.name))
        elif text:
            calls.append(CallDelta(self._count - 1, text))

    def _new_id(self) -> str:
        return f"call_{random.getrandbits(96):024x}"


def partial_suffix(text: str, marker: str) -> int:
    """Characters at the end of `text` that could begin `marker`, which is not in it."""
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if marker.startswith(text[-length:]):
            return length
    return 0
