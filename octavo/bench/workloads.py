"""Seeded workloads: the same requests for every engine and every run."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from octavo.errors import ConfigError

VOCAB_LOW, VOCAB_HIGH = 1000, 30000  # ids that every vocabulary of practical size has, specials excluded

Bounds = tuple[int, int]


@dataclass
class WorkItem:
    """One request of a workload: token ids or text (or chat messages), and how many tokens to make.

    `after` names the request (by index) whose answer must be complete before this one is sent.
    """

    max_tokens: int
    prompt_token_ids: list[int] = field(default_factory=list)
    text: str | None = None
    messages: list[dict[str, Any]] | None = None
    after: int | None = None

    @property
    def prompt(self) -> str | list[int]:
        """What to send as the prompt of a completion."""
        return self.text if self.text is not None else self.prompt_token_ids


def _ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randint(VOCAB_LOW, VOCAB_HIGH) for _ in range(count)]


def random_requests(count: int, prompt: Bounds, output: Bounds, seed: int = 0) -> list[WorkItem]:
    """Independent prompts of random ids; lengths uniform within the bounds (both included)."""
    rng = random.Random(seed)
    items = []
    for _ in range(count):
        ids = _ids(rng, rng.randint(*prompt))
        items.append(WorkItem(rng.randint(*output), ids))
    return items


def shared_prefix_requests(
    count: int, prefix: int, unique: int, output: int, seed: int = 1
) -> list[WorkItem]:
    """Prompts that share their first `prefix` tokens and have `unique` of their own."""
    rng = random.Random(seed)
    head = _ids(rng, prefix)
    return [WorkItem(output, head + _ids(rng, unique)) for _ in range(count)]


def repetitive_requests(count: int, period: int, prompt: int, output: int, seed: int = 2) -> list[WorkItem]:
    """Prompts that repeat a short unit, where drafts by look-up do well."""
    rng = random.Random(seed)
    items = []
    for _ in range(count):
        unit = _ids(rng, period)
        items.append(WorkItem(output, (unit * (prompt // period + 1))[:prompt]))
    return items


def multi_turn_requests(
    conversations: int, turns: int, first: int, turn: int, output: int, seed: int = 3
) -> list[WorkItem]:
    """Conversations whose next turn repeats all before it (answers stood in for by random ids).

    A turn is sent once the one before it is answered.
    """
    rng = random.Random(seed)
    items: list[WorkItem] = []
    for _ in range(conversations):
        history, before = _ids(rng, first), None
        for _ in range(turns):
            items.append(WorkItem(output, list(history), after=before))
            before = len(items) - 1
            history += _ids(rng, output) + _ids(rng, turn)
    return items


def file_requests(path: str | Path, count: int | None, output: int) -> list[WorkItem]:
    """Requests of a JSONL file: objects with `prompt`, `prompt_token_ids`, `question`, `turns` or `messages`.

    `max_tokens` (or `output_len`) in an object overrides `output`.

    Raises:
        ConfigError: no such file, or a line that is none of these.
    """
    items: list[WorkItem] = []
    try:
        lines = Path(path).read_text().splitlines()
    except OSError as error:
        raise ConfigError(f"workload file {str(path)!r} cannot be read: {error.strerror}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip() or (count is not None and len(items) >= count):
            continue
        try:
            data = json.loads(line)
            limit = int(data.get("max_tokens", data.get("output_len", output)))
            items.append(_from_object(data, limit))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ConfigError(
                f"{path}:{number} is not a request: give a JSON object with prompt, prompt_token_ids, "
                "question, turns or messages"
            ) from None
    if not items:
        raise ConfigError(f"workload file {str(path)!r} holds no requests")
    return items


def _from_object(data: dict[str, Any], limit: int) -> WorkItem:
    if "prompt_token_ids" in data:
        return WorkItem(limit, [int(t) for t in data["prompt_token_ids"]])
    if "messages" in data:
        return WorkItem(limit, messages=list(data["messages"]))
    text = data.get("prompt", data.get("question"))
    if text is None:
        text = data["turns"][0]
    if not isinstance(text, str):
        raise TypeError
    return WorkItem(limit, text=text)
