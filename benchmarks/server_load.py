"""A server under load: many streaming clients for minutes; some hang up, some ask nonsense.

Each client asks again and again, with prompts and answers of mixed lengths: plain, with a form that the
answer must have, or with tools where `--tools` is given. A fifth hang up at some point of the answer, a
twentieth send something that is refused. Checked at the end: no answer with a status of 500 or above, none
that breaks off or differs from its form, KV cache empty, memory as after a warm-up by the same clients, and
that server and clients agree on the median time to a first token. Before the warm-up, prompts that fill the
KV cache more than once touch all of its memory, whose pages would else count as growth whenever they are met.

    python -m benchmarks.server_load MODEL [--clients 200] [--minutes 10] [--output FILE.json] [-- OPTIONS]

OPTIONS are those of `octavo serve`.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import json
import os
import random
import re
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

WORDS = (
    "river stone lantern harvest copper window letter garden winter engine silver market bridge forest "
    "candle harbour mountain teacher island library"
).split()
FORM = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "count": {"type": "integer", "maximum": 99}},
    "required": ["name", "count"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}},
    },
}
BAD: list[tuple[bytes, int]] = [
    (b'{"messages": [', 400),
    (b"{}", 400),
    (b'{"messages": [{"role": "user", "content": "x"}], "temperature": -1}', 400),
    (b'{"messages": [{"role": "user", "content": "x"}], "n": 1000}', 400),
    (b'{"model": "nobody", "messages": [{"role": "user", "content": "x"}]}', 404),
]


@dataclass
class Seen:
    """What all clients have seen."""

    statuses: collections.Counter[int] = field(default_factory=collections.Counter)
    kinds: collections.Counter[str] = field(default_factory=collections.Counter)
    wrong: list[str] = field(default_factory=list)
    first: list[float] = field(default_factory=list)  # seconds to the first token
    tokens: int = 0


def request(draw: random.Random, tools: bool) -> tuple[str, dict[str, Any]]:
    """(kind, body) of a chat."""
    words = int(min(400, draw.lognormvariate(3.0, 1.0))) + 3
    text = " ".join(draw.choices(WORDS, k=words))
    system = " ".join(WORDS) if draw.random() < 0.5 else "Answer briefly."  # half share a beginning
    body: dict[str, Any] = {
        "messages": [{"role": "system", "content": system}, {"role": "user", "content": text}],
        "max_tokens": int(min(200, draw.lognormvariate(3.0, 0.8))) + 2,
        "stream": True,
        "temperature": draw.choice([0, 0.8]),
        "stream_options": {"include_usage": True},
    }
    kind = draw.choices(["plain", "form", "tool"], [8, 1, 1 if tools else 0])[0]
    if kind == "form":
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "x", "schema": FORM}}
        body["max_tokens"] = 120
    if kind == "tool":
        body |= {"tools": [TOOL], "tool_choice": "required", "max_tokens": 120}
    return kind, body


async def ask(port: int, data: bytes, seen: Seen, kind: str, leave_after: int | None) -> None:
    """One request; the answer is checked as far as its kind tells what it must be."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        begin = time.perf_counter()
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(data) + data
        )
        head = await reader.readuntil(b"\r\n\r\n")
        status = int(head.split(b" ", 2)[1])
        seen.statuses[status] += 1
        if status != 200:
            told = (await reader.read()).decode("utf-8", "replace")
            if status >= 500 or kind != "bad":
                seen.wrong.append(f"{status} for a request of kind {kind}: {told[-300:]}")
            return
        text, events, reason, done, usage = "", 0, None, False, 0
        while line := await reader.readline():
            if not line.startswith(b"data: "):
                continue
            if line.startswith(b"data: [DONE]"):
                done = True
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                seen.wrong.append(f"an error in a stream of kind {kind}: {chunk['error']}")
                return
            if chunk.get("usage"):
                usage = chunk["usage"]["completion_tokens"]
            for choice in chunk["choices"]:
                text += choice["delta"].get("content") or ""
                reason = choice.get("finish_reason") or reason
            events += 1
            if events == 1:  # it tells the role, and is sent with the first token
                seen.first.append(time.perf_counter() - begin)
            if leave_after is not None and events > leave_after:
                return
        seen.tokens += usage
        if not done or reason is None:
            seen.wrong.append(f"a stream of kind {kind} broke off after {events} events")
        elif kind == "form" and reason == "stop":
            json.loads(text)
    finally:
        writer.close()


async def client(port: int, number: int, until: float, seen: Seen, tools: bool) -> None:
    """Asks until the time is over."""
    draw = random.Random(number)
    while time.monotonic() < until:
        kind = "bad" if draw.random() < 0.05 else ""
        if kind:
            data = draw.choice(BAD)[0]
        else:
            kind, body = request(draw, tools)
            data = json.dumps(body).encode()
        leave = draw.randrange(30) if kind != "bad" and draw.random() < 0.2 else None
        seen.kinds[kind if leave is None else f"{kind}, left"] += 1
        try:
            await ask(port, data, seen, kind, leave)
        except (OSError, asyncio.IncompleteReadError, ValueError) as error:
            seen.wrong.append(f"a request of kind {kind} failed: {type(error).__name__}: {error}")


async def get(port: int, path: str) -> str:
    """The body of an answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
    text = (await reader.read()).decode()
    writer.close()
    return text.partition("\r\n\r\n")[2]


async def metrics(port: int) -> dict[str, float]:
    """The server's metrics, summed over labels; `ttft B` are the first tokens that took at most B seconds."""
    text = await get(port, "/metrics")
    found: dict[str, float] = collections.defaultdict(float)
    for name, value in re.findall(r"^([a-zA-Z_:]+)(?:\{.*\})? ([-+.e0-9]+)$", text, re.M):
        found[name.split(":")[-1]] += float(value)
    for bound, value in re.findall(
        r'^[a-z]+:time_to_first_token_seconds_bucket\{.*le="([^"]+)".*\} ([.e0-9]+)$', text, re.M
    ):
        found[f"ttft {bound}"] = float(value)
    return found


def median_bounds(before: dict[str, float], after: dict[str, float]) -> tuple[float, float]:
    """Between which bounds of its buckets the median of the server's times to a first token lies, seconds."""
    bounds = [name for name in after if name.startswith("ttft ")]
    counts = [after[name] - before.get(name, 0.0) for name in bounds]  # cumulative
    low = 0.0
    for name, count in zip(bounds, counts, strict=True):
        high = float(name.removeprefix("ttft "))
        if count >= counts[-1] / 2:
            return low, high
        low = high
    raise RuntimeError("the server tells no times to a first token")


async def fill(port: int) -> int:
    """Send prompts, all different, of more tokens than the KV cache holds; returns how many tokens."""
    told = await get(port, "/metrics")
    size, blocks = (
        int(re.search(rf'cache_config_info\{{.*{name}="(\d+)"', told).group(1))  # type: ignore[union-attr]
        for name in ("block_size", "num_gpu_blocks")
    )
    length = json.loads(await get(port, "/v1/models"))["data"][0]["max_model_len"]
    each = min(1024, length - 8)
    draw = random.Random(0)
    numbers = iter(range(-(-blocks * size * 5 // 4 // each)))
    sent = 0

    async def send() -> None:
        nonlocal sent
        for _ in numbers:
            body = {"prompt": [draw.randrange(100, 1000) for _ in range(each)], "max_tokens": 1}
            data = json.dumps(body).encode()
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            writer.write(head + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(data) + data)
            answer = await reader.read()
            writer.close()
            if b" 200 " not in answer[:20]:
                raise RuntimeError(f"a prompt that fills the cache was refused: {answer[-300:]!r}")
            sent += each

    await asyncio.gather(*(send() for _ in range(16)))
    return sent


def resident(pids: list[int]) -> list[int]:
    """Bytes of memory that each process holds of its own."""
    found = []
    for pid in pids:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        found.append(
            sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon:", "RssShmem:")))
        )
    return found


def family(pid: int) -> list[int]:
    """A process and its descendants."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    children = [child for task in tasks for child in (task / "children").read_text().split()]
    return [pid, *(p for child in children for p in family(int(child)))]


async def settled(port: int) -> dict[str, float]:
    """The metrics once nothing runs, or after 30 s."""
    for _ in range(300):
        found = await metrics(port)
        if not found["num_requests_running"] and not found["num_requests_waiting"]:
            break
        await asyncio.sleep(0.1)
    return found


async def load(port: int, clients: int, seconds: float, tools: bool, seed: int) -> Seen:
    """All clients for some time."""
    seen, until = Seen(), time.monotonic() + seconds
    await asyncio.gather(
        *(client(port, seed * clients + number, until, seen, tools) for number in range(clients))
    )
    return seen


async def measure(args: argparse.Namespace, pid: int, port: int) -> dict[str, Any]:
    """Warm up, load, let it settle; what was found."""
    processes = family(pid)
    memory = {"start": resident(processes)}
    filled = await fill(port)
    memory["filled"] = resident(processes)
    warm = await load(port, args.clients, args.warm_up, args.tools, 0)
    before = await settled(port)
    memory["before"] = resident(processes)
    begin = time.perf_counter()
    seen = await load(port, args.clients, args.minutes * 60, args.tools, 1)
    seconds = time.perf_counter() - begin
    after = await settled(port)
    memory["after"] = resident(processes)
    engine = after["time_to_first_token_seconds_sum"] - before["time_to_first_token_seconds_sum"]
    count = after["time_to_first_token_seconds_count"] - before["time_to_first_token_seconds_count"]
    return {
        "model": Path(args.model).name,
        "options": args.options,
        "clients": args.clients,
        "seconds": round(seconds, 1),
        "requests": dict(seen.kinds),
        "statuses": {str(status): n for status, n in sorted(seen.statuses.items())},
        "wrong": (warm.wrong + seen.wrong)[:20],
        "num_wrong": len(warm.wrong) + len(seen.wrong),
        "output_tokens_per_s": round(seen.tokens / seconds, 1),
        "median_ttft_of_server_s": median_bounds(before, after),
        "median_ttft_of_clients_s": round(statistics.median(seen.first), 4) if seen.first else None,
        "num_ttft": [count, len(seen.first)],
        "mean_ttft_of_server_s": round(engine / count, 4) if count else None,
        "mean_ttft_of_clients_s": round(statistics.fmean(seen.first), 4) if seen.first else None,
        "num_processes": len(processes),
        "filled_tokens": filled,
        "memory": memory,  # bytes of the API's process, then of the engine's
        "kv_usage_after": after["kv_cache_usage_perc"],
        "running_after": after["num_requests_running"],
        "waiting_after": after["num_requests_waiting"],
        "cores": os.cpu_count(),
    }


def problems(found: dict[str, Any], growth: float) -> list[str]:
    """What is not as it must be."""
    told = list(found["wrong"])
    told += [f"status {s}: {n} times" for s, n in found["statuses"].items() if int(s) >= 500]
    if found["kv_usage_after"] or found["running_after"] or found["waiting_after"]:
        told.append("requests or KV blocks are left")
    (low, high), median = found["median_ttft_of_server_s"], found["median_ttft_of_clients_s"]
    if median is None or not low * 0.9 - 0.02 <= median <= high * 1.1 + 0.02:
        told.append(
            f"median time to a first token: {median} s by the clients, {low} to {high} s by the server"
        )
    grown = sum(found["memory"]["after"]) / sum(found["memory"]["before"]) - 1
    if grown > growth:
        told.append(f"memory has grown by {100 * grown:.1f}%")
    return told


def main() -> int:
    parser = argparse.ArgumentParser(description="A server under load for minutes.")
    parser.add_argument("model")
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--warm-up", type=float, default=60.0, help="seconds")
    parser.add_argument("--growth", type=float, default=0.05, help="share by which memory may have grown")
    parser.add_argument(
        "--tools", action="store_true", help="calls of tools as well (give the parser behind --)"
    )
    parser.add_argument("--output", help="file for the results, as JSON")
    given = sys.argv[1:]
    place = given.index("--") if "--" in given else len(given)
    args = parser.parse_args(given[:place])
    args.options = given[place + 1 :]
    command = [sys.executable, "-m", "octavo", "serve", args.model, "--port", "0", *args.options]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        line = server.stdout.readline()
        found_port = re.search(r":(\d+)/v1$", line.strip())
        if found_port is None:
            print(f"the server did not start: {line!r}", file=sys.stderr)
            return 2
        found = asyncio.run(measure(args, server.pid, int(found_port.group(1))))
    finally:
        server.terminate()
        code = server.wait(90)
    found["exit_code"] = code
    print(json.dumps(found, indent=1))
    if args.output:
        Path(args.output).write_text(json.dumps(found, indent=1) + "\n")
    told = problems(found, args.growth) + ([f"exit code {code}"] if code else [])
    for problem in told:
        print(f"PROBLEM: {problem}", file=sys.stderr)
    return 1 if told else 0


if __name__ == "__main__":
    sys.exit(main())
