"""Splits what a model thinks from what it answers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from octavo.server.tools.json_reader import SPACES
from octavo.server.tools.parser import partial_suffix


class Thinking(Enum):
    """What the prompt says of an answer's beginning."""

    OPEN = 0
    """It is reasoning, with or without the mark that begins it."""
    MAYBE = 1
    """It is reasoning if the mark begins it."""
    OVER = 2
    """It is no reasoning."""


@dataclass(frozen=True)
class ReasoningFormat:
    """How a family of models marks its reasoning.

    Attributes:
        start, end: the marks.
        default: where the prompt ends in neither.
    """

    start: str
    end: str
    default: Thinking

    def thinking(self, prompt_end: str) -> Thinking:
        """How an answer begins.

        Args:
            prompt_end: the prompt's last characters, special tokens included.
        """
        tail = prompt_end.rstrip(SPACES)
        if tail.endswith(self.start):
            return Thinking.OPEN
        return Thinking.OVER if tail.endswith(self.end) else self.default

    def continued(self, message: str) -> Thinking:
        """The same where the answer goes on with a message."""
        if self.end in message:
            return Thinking.OVER
        return Thinking.OPEN if self.start in message else Thinking.OVER


REASONING_FORMATS = {
    "deepseek_r1": ReasoningFormat("<think>", "</think>", Thinking.OPEN),
    "qwen3": ReasoningFormat("<think>", "</think>", Thinking.MAYBE),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]", Thinking.MAYBE),
}
"""By the names that `--reasoning-parser` takes, which are vLLM's."""


class ReasoningParser:
    """Splits one answer that comes in pieces. However it is cut, the sums are the same: reasoning and
    answer without the marks and the white space beside them."""

    def __init__(self, form: ReasoningFormat, thinking: Thinking):
        self._form = form
        self._thinking = thinking
        self._buffer = ""
        self._begun = thinking == Thinking.OVER  # whether the beginning has been looked at
        self._trim = False  # white space is dropped until something else comes

    def feed(self, text: str) -> tuple[str, str]:
        """Read on; what is new of reasoning and of the answer."""
        self._buffer += text
        if not self._begun and not self._read_start():
            return "", ""
        reasoning = self._read_reasoning() if self._thinking == Thinking.OPEN else ""
        return reasoning, self._take_all() if self._thinking == Thinking.OVER else ""

    def finish(self) -> tuple[str, str]:
        """No text follows: what was held back."""
        if not self._begun and self._thinking == Thinking.MAYBE:
            self._thinking = Thinking.OVER
        rest = self._take_all()
        return (rest.rstrip(SPACES), "") if self._thinking == Thinking.OPEN else ("", rest)

    def _read_start(self) -> bool:
        start = self._form.start
        rest = self._buffer.lstrip(SPACES)
        if rest.startswith(start):
            self._buffer = rest[len(start) :]
            self._thinking = Thinking.OPEN
        elif start.startswith(rest):
            return False
        elif self._thinking == Thinking.MAYBE:
            self._thinking = Thinking.OVER
        self._begun = True
        self._trim = self._thinking == Thinking.OPEN
        return True

    def _read_reasoning(self) -> str:
        place = self._buffer.find(self._form.end)
        if place >= 0:
            rest = self._buffer[place + len(self._form.end) :]
            self._buffer = self._buffer[:place]
            told = self._take_all().rstrip(SPACES)
            self._buffer, self._thinking, self._trim = rest, Thinking.OVER, True
            return told
        if self._trim:
            self._buffer = self._buffer.lstrip(SPACES)
        keep = len(self._buffer) - partial_suffix(self._buffer, self._form.end)
        told = self._buffer[:keep].rstrip(SPACES)
        self._buffer = self._buffer[len(told) :]
        self._trim = self._trim and not told
        return told

    def _take_all(self) -> str:
        text, self._buffer = self._buffer, ""
        if self._trim:
            text = text.lstrip(SPACES)
            self._trim = not text
        return text
