"""What the API costs by itself: a server whose engine has no model (`benchmarks.null_server`), and clients.

Streams: `--clients` connections keep asking for chats of `--tokens` tokens. Told are chunks per second by the
clock, and per second of CPU time of either process (API, engine): other work on the machine disturbs these
less. Server and clients are pinned to a core each where there are two. The best of `--runs` counts. With
`--step-ms` the engine gives one token to each request in so many milliseconds; without, as fast as it can,
and the API joins what it cannot send one by one: chunks are then fewer than tokens.

First tokens (`--first`): told is what passes between a client's request and the answer's first event, without
the time from the request's arrival at the engine's front end to its first token there, which is the engine's:
it waits for the step under way and takes one. What is left is the API's: before (HTTP, chat template,
tokens) and after (news, text, HTTP). The median is that of single requests' sums. Answers are of different
lengths here, so that they don't end together.

    python -m benchmarks.api_speed MODEL [--clients 256] [--tokens 128] [--seconds 5] [--json] [-- OPTIONS]
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import uvloop

PROMPT = "Tell me a long story about a small book. " * 4


class Answer(NamedTuple):
    """Request id, tokens asked for, times of the request and of the first event (seconds), and all bytes."""

    id: str
    tokens: int
    begin: float
    first: float
    data: bytes


class Client(asyncio.Protocol):
    """Asks again and again on one connection, until `until`. Times are `time.time`, as the server's are."""

    def __init__(self, lengths: range, name: str, until: float, ended: asyncio.Future[None]):
        self._lengths = lengths
        self._name = name
        self._draw = random.Random(name)
        self._until = until
        self._ended = ended
        self._parts: list[bytes] = []
        self._begin = 0.0
        self.answers: list[Answer] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport
        self._ask()

    def _ask(self) -> None:
        name = f"{self._name}-{len(self.answers)}"
        self._id, self._tokens, self._first = f"chatcmpl-{name}", self._draw.choice(self._lengths), 0.0
        data = request(name, self._tokens)
        self._begin = time.time()
        self._transport.write(data)

    def data_received(self, data: bytes) -> None:
        # The head comes by itself; what counts is the first event.
        if not self._first and b"data: " in data:
            self._first = time.time()
        self._parts.append(data)
        if data.endswith(b"0\r\n\r\n"):
            self.answers.append(
                Answer(self._id, self._tokens, self._begin, self._first, b"".join(self._parts))
            )
            self._parts = []
            if time.time() < self._until:
                self._ask()
            else:
                self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        if self._parts or error:
            self._ended.set_exception(RuntimeError(f"an answer broke off: {error}"))
        else:
            self._ended.set_result(None)


def request(name: str, tokens: int) -> bytes:
    """A chat's request."""
    messages = [{"role": "user", "content": PROMPT}]
    body = {"messages": messages, "stream": True, "max_tokens": tokens, "ignore_eos": True}
    data = json.dumps(body).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    return head + b"x-request-id: %s\r\ncontent-length: %d\r\n\r\n" % (name.encode(), len(data)) + data


async def load(port: int, clients: int, lengths: range, seconds: float, name: str) -> list[Answer]:
    """All answers that clients got in some time (and until the last one's end)."""
    loop = asyncio.get_running_loop()
    until = time.time() + seconds
    ended = [loop.create_future() for _ in range(clients)]
    made = [
        await loop.create_connection(
            functools.partial(Client, lengths, f"{name}-{number}", until, end), "127.0.0.1", port
        )
        for number, end in enumerate(ended)
    ]
    await asyncio.gather(*ended)
    return [answer for _, client in made for answer in client.answers]


def lengths_of(args: argparse.Namespace) -> range:
    """How many tokens an answer may have."""
    spread = args.tokens // 2 if args.first else 0
    return range(args.tokens - spread, args.tokens + spread + 1)


def cpu_seconds(pid: int) -> dict[str, float]:
    """CPU time of a process: its first thread's (the API's event loop, the engine's steps), and others'."""
    found: dict[str, float] = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        name = "first" if int(task.name) == pid else "others"
        used = int((task / "schedstat").read_text().split()[0]) * 1e-9
        found[name] = found.get(name, 0.0) + used
    return found


def child_of(pid: int) -> int:
    """The engine's process."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            return int(child)
    raise RuntimeError("the server has no engine")


def measure(port: int, pid: int, args: argparse.Namespace, name: str) -> dict[str, Any]:
    """One run."""
    pids = {"api": pid, "engine": child_of(pid)}
    before = {name: cpu_seconds(number) for name, number in pids.items()}
    own, begin = time.process_time(), time.perf_counter()
    answers = uvloop.run(load(port, args.clients, lengths_of(args), args.seconds, name))
    seconds, own = time.perf_counter() - begin, time.process_time() - own
    used = {
        name: {thread: t - before[name].get(thread, 0.0) for thread, t in cpu_seconds(number).items()}
        for name, number in pids.items()
    }
    bad = next((a.data for a in answers if not a.data.startswith(b"HTTP/1.1 200")), None)
    if bad is not None:
        raise RuntimeError(f"an answer is no stream: {bad[:300]!r}")
    # The role comes in a chunk of its own, the tokens in the others.
    chunks = sum(answer.data.count(b"data: {") for answer in answers)
    tokens = sum(answer.tokens for answer in answers)
    api, engine = sum(used["api"].values()), sum(used["engine"].values())
    first = sorted(1e3 * (answer.first - answer.begin) for answer in answers)
    return {
        "answers": len(answers),
        "chunks_per_s": chunks / seconds,
        "tokens_per_s": tokens / seconds,
        "tokens_per_chunk": tokens / (chunks - len(answers)),
        "chunks_per_api_cpu_s": chunks / api,
        "tokens_per_engine_cpu_s": tokens / engine,
        "chunks_per_server_cpu_s": chunks / (api + engine),
        "bytes_per_chunk": sum(len(answer.data) for answer in answers) / chunks,
        "client_cpu_share": own / seconds,
        "server_cpu_share": (api + engine) / seconds,
        "threads": {name: {t: round(s, 3) for t, s in kinds.items()} for name, kinds in used.items()},
        "first_ms": {
            "median": statistics.median(first),
            "p90": first[int(0.9 * len(first))],
            "least": first[0],
        },
        "requests": [(answer.id, answer.begin, answer.first) for answer in answers],
    }  # fmt: skip


def add_overhead(run: dict[str, Any], times: dict[str, list[float]]) -> None:
    """Put the API's share of the times to first tokens beside them, ms."""
    before, after = [], []
    for name, begin, first in run.pop("requests"):
        arrival, token = times[name]
        before.append(1e3 * (arrival - begin))
        after.append(1e3 * (first - token))
    sums = sorted(a + b for a, b in zip(before, after, strict=True))
    run["first_ms"] |= {
        "api_median": statistics.median(sums),
        "api_p90": sums[int(0.9 * len(sums))],
        "before_median": statistics.median(before),
        "after_median": statistics.median(after),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="What the API costs by itself.")
    parser.add_argument("model")
    parser.add_argument("--clients", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--step-ms", type=float, default=0.0)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--first", action="store_true", help="times to first tokens")
    parser.add_argument("--json", action="store_true")
    given = sys.argv[1:]
    place = given.index("--") if "--" in given else len(given)
    args = parser.parse_args(given[:place])
    folder = tempfile.TemporaryDirectory()
    times = Path(folder.name) / "times.json"
    command = [sys.executable, "-m", "benchmarks.null_server", args.model, "--port", "0"]
    command += ["--served-model-name", "null", "--max-num-seqs", str(max(args.clients, 1))]
    if args.first:
        command += ["--times", str(times)]
    command += ["--max-model-len", "2048", "--step-ms", str(args.step_ms), *given[place + 1 :]]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        line = server.stdout.readline()
        told = re.search(r":(\d+)/v1$", line.strip())
        if told is None:
            print(f"the server did not start: {line!r}", file=sys.stderr)
            return 1
        cores = sorted(os.sched_getaffinity(0))
        if len(cores) > 1:
            for pid in (server.pid, child_of(server.pid)):
                for task in Path(f"/proc/{pid}/task").iterdir():
                    os.sched_setaffinity(int(task.name), cores[:1])
            os.sched_setaffinity(0, cores[1:2])
        port = int(told.group(1))
        uvloop.run(load(port, args.clients, lengths_of(args), 0.5, "warm"))  # warm up
        runs = [measure(port, server.pid, args, f"run{run}") for run in range(args.runs)]
    finally:
        server.terminate()
        server.wait(30)
    with folder:
        for run in runs:
            if args.first:
                add_overhead(run, json.loads(times.read_text()))
            else:
                run.pop("requests")
    best = min(runs, key=lambda r: r["first_ms"]["api_median"]) if args.first else max(
        runs, key=lambda r: float(r["chunks_per_s"])
    )  # fmt: skip
    if args.json:
        print(json.dumps({"best": best, "runs": runs}))
        return 0
    if args.first:
        ms = best["first_ms"]
        print(
            f"{args.clients} clients: first token after {ms['median']:.2f} ms (median), of which the API's "
            f"{ms['api_median']:.2f} (p90 {ms['api_p90']:.2f}): {ms['before_median']:.2f} before the engine, "
            f"{ms['after_median']:.2f} after it; {best['chunks_per_s']:,.0f} chunks/s meanwhile"
        )
    else:
        print(
            f"{args.clients} clients: {best['chunks_per_s']:,.0f} chunks/s of {best['bytes_per_chunk']:.0f} "
            f"bytes, {best['tokens_per_chunk']:.2f} tokens each; per CPU second: "
            f"{best['chunks_per_api_cpu_s']:,.0f} chunks of the API, "
            f"{best['tokens_per_engine_cpu_s']:,.0f} tokens of the engine, "
            f"{best['chunks_per_server_cpu_s']:,.0f} chunks of both"
        )
    print(f"  CPU seconds by thread: {best['threads']}; share of a core: server "
          f"{best['server_cpu_share']:.2f}, clients {best['client_cpu_share']:.2f}")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
