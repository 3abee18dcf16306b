"""Time to the first token of prefixes that come back: recomputed, from the device, from host memory; and what
that costs requests that decode meanwhile.

Usage: python benchmarks/kv_tiers.py [--model benchmarks/shapes/llama-8b] [--others 8] [--json FILE]

So many prompts with prefixes of their own are sent one after the other that their KV is `--times` the
device's cache; then each comes back with another ending, in the same order, so that the device has evicted
it. One request at a time: what is compared is computing a prefix and copying it back.

After that `--others` requests decode, and every `--every` seconds a request comes beside them: with a prefix
that has to be copied back, or as long as such a request's ending, which copies nothing. Between the two kinds
they decode alone. Their tokens a second with copies are compared with those beside requests without.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from octavo import SamplingParams
from octavo.async_llm import AsyncLLM
from octavo.bench.workloads import random_requests
from octavo.sampling_params import RequestOutputKind

GIB = 1 << 30
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "detokenize": False}
ENDING = 33  # tokens that each request has of its own
ROUNDS = 3


async def first_token(llm: AsyncLLM, ids: list[int]) -> tuple[float, int]:
    """Seconds, and how many tokens were cached."""
    begin, cached = time.perf_counter(), 0
    async for output in llm.generate({"prompt_token_ids": ids}, SamplingParams(max_tokens=1, **GREEDY)):
        cached = output.num_cached_tokens or 0
    return time.perf_counter() - begin, cached


class Others:
    """Requests that decode all the time."""

    def __init__(self, llm: AsyncLLM, prompts: list[list[int]], max_tokens: int):
        self.tokens = 0
        self._llm, self._max_tokens = llm, max_tokens
        self._tasks = [asyncio.create_task(self._decode(prompt)) for prompt in prompts]

    async def _decode(self, prompt: list[int]) -> None:
        params = SamplingParams(max_tokens=self._max_tokens, output_kind=RequestOutputKind.DELTA, **GREEDY)
        async for output in self._llm.generate({"prompt_token_ids": prompt}, params):
            self.tokens += len(output.outputs[0].token_ids)

    async def rate(
        self, beside: Iterable[list[int]], every: float, seconds: float
    ) -> tuple[float, list[float]]:
        """Their tokens a second for `seconds`, and times to the first token of requests beside them."""
        begin, before, tasks = time.perf_counter(), self.tokens, []
        for ids in beside:
            if time.perf_counter() - begin + every > seconds:
                break
            tasks.append(asyncio.create_task(first_token(self._llm, ids)))
            await asyncio.sleep(every)
        await asyncio.sleep(max(0.0, seconds - (time.perf_counter() - begin)))
        rate = (self.tokens - before) / (time.perf_counter() - begin)
        return rate, [(await task)[0] for task in tasks]

    async def end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    begin = time.perf_counter()
    llm = await AsyncLLM.create(
        model=args.model, load_format="dummy", skip_tokenizer_init=True, device=args.device,
        kv_cache_memory_bytes=args.kv_bytes, swap_space=args.swap_space,
        max_model_len=args.prefix_len + 512, max_num_seqs=16,
    )  # fmt: skip
    async with llm:
        row: dict[str, Any] = {"start s": time.perf_counter() - begin}
        count = int(llm.stats().kv_blocks_total * 16 * args.times / args.prefix_len)

        def drawn(count: int, length: int, seed: int) -> list[list[int]]:
            made = random_requests(count, (length, length), (1, 1), seed=seed, vocab=(10, args.vocab))
            return [item.prompt_token_ids for item in made]

        prefixes = drawn(count, args.prefix_len, 0)
        endings = iter(drawn((2 + 2 * ROUNDS) * count, ENDING, 1))
        await first_token(llm, prefixes[0][::-1])  # compiles
        computed = [await first_token(llm, p + next(endings)) for p in prefixes]
        await asyncio.sleep(0.5)
        returned = [await first_token(llm, p + next(endings)) for p in prefixes]
        device = await first_token(llm, prefixes[-1] + next(endings))
        whole = sum(cached >= args.prefix_len - 16 for _, cached in returned)
        row |= {
            "prefixes": count,
            "computed s": statistics.median(s for s, _ in computed[1:]),
            "returned s": statistics.median(s for s, _ in returned),
            "returned whole": whole,
            "from the device s": device[0],
        }
        row["ratio"] = row["returned s"] / row["computed s"]
        if args.others:
            row |= await beside_others(args, llm, prefixes, endings, drawn(args.others, 128, 2))
        stats = llm.stats()
        row |= {n: getattr(stats, n) for n in type(stats).__struct_fields__ if "host" in n or "cop" in n}
    return row


async def beside_others(
    args: argparse.Namespace,
    llm: AsyncLLM,
    prefixes: list[list[int]],
    endings: Iterable[list[int]],
    prompts: list[list[int]],
) -> dict[str, Any]:
    """The rates of requests that decode: alone, beside requests that copy nothing, beside others that do."""
    others = Others(llm, prompts, args.prefix_len)
    rates: dict[str, list[float]] = {"alone": [], "without copies": [], "with copies": []}
    firsts: dict[str, list[float]] = {kind: [] for kind in rates}
    back = (p + e for p, e in zip(itertools.cycle(prefixes), endings, strict=False))
    fresh = (e for e in endings)
    await others.rate([], args.every, args.seconds)  # shapes that are new
    await others.rate(itertools.islice(fresh, 3), args.every, args.seconds)
    for _ in range(ROUNDS):
        for kind, beside in (("alone", []), ("without copies", fresh), ("with copies", back)):
            rate, times = await others.rate(beside, args.every, args.seconds)
            rates[kind].append(rate)
            firsts[kind] += times
    await others.end()
    found = {f"others {kind}, tokens/s": statistics.median(some) for kind, some in rates.items()}
    pairs = zip(rates["with copies"], rates["without copies"], strict=True)
    return found | {
        "others slowed by": 1 - statistics.median(a / b for a, b in pairs),
        "first token without copies s": statistics.median(firsts["without copies"]),
        "first token with copies s": statistics.median(firsts["with copies"]),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default=str(Path(__file__).parent / "shapes/llama-8b"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--kv-bytes", type=int, default=16 * GIB)
    parser.add_argument("--swap-space", type=float, default=56.0, help="GiB")
    parser.add_argument("--prefix-len", type=int, default=8192)
    parser.add_argument("--times", type=float, default=3.0)
    parser.add_argument("--vocab", type=int, default=30000)
    parser.add_argument("--others", type=int, default=8, help="requests that decode meanwhile; 0: none")
    parser.add_argument("--every", type=float, default=0.5, help="seconds between requests beside them")
    parser.add_argument("--seconds", type=float, default=3.0, help="of a measurement")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    row = asyncio.run(measure(args))
    print("\n".join(f"{k}: {v:.4f}" if isinstance(v, float) else f"{k}: {v}" for k, v in row.items()))
    if args.json is not None:
        args.json.write_text(json.dumps(row, indent=1) + "\n")


if __name__ == "__main__":
    main()
