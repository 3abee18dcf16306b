"""A real draft model and its target: how near speculation comes to what acceptance and costs allow.

Usage: python -m benchmarks.speculative_pair TARGET.gguf DRAFT.gguf [--spec-bench FILE.jsonl] [--drafts 2 4]
       [--quantization none] [--questions 12] [--tokens 64] [--rounds 1] [--sha256 TARGET DRAFT] [--write]

With tokens that stand with probability alpha each, k drafts a step and a draft that costs c target steps,
speculation is at most (1 - alpha^(k+1)) / ((1 - alpha) (k c + 1)) times as fast (arXiv 2211.17192, theorem
3.8): the numerator is the mean number of tokens a step. Here alpha follows from the mean that is measured,
and c from both models' own rates without drafts, all after the first token. The share of this bound that is
reached tells what judging k + 1 rows instead of one, and drafting itself, cost beyond that.

Prompts: the first question of each category of Spec-Bench in turn (arXiv 2401.07851; `--spec-bench` names its
file), and Chinese ones. `--sha256` names what the files' digests must begin with. `--write` puts the table
into benchmarks/speculative.md.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
from collections.abc import Iterator, Sequence
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

from benchmarks.speculative import OFF, Measured, compare, write
from octavo import SamplingParams

CHINESE = (
    "请用三句话介绍一下长江。",
    "把下面的句子翻译成英文：明天下午三点在图书馆门口见面，请带上你的笔记本。",
    "写一个 Python 函数，判断一个字符串是不是回文，并解释它的时间复杂度。",
    "小明有十二个苹果，给了小红三个，又买了五个，现在一共有多少个？请写出计算过程。",
    "用 JSON 列出四个中国城市，每个包含名称、省份和人口三个字段。",
    "总结一下为什么定期备份数据很重要，分三点说明。",
)


def spec_bench(path: Path) -> Iterator[str]:
    """First turns of the questions, categories in turn."""
    by_category: dict[str, list[str]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        question = json.loads(line)
        by_category.setdefault(question["category"], []).append(question["turns"][0])
    for row in zip_longest(*by_category.values()):
        yield from (text for text in row if text is not None)


def chat(text: str) -> str:
    """As Qwen's template has it, without a system's message."""
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


def check_digest(path: Path, begins: str) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if not found.startswith(begins):
        raise SystemExit(f"{path}: SHA-256 is {found}, not {begins}…")


def alpha_of(mean: float, drafts: int) -> float:
    """The probability with which each draft stands if so many tokens a step are the mean."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if sum(middle**i for i in range(drafts + 1)) < mean:
            low = middle
        else:
            high = middle
    return low


def lines(
    work: str, found: dict[str, Measured], draft: Measured, drafts: Sequence[int], questions: int, tokens: int
) -> Iterator[str]:
    """The table's rows of one kind of work."""
    plain = statistics.median(found[OFF].later_rates)
    cost = plain / statistics.median(draft.later_rates)
    yield f"| {work} | off | {plain:.2f} | | | {cost:.3f} | | | |"
    for name, measured in found.items():
        if name == OFF:
            continue
        ratio = measured.ratios(found[OFF])[1]
        rate = statistics.median(measured.later_rates)
        if name not in (str(k) for k in drafts):
            yield f"| {work} | {name} | {rate:.2f} | {ratio:.2f} | | | | | |"
            continue
        k = int(name)
        steps = measured.drafted / k
        mean = 1 + measured.accepted / steps
        bound = mean / (k * cost + 1)
        yield (
            f"| {work} | {k} | {rate:.2f} | {ratio:.2f} | {mean:.2f} | {cost:.3f} | {alpha_of(mean, k):.2f} "
            f"| {bound:.2f} | {ratio / bound:.2f} |"
        )


def table(args: argparse.Namespace) -> Iterator[str]:
    works = {"Chinese": list(CHINESE)[: args.questions]}
    if args.spec_bench:
        works = {"Spec-Bench": list(islice(spec_bench(args.spec_bench), args.questions))} | works
    settings: dict[str, Any] = {
        "max_model_len": 1024, "max_num_seqs": 1, "quantization": args.quantization,
        "kv_cache_memory_bytes": 256 << 20, "num_threads": args.threads,
    }  # fmt: skip
    params = SamplingParams(temperature=0.0, max_tokens=args.tokens, ignore_eos=True)
    made = {"method": "draft_model", "model": str(args.draft)}
    configs: dict[str, Any] = {OFF: None} | {
        str(k): {**made, "num_speculative_tokens": k, "adaptive": False} for k in args.drafts
    }
    if args.adaptive:
        configs["adaptive"] = {**made, "num_speculative_tokens": max(args.drafts)}
    kept = "in 16 bits" if args.quantization == "none" else "as in the files"
    yield (
        f"{args.target.stem} and {args.draft.stem}, weights {kept}; one request at a time, {args.tokens} "
        f"tokens each of {args.questions} questions, medians of {args.rounds} rounds; tokens/s after the "
        "first token."
    )
    yield ""
    yield "| work | drafts | tokens/s | times off | tokens a step | c | alpha | bound | share of it |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for work, texts in works.items():
        prompts = [chat(text) for text in texts]

        def given(number: int, prompts: list[str] = prompts) -> list[str]:
            return prompts

        found = compare(configs, given, params, 1, args.rounds, {**settings, "model": str(args.target)})
        alone = compare({OFF: None}, given, params, 1, args.rounds, {**settings, "model": str(args.draft)})
        yield from lines(work, found, alone[OFF], args.drafts, len(texts), args.tokens)


def main() -> None:
    """Measure, print, and write into the page if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("target", type=Path)
    parser.add_argument("draft", type=Path)
    parser.add_argument("--spec-bench", type=Path)
    parser.add_argument("--drafts", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--quantization", help="none: 16 bits; default: as the files have them")
    parser.add_argument("--questions", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--adaptive", action="store_true", help="also as many drafts as pay")
    parser.add_argument("--sha256", nargs=2, metavar=("TARGET", "DRAFT"))
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    for path, begins in zip((args.target, args.draft), args.sha256 or ("", ""), strict=True):
        check_digest(path, begins)
    text = []
    for line in table(args):
        print(line, flush=True)
        text.append(line)
    if args.write:
        write("pair", text, "speculative_pair.py")


if __name__ == "__main__":
    main()
