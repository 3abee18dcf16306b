"""Speculation against plain decoding: tokens per second, engines in turn, on work that repeats itself and on
text that doesn't.

Usage: python -m benchmarks.speculative [--parts repetitive random sweep] [--rounds N] [--at-once N] [--write]

- repetitive: one request at a time, drafts by look-up (ngram) and by suffix, with the file's 4-bit weights
  and in 16 bits; every round has its own texts, the same for all engines, so that nobody drafts from the
  answers of an earlier round.
- random: words in no order, sampled at temperature 1; one request at a time, and 64 at once.
- sweep: 1 to 256 requests at once (`--at-once`), three times as many in all, whose prompts are in the prefix
  cache: no drafts, 5 each, and as many as pay.

All engines of a part are open at once and take turns, in another order each round. A ratio is the median of
the rounds' ratios: of tokens per second, and of tokens per second of this process's CPU time, which says more
where other processes want the same cores. `--write` puts the tables into benchmarks/speculative.md.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.speculative_work import WORKS, random_words
from octavo import LLM, SamplingParams
from octavo.bench.plot import Chart, Series, draw
from octavo.planning.hardware import detect_cpu

PAGE = Path(__file__).with_suffix(".md")
PLOT = PAGE.with_name("speculative-concurrency.svg")
Config = dict[str, Any] | None
Prompts = Callable[[int], list[str]]
OFF = "off"


@dataclass
class Measured:
    """What the rounds of one engine on one kind of work told.

    Attributes:
        rates, cpu_rates: tokens per second, and per second of CPU time, by round.
        later_rates: tokens after the first one of each request, per second after that.
        drafted, accepted: tokens, in all.
    """

    rates: list[float] = field(default_factory=list)
    cpu_rates: list[float] = field(default_factory=list)
    later_rates: list[float] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0

    def ratios(self, plain: Measured) -> list[float]:
        """Medians of all three rates over those of the same rounds without drafts."""
        pairs = (
            (self.rates, plain.rates),
            (self.later_rates, plain.later_rates),
            (self.cpu_rates, plain.cpu_rates),
        )
        return [statistics.median(a / b for a, b in zip(*pair, strict=True)) for pair in pairs]


def compare(
    configs: dict[str, Config], prompts: Prompts, params: SamplingParams, at_once: int, rounds: int,
    settings: dict[str, Any], cached: bool = False,
) -> dict[str, Measured]:  # fmt: skip
    """Measure engines in turn.

    Args:
        configs: `speculative_config` of each engine.
        prompts: texts of a round.
        at_once: requests that are given at the same time.
        rounds: that count; one more comes before.
        settings: of all engines.
        cached: the prompts are in the prefix cache, and are the same in every round.
    """
    engines: dict[str, LLM] = {}
    try:
        for name, config in configs.items():
            engines[name] = LLM(**settings, speculative_config=config)
            if cached:
                engines[name].generate(prompts(0), params.clone(max_tokens=1), use_tqdm=False)
        found = {name: Measured() for name in engines}
        for number in range(rounds + 1):
            texts = prompts(number)
            order = list(engines)
            for name in order[number % len(order) :] + order[: number % len(order)]:
                llm, measured = engines[name], found[name]
                before = llm.stats()
                if not cached:
                    llm.reset_prefix_cache()
                begin, cpu_begin, tokens = time.perf_counter(), time.process_time(), 0
                later, later_seconds = 0, 0.0
                for first in range(0, len(texts), at_once):
                    outputs = llm.generate(texts[first : first + at_once], params, use_tqdm=False)
                    for output in outputs:
                        count = len(output.outputs[0].token_ids)
                        tokens, later = tokens + count, later + count - 1
                        later_seconds += output.metrics.last_token_time - output.metrics.first_token_time
                seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - cpu_begin
                if not number:
                    continue
                after = llm.stats()
                measured.rates.append(tokens / seconds)
                measured.cpu_rates.append(tokens / cpu_seconds)
                measured.later_rates.append(later / later_seconds)
                measured.drafted += after.spec_draft_tokens - before.spec_draft_tokens
                measured.accepted += after.spec_accepted_tokens - before.spec_accepted_tokens
        return found
    finally:
        for llm in engines.values():
            llm.close()


def rows(label: str, found: dict[str, Measured]) -> Iterable[str]:
    """Lines of a table: rate, ratio, drafts and how many stood."""
    for name, measured in found.items():
        rate = f"{statistics.median(measured.rates):.1f}"
        if name == OFF:
            yield f"| {label} | {name} | {rate} | | | | | |"
            continue
        share = f"{measured.accepted / measured.drafted:.0%}" if measured.drafted else ""
        ratios = " | ".join(f"{ratio:.2f}" for ratio in measured.ratios(found[OFF]))
        yield f"| {label} | {name} | {rate} | {ratios} | {measured.drafted} | {share} |"


def adaptive(method: str, **given: Any) -> Config:
    """As users have it."""
    return {"method": method, **given}


def part(
    name: str, rounds: int, tokens: int, num_texts: int, swept: Sequence[int], settings: dict[str, Any],
    chart: Chart,
) -> Iterable[str]:  # fmt: skip
    """The lines of one part's table; those of the sweep go into the chart too."""
    greedy = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    if name == "repetitive":
        configs = {
            OFF: None,
            "ngram, always 8": {"method": "ngram", "num_speculative_tokens": 8, "adaptive": False},
            "ngram, adaptive": adaptive("ngram", num_speculative_tokens=8),
            "suffix, always": {"method": "suffix", "adaptive": False},
            "suffix, adaptive": adaptive("suffix"),
        }
        for weights, quantization in (("as in the file", None), ("16 bits", "none")):
            for work, make in WORKS.items():
                prompts = lambda n, make=make: [make(100 * n + i) for i in range(num_texts)]  # noqa: E731
                found = compare(
                    configs, prompts, greedy, 1, rounds, {**settings, "quantization": quantization}
                )
                yield from rows(f"{work}, {weights}", found)
    elif name == "random":
        drawn = SamplingParams(temperature=1.0, seed=1, max_tokens=tokens, ignore_eos=True)
        for at_once in (1, 64):
            configs = {OFF: None, "ngram": adaptive("ngram"), "suffix": adaptive("suffix")}
            count = max(num_texts, at_once)
            prompts = lambda n, count=count: [random_words(100 * n + i) for i in range(count)]  # noqa: E731
            yield from rows(
                f"random, {at_once} at once", compare(configs, prompts, drawn, at_once, rounds, settings)
            )
    else:
        configs = {
            OFF: None,
            "ngram, always 5": {"method": "ngram", "adaptive": False},
            "ngram, adaptive": adaptive("ngram"),
        }
        makers = list(WORKS.values())
        curves: dict[str, list[tuple[float, float]]] = {name: [] for name in configs}
        chart.series = [Series(name, points) for name, points in curves.items()]
        for at_once in swept:
            texts = 3 * [makers[i % 3](i) for i in range(max(num_texts, at_once))]
            closed = {**settings, "max_num_seqs": at_once}
            found = compare(
                configs, lambda _, texts=texts: texts, greedy, len(texts), rounds, closed, cached=True
            )
            for engine, points in curves.items():
                points.append((float(at_once), statistics.median(found[engine].rates)))
            yield from rows(f"all three, {at_once} at once", found)


PARTS = ("repetitive", "random", "sweep")


def write(name: str, lines: list[str], program: str = "speculative.py") -> None:
    """Put a part's table into the page, between its comments, which name the program it is of."""
    begin, end = f"<!-- {name}: begin (benchmarks/{program}) -->\n", f"<!-- {name}: end -->"
    head, _, rest = PAGE.read_text(encoding="utf-8").partition(begin)
    _, found, tail = rest.partition(end)
    if not found:
        raise SystemExit(f"{PAGE} has no {begin.strip()}")
    PAGE.write_text(head + begin + "\n".join(lines) + "\n" + end + tail, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--rounds", type=int, default=3, help="that count; one more comes before")
    parser.add_argument("--tokens", type=int, default=128, help="of an answer")
    parser.add_argument("--texts", type=int, default=3, help="of a round, at least")
    parser.add_argument(
        "--at-once", nargs="+", type=int, default=[1, 4, 16, 64, 256], metavar="N", help="of the sweep"
    )
    parser.add_argument("--model", help="default: the embedded one")
    parser.add_argument("--write", action="store_true", help="into benchmarks/speculative.md")
    args = parser.parse_args()
    # A cache that holds all requests at once: what less costs is benchmarks/speculative_memory.py's.
    settings = {"model": args.model, "device": "cpu", "max_model_len": 2048, "kv_cache_memory_bytes": 3 << 30}
    cpu = detect_cpu()
    chart = Chart("Throughput", "requests at once", "output tokens a second")
    for name in args.parts:
        lines = [
            f"{cpu.model}, {cpu.usable_cores} cores; {args.model or 'SmolLM2-135M-Instruct (Q4_1)'}; "
            f"{args.tokens} tokens an answer, {args.texts} texts a round, medians of {args.rounds} rounds.",
            "",
            "| work | drafts | tokens/s | ratio | after the first token | by CPU time | drafted | stood |",
            "|---|---|---|---|---|---|---|---|",
        ]
        print("\n".join(lines), flush=True)
        for line in part(name, args.rounds, args.tokens, args.texts, args.at_once, settings, chart):
            lines.append(line)
            print(line, flush=True)
        if args.write:
            write(name, lines)
    if args.write and chart.series:
        model = args.model or "SmolLM2-135M-Instruct"
        caption = f"{model}, work that repeats itself, {args.tokens} tokens an answer"
        PLOT.write_text(draw([chart], caption), encoding="utf-8")


if __name__ == "__main__":
    main()
