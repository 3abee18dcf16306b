"""What the engine's process keeps of each kind of request: its memory, round after round of one kind.

A kind that keeps something for each request grows for ever; one that keeps something for each size of a step,
or each grammar, stops growing. Kinds run one after another on one server, each in rounds of as many requests.

    python -m benchmarks.server_memory MODEL [--rounds 6] [--requests 60] [--kinds plain form] [-- OPTIONS]

OPTIONS are those of `octavo serve`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from benchmarks.server_load import FORM, TOOL, WORDS, Seen, ask, family, fill, resident, settled

CLIENTS = 16
Body = dict[str, Any]


def plain(draw: random.Random) -> Body:
    """Answers of mixed lengths to prompts of mixed lengths."""
    words = int(min(300, draw.lognormvariate(3.0, 1.0))) + 3
    return {
        "messages": [{"role": "user", "content": " ".join(draw.choices(WORDS, k=words))}],
        "max_tokens": int(min(60, draw.lognormvariate(3.0, 0.8))) + 2,
        "stream": True,
        "temperature": draw.choice([0, 0.8]),
    }


def same(draw: random.Random) -> Body:
    """One request, again and again."""
    return plain(random.Random(0))


def logprobs(draw: random.Random) -> Body:
    """With log-probabilities."""
    return plain(draw) | {"logprobs": True, "top_logprobs": 5}


def form(draw: random.Random) -> Body:
    """One schema for all."""
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": FORM}}
    return plain(draw) | {"response_format": schema, "max_tokens": 40}


def new_form(draw: random.Random) -> Body:
    """A schema that nobody has asked for before."""
    names = [f"{draw.choice(WORDS)}{draw.randrange(10**6)}" for _ in range(5)]
    schema = {"type": "object", "properties": {name: {"type": "string", "maxLength": 9} for name in names}}
    told = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema | {"required": names}}}
    return plain(draw) | {"response_format": told, "max_tokens": 20}


def tool(draw: random.Random) -> Body:
    """A tool that must be called."""
    return plain(draw) | {"tools": [TOOL], "tool_choice": "required", "max_tokens": 40}


def refused_form(draw: random.Random) -> Body:
    """A schema that is refused, of a new name each time."""
    body = new_form(draw)
    body["response_format"]["json_schema"]["schema"]["not"] = {"type": "string"}
    return body


KINDS: dict[str, Callable[[random.Random], Body]] = {
    kind.__name__: kind for kind in (same, plain, logprobs, form, new_form, refused_form, tool)
}


async def round_of(port: int, kind: str, requests: int, seed: int, seen: Seen) -> None:
    """So many requests of a kind."""
    numbers = iter(range(requests))

    async def one() -> None:
        for number in numbers:
            draw = random.Random(f"{kind} {seed} {number}")
            data = json.dumps(KINDS[kind](draw)).encode()
            await ask(port, data, seen, "bad" if kind == "refused_form" else "plain", None)

    await asyncio.gather(*(one() for _ in range(CLIENTS)))


async def measure(args: argparse.Namespace, pid: int, port: int) -> list[str]:
    """Run all kinds, printing a row each; what went wrong."""
    seen, processes = Seen(), family(pid)
    await fill(port)
    print("| kind | " + " | ".join(f"{i + 1}" for i in range(args.rounds)) + " | API |")
    print("|---|" + "---|" * (args.rounds + 1))
    for kind in args.kinds:
        memory: list[int] = []
        for number in range(args.rounds):
            await round_of(port, kind, args.requests, number, seen)
            await settled(port)
            memory = resident(processes)
            args.engine.append(memory[-1])
        row = " | ".join(f"{bytes_ / 1e6:.1f}" for bytes_ in args.engine[-args.rounds :])
        print(f"| {kind} | {row} | {memory[0] / 1e6:.1f} |", flush=True)
    return seen.wrong


def main() -> int:
    parser = argparse.ArgumentParser(description="The engine's memory by kind of request.")
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--requests", type=int, default=60, help="a round")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    given = sys.argv[1:]
    place = given.index("--") if "--" in given else len(given)
    args = parser.parse_args(given[:place])
    args.engine = []
    command = [sys.executable, "-m", "octavo", "serve", args.model, "--port", "0", *given[place + 1 :]]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ)
    try:
        assert child.stdout is not None
        line = child.stdout.readline()
        if "ready" not in line:
            raise RuntimeError("the server did not start")
        port = int(line.strip().rpartition(":")[2].split("/")[0])
        wrong = asyncio.run(measure(args, child.pid, port))
    finally:
        child.terminate()
        child.wait(30)
    for told in wrong[:10]:
        print(f"wrong: {told}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
