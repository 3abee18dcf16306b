"""Seeded workloads: the same requests for every engine and every run."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from octavo.bench.bounds import at_least
from octavo.errors import ConfigError

VOCAB_LOW, VOCAB_HIGH = 1000, 30000  # ids that every vocabulary of practical size has, specials excluded

Bounds = tuple[int, int]
VOCAB: Bounds = (VOCAB_LOW, VOCAB_HIGH)

_SEEDS = {"random": 0, "shared-prefix": 1, "repetitive": 2, "multi-turn": 3, "custom": 0}
"""Seed 0 of a workload makes the requests of its function's default seed."""

_WARMUP_SEED = 1_000_003
_WARMUP_OUTPUT = 8  # tokens

KINDS = ("random", "shared-prefix", "repetitive", "multi-turn", "custom")
"""Workloads by name; custom is a file."""


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


def vocab_bounds(vocab_size: int) -> Bounds:
    """Bounds of random ids for a vocabulary: the usual ones, or its upper three quarters if it is smaller."""
    if vocab_size > VOCAB_HIGH:
        return VOCAB
    return vocab_size // 4, vocab_size - 1


def _ids(rng: random.Random, count: int, vocab: Bounds) -> list[int]:
    return [rng.randint(*vocab) for _ in range(count)]


def random_requests(
    count: int, prompt: Bounds, output: Bounds, seed: int = 0, vocab: Bounds = VOCAB
) -> list[WorkItem]:
    """Independent prompts of random ids; lengths uniform within the bounds (both included)."""
    rng = random.Random(seed)
    items = []
    for _ in range(count):
        ids = _ids(rng, rng.randint(*prompt), vocab)
        items.append(WorkItem(rng.randint(*output), ids))
    return items


def shared_prefix_requests(
    count: int, prefix: int, unique: int, output: int, seed: int = 1, vocab: Bounds = VOCAB
) -> list[WorkItem]:
    """Prompts that share their first `prefix` tokens and have `unique` of their own."""
    rng = random.Random(seed)
    head = _ids(rng, prefix, vocab)
    return [WorkItem(output, head + _ids(rng, unique, vocab)) for _ in range(count)]


def repetitive_requests(
    count: int, period: int, prompt: int, output: int, seed: int = 2, vocab: Bounds = VOCAB
) -> list[WorkItem]:
    """Prompts that repeat a short unit, where drafts by look-up do well."""
    rng = random.Random(seed)
    items = []
    for _ in range(count):
        unit = _ids(rng, period, vocab)
        items.append(WorkItem(output, (unit * (prompt // period + 1))[:prompt]))
    return items


def multi_turn_requests(
    conversations: int,
    turns: int,
    first: int,
    turn: int,
    output: int,
    seed: int = 3,
    vocab: Bounds = VOCAB,
) -> list[WorkItem]:
    """Conversations whose next turn repeats all before it (answers stood in for by random ids).

    A turn is sent once the one before it is answered.
    """
    rng = random.Random(seed)
    items: list[WorkItem] = []
    for _ in range(conversations):
        history, before = _ids(rng, first, vocab), None
        for _ in range(turns):
            items.append(WorkItem(output, list(history), after=before))
            before = len(items) - 1
            history += _ids(rng, output, vocab) + _ids(rng, turn, vocab)
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


def rounds(items: list[WorkItem]) -> list[list[int]]:
    """Indices of requests that may run together: each round needs only answers of the rounds before it."""
    depth: list[int] = []
    for item in items:
        depth.append(0 if item.after is None else depth[item.after] + 1)
    return [[i for i, d in enumerate(depth) if d == level] for level in range(max(depth, default=-1) + 1)]


@dataclass(frozen=True)
class WorkloadSpec:
    """A workload by its figures; the same figures make the same requests.

    Attributes:
        kind: one of `KINDS`.
        num_prompts: requests in all; None: 64, or all of a file.
        input_len: tokens of a prompt; of its own part under shared-prefix, of the first turn under
            multi-turn.
        output_len: tokens to make; of a file, where a line doesn't say.
        range_ratio: random lengths are uniform within (1 ± ratio) times these.
        input_range, output_range: fewest and most tokens of random lengths, in the place of length and ratio.
        prefix_len: tokens that all prompts share (shared-prefix).
        period: tokens of the unit that is repeated (repetitive).
        turns, turn_len: requests of a conversation, and new tokens of each after the first (multi-turn).
        path: the file (custom).
        seed: of lengths and ids.

    Raises:
        ConfigError: a figure that makes no workload.
    """

    kind: str = "random"
    num_prompts: int | None = None
    input_len: int = 256
    output_len: int = 64
    range_ratio: float = 0.0
    input_range: Bounds | None = None
    output_range: Bounds | None = None
    prefix_len: int = 512
    period: int = 16
    turns: int = 4
    turn_len: int = 32
    path: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"dataset_name={self.kind!r} is not known: choose {', '.join(KINDS)}")
        if (self.kind == "custom") != (self.path is not None):
            raise ConfigError("dataset_name=custom and dataset_path=FILE go together: give both or neither")
        at_least(self, input_len=1, output_len=1, prefix_len=1, period=1, turns=1, turn_len=1, num_prompts=1)
        if not 0.0 <= self.range_ratio < 1.0:
            raise ConfigError(f"range_ratio={self.range_ratio} is not valid: give at least 0 and less than 1")

        for name in ("input_range", "output_range"):
            given = getattr(self, name)
            if given is not None and not 1 <= given[0] <= given[1]:
                raise ConfigError(
                    f"{name}={given[0]} {given[1]} is not valid: give at least 1, the lower first"
                )
            if given is not None and self.kind != "random":
                raise ConfigError(f"{name} goes with dataset_name=random: {self.kind} has one length")

    def _spread(self, length: int) -> Bounds:
        return max(1, round(length * (1 - self.range_ratio))), round(length * (1 + self.range_ratio))

    def items(self, vocab: Bounds = VOCAB) -> list[WorkItem]:
        """The requests; random ids lie within `vocab`, both bounds included."""
        count = self.num_prompts or 64
        common: dict[str, Any] = {"seed": self.seed + _SEEDS[self.kind], "vocab": vocab}
        if self.kind == "random":
            return random_requests(
                count,
                self.input_range or self._spread(self.input_len),
                self.output_range or self._spread(self.output_len),
                **common,
            )
        if self.kind == "shared-prefix":
            return shared_prefix_requests(count, self.prefix_len, self.input_len, self.output_len, **common)
        if self.kind == "repetitive":
            return repetitive_requests(count, self.period, self.input_len, self.output_len, **common)
        if self.kind == "multi-turn":
            conversations = -(-count // self.turns)
            items = multi_turn_requests(
                conversations, self.turns, self.input_len, self.turn_len, self.output_len, **common
            )
            return items[:count]
        assert self.path is not None
        return file_requests(self.path, self.num_prompts, self.output_len)

    def warmups(self, count: int, vocab: Bounds = VOCAB) -> list[WorkItem]:
        """`count` requests of this kind to run before, other tokens and short answers; none of a file."""
        if not count or self.kind == "custom":
            return []
        items = replace(self, num_prompts=count, seed=self.seed + _WARMUP_SEED).items(vocab)
        return [replace(item, max_tokens=min(item.max_tokens, _WARMUP_OUTPUT)) for item in items]


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
