"""Structured output on real schemas: what is accepted, what is refused and why, and how long it takes.

Usage: python benchmarks/structured_output.py FILE.jsonl.gz [--model FOLDER_OR_GGUF] [--limit N]
       python benchmarks/structured_output.py --neighbours

FILE holds one JSON object a line: `schema`, and `tests` with `data` and `valid` (JSONSchemaBench's MaskBench
sample has this form). Every instance is written as JSON, tokenized, and walked through its schema's
grammar token by token, each mask being made as for a request. A valid instance must pass to the end; an
invalid one must be stopped. `--neighbours` runs an engine: how long steps of plain requests take beside
requests with forms. Both print tables in Markdown.
"""

from __future__ import annotations

import argparse
import collections
import gzip
import json
import re
import time
from typing import Any

import numpy as np

from octavo.errors import RequestError
from octavo.models.pull import pull_default
from octavo.sampling.structured.backend import Grammar, Vocabulary
from octavo.sampling.structured.llguidance_backend import LLGuidanceBackend
from octavo.structured_outputs import StructuredOutputsParams
from octavo.tokenization.tokenizer import Tokenizer, load_tokenizer


def walk(
    grammar: Grammar, ids: list[int], eos: int, masks: list[float], steps: list[float], row: np.ndarray
) -> bool:
    """Whether the grammar allows exactly this text; times of masks and of tokens, in seconds, are added."""
    state = grammar.new_state()
    for token in [*ids, eos]:
        if state.is_terminated:
            return token == eos
        begin = time.perf_counter()
        state.fill_mask(row)
        middle = time.perf_counter()
        masks.append(middle - begin)
        if not row[token // 32] >> (token % 32) & 1:
            return False
        if state.accept([token]) != 1:
            raise AssertionError("the mask allows a token that the state refuses")
        steps.append(time.perf_counter() - middle)
    return state.is_terminated


def vocabulary_of(tokenizer: Tokenizer) -> Vocabulary:
    """A tokenizer's tokens as grammars see them."""
    table = tokenizer.byte_table(False)
    return Vocabulary(
        tokens=[table[i] for i in range(tokenizer.vocab_size)],
        special_ids=tokenizer.all_special_ids,
        eos_ids=list(tokenizer.eos_token_ids),
        encode=lambda text: tokenizer.encode(text, add_special_tokens=False),
    )


def reason(message: str) -> str:
    """A refusal without the schema's own names."""
    told = message.split("cannot be followed: ")[-1]
    return re.sub(r"http\S*|json-schema:\S*|'[^']*'|/\S*/", "…", told).split(" while proc")[0][:90]


def quantiles(values: list[float], scale: float) -> str:
    """p50, mean, p95, p99 and the largest."""
    array = np.array(values) * scale
    numbers = [np.quantile(array, 0.5), array.mean(), *np.quantile(array, [0.95, 0.99]), array.max()]
    return " | ".join(f"{number:.3g}" for number in numbers)


def schemas(file_name: str, model: str | None, limit: int) -> None:
    """Walk the instances of a file's schemas."""
    tokenizer = load_tokenizer(model or pull_default(progress=False))
    vocabulary = vocabulary_of(tokenizer)
    backend = LLGuidanceBackend(vocabulary)
    row = np.zeros(vocabulary.num_words, np.int32)
    counts: collections.Counter[str] = collections.Counter()
    refused: collections.Counter[str] = collections.Counter()
    compiles, refusals = [], []
    masks: list[float] = []
    steps: list[float] = []
    wrong: list[str] = []
    with gzip.open(file_name, "rt", encoding="utf-8") as file:
        for number, line in enumerate(file):
            if limit and number >= limit:
                break
            entry: dict[str, Any] = json.loads(line)
            counts["schemas"] += 1
            begin = time.perf_counter()
            try:
                grammar = backend.compile(StructuredOutputsParams(json=entry["schema"]))
            except RequestError as error:
                refusals.append(time.perf_counter() - begin)
                refused[reason(str(error))] += 1
                continue
            compiles.append(time.perf_counter() - begin)
            counts["schemas accepted"] += 1
            for test in entry["tests"]:
                ids = vocabulary.encode(json.dumps(test["data"], ensure_ascii=False))
                kind = "valid instances" if test["valid"] else "invalid instances"
                counts[kind] += 1
                try:
                    passed = walk(grammar, ids, vocabulary.eos_ids[0], masks, steps, row)
                except RequestError as error:
                    counts["instances given up"] += 1
                    wrong.append(f"{entry['name']}: {error}")
                    continue
                if passed != test["valid"]:
                    counts[kind + (" passed" if passed else " stopped")] += 1
                    wrong.append(entry["name"])
    for name, count in counts.items():
        print(f"- {name}: {count}")
    print("\n| refused because of | schemas |\n|---|---|")
    for why, count in refused.most_common():
        print(f"| {why} | {count} |")
    print("\n| time | p50 | mean | p95 | p99 | largest |\n|---|---|---|---|---|---|")
    for name, values, scale in (
        ("compiling, first mask included (ms)", compiles, 1e3),
        ("refusing (ms)", refusals, 1e3),
        ("a mask (µs)", masks, 1e6),
        ("taking a token (µs)", steps, 1e6),
    ):
        if values:
            print(f"| {name} | {quantiles(values, scale)} |")
    if wrong:
        print("\nwrong: " + "; ".join(sorted(set(wrong))))


EASY = {
    "type": "object",
    "properties": {"a": {"type": "array", "items": {"type": "string"}}},
    "required": ["a"],
}
HARD = r"(\w{1,100}\s){100}"


def neighbours(model: str | None) -> None:
    """Time between tokens of four plain requests, beside one with a form."""
    from octavo import LLM, SamplingParams

    with LLM(model or "") if model else LLM() as llm:
        plain = [SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)] * 4
        print("| beside four plain requests | ms a token of theirs | its tokens |\n|---|---|---|")
        forms: list[tuple[str, dict[str, Any] | None]] = [
            ("a fifth plain one", None),
            ("a schema", {"json": EASY}),
            ("a hard expression", {"regex": HARD}),
            ("a fifth plain one, again", None),
        ]
        for name, form in forms:
            settings: dict[str, Any] = {} if form is None else {"structured_outputs": form}
            other = SamplingParams(
                temperature=0.9, seed=1, max_tokens=60, ignore_eos=form is None, **settings
            )
            for _ in range(2):  # the first compiles
                outputs = llm.generate(["Once upon a time"] * 5, [*plain, other], use_tqdm=False)
            seconds = []
            for out in outputs[:4]:
                times = out.metrics
                seconds.append(
                    (times.last_token_time - times.first_token_time) / (len(out.outputs[0].token_ids) - 1)
                )
            print(f"| {name} | {1e3 * np.mean(seconds):.1f} | {len(outputs[4].outputs[0].token_ids)} |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", nargs="?")
    parser.add_argument("--model", help="whose tokenizer to use; default: the default model's")
    parser.add_argument("--limit", type=int, default=0, help="schemas to take; 0: all")
    parser.add_argument("--neighbours", action="store_true", help="time plain requests beside forms")
    args = parser.parse_args()
    if args.neighbours:
        neighbours(args.model)
    elif args.file:
        schemas(args.file, args.model, args.limit)
    else:
        parser.error("name the file of schemas, or give --neighbours")


if __name__ == "__main__":
    main()
