"""What a library of grammars must offer. A mask is int32 `[words]`: bit `v % 32` of word `v // 32` (the
lowest bit is 0) says whether token v may come next; bits beyond the vocabulary mean nothing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from octavo.structured_outputs import StructuredOutputsParams


@dataclass(frozen=True)
class Vocabulary:
    """The tokens as grammars see them.

    Attributes:
        tokens: the bytes of each id below the model's vocabulary size (none: never produced by a grammar).
        special_ids: tokens that are no text.
        eos_ids: tokens that end a text.
        encode: a text's tokens.
    """

    tokens: list[bytes]
    special_ids: list[int]
    eos_ids: list[int]
    encode: Callable[[str], list[int]]

    @property
    def num_words(self) -> int:
        """Words of a mask."""
        return -(-len(self.tokens) // 32)


class GrammarState(ABC):
    """How far one text has come in its grammar. One thread at a time."""

    @abstractmethod
    def fill_mask(self, row: np.ndarray) -> None:
        """Write which tokens may come next (contiguous int32 `[words]`).

        Raises:
            RequestError: the grammar is too hard at this point.
        """

    @abstractmethod
    def accept(self, tokens: Sequence[int]) -> int:
        """Go on by these tokens; how many of them, from the first, the grammar allows. The others change
        nothing."""

    @abstractmethod
    def rollback(self, count: int) -> None:
        """Take back the last `count` tokens that were accepted."""

    @property
    @abstractmethod
    def is_terminated(self) -> bool:
        """Whether nothing may follow: the text is complete, or was ended by a token that ends texts."""


class Grammar(ABC):
    """A compiled form, for any number of texts.

    Attributes:
        first_mask: the mask of every text's first token; not to be changed.
    """

    first_mask: np.ndarray

    @abstractmethod
    def new_state(self) -> GrammarState:
        """The beginning of a text. Safe from any thread."""


class Backend(ABC):
    """Compiles forms for one vocabulary. Safe from any thread."""

    @abstractmethod
    def compile(self, params: StructuredOutputsParams) -> Grammar:
        """Compile a form.

        Raises:
            RequestError: it is wrong, not supported, or allows no text; the message says why, in one line.
        """
