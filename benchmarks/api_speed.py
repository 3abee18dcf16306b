"""What the API costs by itself: a server whose engine has no model (`benchmarks.null_server`), and clients.

Streams: `--clients` connections keep asking for chats of `--tokens` tokens. Told are chunks per second by the
clock, and per second of CPU time of either process (API, engine): other work on the machine disturbs these
less. Server and clients are pinned to a core each where there are two. The best of `--runs` counts. With
`--step-ms` the engine gives one token to each request in so many milliseconds; without, as fast as it can,
and the API joins what it cannot send one by one: chunks are then fewer than tokens.

First tokens (`--first`): each client asks for one token again and again; told are percentiles of the time
from its request to the answer's first event. All of it is overhead, since the engine computes nothing.

    python -m benchmarks.api_speed MODEL [--clients 256] [--tokens 128] [--seconds 5] [--json] [-- OPTIONS]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import uvloop

PROMPT = "Tell me a long story about a small book. " * 4


class Client(asyncio.Protocol):
    """Asks again and again on one connection, until `until`. Times are of `time.perf_counter`."""

    def __init__(self, request: bytes, until: float, ended: asyncio.Future[None]):
        self._request = request
        self._until = until
        self._ended = ended
        self._parts: list[bytes] = []
        self._begin = 0.0
        self.answers: list[tuple[float, bytes]] = []  # seconds to the first byte, whole answer

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport
        self._ask()

    def _ask(self) -> None:
        self._begin = time.perf_counter()
        self._first = 0.0
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        # The head comes by itself; what counts is the first event.
        if not self._first and b"data: " in data:
            self._first = time.perf_counter() - self._begin
        self._parts.append(data)
        if data.endswith(b"0\r\n\r\n"):
            self.answers.append((self._first, b"".join(self._parts)))
            self._parts = []
            if time.perf_counter() < self._until:
                self._ask()
            else:
                self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        if self._parts or error:
            self._ended.set_exception(RuntimeError(f"an answer broke off: {error}"))
        else:
            self._ended.set_result(None)


async def load(port: int, clients: int, tokens: int, seconds: float) -> list[tuple[float, bytes]]:
    """All answers that clients got in some time (and until the last one's end)."""
    loop = asyncio.get_running_loop()
    messages = [{"role": "user", "content": PROMPT}]
    body = {"messages": messages, "stream": True, "max_tokens": tokens, "ignore_eos": True}
    data = json.dumps(body).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    request = head + b"content-length: %d\r\n\r\n" % len(data) + data
    until = time.perf_counter() + seconds
    ended = [loop.create_future() for _ in range(clients)]
    made = [
        await loop.create_connection(lambda e=e: Client(request, until, e), "127.0.0.1", port)  # type: ignore[misc]
        for e in ended
    ]
    await asyncio.gather(*ended)
    return [answer for _, client in made for answer in client.answers]


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


def measure(port: int, pid: int, args: argparse.Namespace) -> dict[str, Any]:
    """One run."""
    pids = {"api": pid, "engine": child_of(pid)}
    before = {name: cpu_seconds(number) for name, number in pids.items()}
    own, begin = time.process_time(), time.perf_counter()
    answers = uvloop.run(load(port, args.clients, args.tokens, args.seconds))
    seconds, own = time.perf_counter() - begin, time.process_time() - own
    used = {
        name: {thread: t - before[name].get(thread, 0.0) for thread, t in cpu_seconds(number).items()}
        for name, number in pids.items()
    }
    bad = [data for _, data in answers if not data.startswith(b"HTTP/1.1 200")]
    if bad:
        raise RuntimeError(f"an answer is no stream: {bad[0][:300]!r}")
    # The role comes in a chunk of its own, the tokens in the others.
    chunks = sum(data.count(b"data: {") for _, data in answers)
    tokens = len(answers) * args.tokens
    api, engine = sum(used["api"].values()), sum(used["engine"].values())
    first = sorted(1e3 * t for t, _ in answers)
    return {
        "answers": len(answers),
        "chunks_per_s": chunks / seconds,
        "tokens_per_s": tokens / seconds,
        "tokens_per_chunk": tokens / (chunks - len(answers)),
        "chunks_per_api_cpu_s": chunks / api,
        "tokens_per_engine_cpu_s": tokens / engine,
        "chunks_per_server_cpu_s": chunks / (api + engine),
        "bytes_per_chunk": sum(len(data) for _, data in answers) / chunks,
        "client_cpu_share": own / seconds,
        "server_cpu_share": (api + engine) / seconds,
        "threads": {name: {t: round(s, 3) for t, s in kinds.items()} for name, kinds in used.items()},
        "first_ms": {
            "median": statistics.median(first),
            "p90": first[int(0.9 * len(first))],
            "least": first[0],
        },
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description="What the API costs by itself.")
    parser.add_argument("model")
    parser.add_argument("--clients", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--step-ms", type=float, default=0.0)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--first", action="store_true", help="one token an answer: the time to it")
    parser.add_argument("--json", action="store_true")
    given = sys.argv[1:]
    place = given.index("--") if "--" in given else len(given)
    args = parser.parse_args(given[:place])
    if args.first:
        args.tokens = 1
    command = [sys.executable, "-m", "benchmarks.null_server", args.model, "--port", "0"]
    command += ["--served-model-name", "null", "--max-num-seqs", str(max(args.clients, 1))]
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
        uvloop.run(load(port, args.clients, args.tokens, 0.5))  # warm up
        runs = [measure(port, server.pid, args) for _ in range(args.runs)]
    finally:
        server.terminate()
        server.wait(30)
    best = min(runs, key=lambda r: r["first_ms"]["median"]) if args.first else max(
        runs, key=lambda r: float(r["chunks_per_s"])
    )  # fmt: skip
    if args.json:
        print(json.dumps({"best": best, "runs": runs}))
        return 0
    if args.first:
        print(
            f"{args.clients} clients: first token after {best['first_ms']['median']:.2f} ms (median; "
            f"p90 {best['first_ms']['p90']:.2f}, least {best['first_ms']['least']:.2f}), "
            f"{best['answers'] / args.seconds:,.0f} answers/s"
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
