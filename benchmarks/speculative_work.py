"""Texts for benchmarks/speculative.py: work that repeats itself, and text that doesn't, by seed."""

from __future__ import annotations

import random

from octavo.bench.words import WordText

_NOUNS = "order invoice customer parcel ticket sensor account meeting package device report session".split()
_FIELDS = "name price owner status weight colour city email phone score level region".split()
_NAMES = "Ada Grace Alan Edsger Barbara Donald Niklaus Frances Tony Radia Leslie Shafi".split()
_PLACES = "Lisbon Oslo Vienna Quito Hanoi Accra Lima Perth Turin Osaka Delhi Tunis".split()


def code_edit(seed: int) -> str:
    """A class that is to be written again with one change; its first lines are there."""
    rng = random.Random(seed)
    noun, fields = rng.choice(_NOUNS), rng.sample(_FIELDS, 6)
    lines = [f"class {noun.title()}{rng.randrange(100)}:", "    def __init__(self, record):"]
    lines += [f"        self.{field} = record['{noun}_{field}']" for field in fields]
    for field in fields:
        lines += [
            "", f"    def get_{field}(self):", f"        if self.{field} is None:",
            f"            raise ValueError('{noun} {rng.randrange(1000)} has no {field}')",
            f"        return self.{field}",
        ]  # fmt: skip
    code = "\n".join(lines)
    begin = "\n".join(lines[:2])
    return (
        f"Here is a Python class.\n\n```python\n{code}\n```\n\n"
        f"The same class, with a docstring:\n\n```python\n{begin}\n"
    )


def extraction(seed: int) -> str:
    """Records in prose, of which the first few have been written as JSON."""
    rng = random.Random(seed)
    rows = [
        (
            f"{rng.choice(_NAMES)} {rng.choice('ABCDEFGH')}. {rng.choice(_NAMES)}son",
            rng.choice(_PLACES), rng.choice(_NOUNS), rng.randrange(100, 100000), rng.randrange(1, 90),
        )
        for _ in range(10)
    ]  # fmt: skip
    prose = "\n".join(
        f"{name} of {place} ordered {count} pieces of the {noun} number {number}."
        for name, place, noun, number, count in rows
    )
    done = "\n".join(
        f'{{"name": "{name}", "city": "{place}", "item": "{noun}", "number": {number}, "count": {count}}}'
        for name, place, noun, number, count in rows[:3]
    )
    return f"{prose}\n\nAs JSON, one line each:\n{done}\n"


def conversation(seed: int) -> str:
    """Turns in which a list is told again with one change each time."""
    rng = random.Random(seed)
    items = [f"{rng.choice(_FIELDS)} of the {rng.choice(_NOUNS)} in {rng.choice(_PLACES)}" for _ in range(8)]
    turns = ["User: Here is my list.\n" + _numbered(items)]
    for _ in range(2):
        place, noun = rng.randrange(len(items)), rng.choice(_NOUNS)
        items[place] = f"the {noun} number {rng.randrange(1000)}"
        turns.append(f"User: Make item {place + 1} {items[place]!r}, and tell me the whole list.")
        turns.append("Assistant: Here is the list:\n" + _numbered(items))
    turns.append("User: Tell me the whole list again.\nAssistant: Here is the list:\n1.")
    return "\n".join(turns)


def _numbered(items: list[str]) -> str:
    return "\n".join(f"{i + 1}. {item}" for i, item in enumerate(items))


def random_words(seed: int) -> str:
    """Words in no order."""
    rng = random.Random(seed)
    return WordText()(rng.randrange(10000) for _ in range(100))


WORKS = {"code edit": code_edit, "extraction": extraction, "conversation": conversation}
