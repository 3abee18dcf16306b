"""How many streamed chunks a second the HTTP server can send, without a model behind it.

A fake engine answers each chat with `--chunks` deltas as fast as it is asked; `--connections` clients
in another process keep asking. A bare ASGI application that sends bytes made beforehand runs under the
same server and clients, as the ceiling. Besides chunks per second of wall time, the server's CPU time
counts: other programs on the machine disturb it less.

    python -m benchmarks.http_streaming [--connections 32] [--chunks 64] [--requests 2000] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import resource
import socket
import time
import types
from collections.abc import AsyncIterator
from typing import Any

import uvicorn

from octavo.config import EngineConfig
from octavo.messages import CoreStats
from octavo.outputs import CompletionOutput, RequestOutput
from octavo.sampling_params import SamplingParams
from octavo.server.app import build_app
from octavo.server.config import ServerConfig
from octavo.server.lifecycle import run
from octavo.server.service import Service


class _Tokenizer:
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [1] * max(len(text) // 4, 1)

    def apply_chat_template(self, messages: Any, **kwargs: Any) -> str:
        return "".join(f"{m['role']}: {m['content']}\n" for m in messages)


class _Engine:
    """Yields one delta per turn of the event loop, as an engine with every request in its batch would."""

    def __init__(self, chunks: int):
        self.config = EngineConfig(model="fake")
        self.tokenizer = _Tokenizer()
        self.model_config = types.SimpleNamespace(vocab_size=1000)
        self.model_name = "fake"
        self.max_model_len = 4096
        self.most_output_tokens = None
        self.cache_root = bytes(32)
        self.facts = types.SimpleNamespace(memory={}, summary={})
        self._chunks = chunks

    def default_params(self) -> SamplingParams:
        return SamplingParams()

    async def check_health(self) -> None:
        pass

    def stats(self) -> CoreStats:
        return CoreStats()

    async def generate(
        self, prompt: list[int], params: SamplingParams, request_id: str, **kwargs: Any
    ) -> AsyncIterator[RequestOutput]:
        for i in range(self._chunks):
            await asyncio.sleep(0)
            last = i == self._chunks - 1
            choice = CompletionOutput(0, " token", [i], finish_reason="length" if last else None)
            yield RequestOutput(request_id, None, prompt, [choice], last)


def _bare(chunks: int) -> Any:
    chunk = b'data: {"id":"chatcmpl-0","choices":[{"index":0,"delta":{"content":" token"}}]}\n\n'

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send(
            {
                "type": "http.response.start",
                "status": 200,
                "headers": [(b"content-type", b"text/event-stream")],
            }
        )
        for _ in range(chunks):
            await asyncio.sleep(0)
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})

    return app


def _serve(kind: str, chunks: int, sock: socket.socket, cpu: Any) -> None:
    if kind == "octavo":
        app: Any = build_app(Service(_Engine(chunks), ServerConfig()))  # type: ignore[arg-type]
    else:
        app = _bare(chunks)
    server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_config=None, access_log=False))

    async def main() -> None:
        task = asyncio.ensure_future(server.serve(sockets=[sock]))
        while not task.done():
            usage = resource.getrusage(resource.RUSAGE_SELF)
            cpu.value = usage.ru_utime + usage.ru_stime
            await asyncio.sleep(0.05)

    run(main())


async def _client(port: int, requests: list[int]) -> int:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    messages = [{"role": "user", "content": "Tell me a long story about a small book. " * 4}]
    body = json.dumps({"model": "fake", "messages": messages, "stream": True}).encode()
    ask = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    ask += b"content-length: %d\r\n\r\n" % len(body) + body
    events = 0
    while requests:
        requests.pop()
        writer.write(ask)
        tail = b""
        while not tail.endswith(b"0\r\n\r\n"):
            data = await reader.read(1 << 16)
            if not data:
                raise RuntimeError("the server closed the connection")
            events += data.count(b"data: {")
            tail = (tail + data)[-16:]
    writer.close()
    return events


async def _load(port: int, connections: int, total: int) -> int:
    requests = list(range(total))
    return sum(await asyncio.gather(*(_client(port, requests) for _ in range(connections))))


def measure(kind: str, connections: int, chunks: int, requests: int) -> dict[str, float]:
    """Chunks per second of wall time and of the server's CPU time."""
    context = multiprocessing.get_context("fork")
    cpu = context.Value("d", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as sock:
        server = context.Process(target=_serve, args=(kind, chunks, sock, cpu), daemon=True)
        server.start()
        port = sock.getsockname()[1]
        asyncio.run(_load(port, connections, connections * 2))  # warm up
        time.sleep(0.2)
        before, start = cpu.value, time.perf_counter()
        events = asyncio.run(_load(port, connections, requests))
        seconds = time.perf_counter() - start
        time.sleep(0.2)
        used = cpu.value - before
        server.terminate()
        server.join()
    return {"events": events, "events_per_s": events / seconds, "events_per_cpu_s": events / used}


def main() -> None:
    parser = argparse.ArgumentParser(description="Chunks per second of the HTTP server, without a model.")
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--chunks", type=int, default=64)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    found = {kind: measure(kind, args.connections, args.chunks, args.requests) for kind in ("octavo", "bare")}
    if args.json:
        print(json.dumps(found))
        return
    for kind, figures in found.items():
        wall, cpu = figures["events_per_s"], figures["events_per_cpu_s"]
        print(f"{kind:8s} {wall:9,.0f} chunks/s   {cpu:9,.0f} per CPU second of the server")


if __name__ == "__main__":
    main()
