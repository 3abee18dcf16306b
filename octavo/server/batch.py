"""Runs a file of OpenAI batch requests through the server's own operations, without a socket.

Each line of the input is what POST on its `url` would have got as body, and means the same: it goes
through the same parsing, checks, handler and error mapping. See docs/run-batch.md for both formats.
"""

from __future__ import annotations

import asyncio
import hashlib
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from msgspec import UNSET, Raw, Struct

from octavo.errors import ConfigError, EngineDeadError
from octavo.server.batch_output import BatchError, BatchOutput, BatchResponse, BatchResult
from octavo.server.endpoints import OPERATIONS, Operation
from octavo.server.errors import ApiError, as_api_error, bad_request
from octavo.server.parsing import decode_body
from octavo.server.service import Service

ENDPOINTS: dict[str, Operation] = {
    operation.path: operation
    for operation in OPERATIONS
    if operation.generates and operation.method == "POST"
}
"""What a line may ask for."""


class BatchRequest(Struct, kw_only=True):
    """One line of the input."""

    custom_id: str
    method: str = "POST"
    url: str
    body: Raw


class _OnlyId(Struct):
    custom_id: str | None = None


@dataclass(frozen=True)
class InputLine:
    """A line of the input that isn't blank. `id` is made of its bytes (and of how many equal lines
    stand before it), so that a later run finds the same one."""

    number: int
    data: bytes
    id: str


@dataclass
class BatchCounts:
    """Lines by what became of them. `resumed` had a result from an earlier run; `changed` are those among
    them whose request is no longer what was answered."""

    answered: int = 0
    refused: int = 0
    failed: int = 0
    resumed: int = 0
    changed: int = 0

    @property
    def lines(self) -> int:
        return self.answered + self.refused + self.failed + self.resumed


def read_lines(path: Path) -> Iterator[InputLine]:
    """The lines of an input file.

    Raises:
        ConfigError: the file cannot be read.
    """
    seen: Counter[bytes] = Counter()
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                data = raw.strip()
                if number == 1:
                    data = data.removeprefix(b"\xef\xbb\xbf")  # byte order mark
                if not data:
                    continue
                digest = hashlib.sha256(data).digest()
                name = hashlib.sha256(digest + seen[digest].to_bytes(8, "little")).hexdigest()
                seen[digest] += 1
                yield InputLine(number, data, f"batch_req_{name[:32]}")
    except OSError as error:
        raise ConfigError(f"input file {str(path)!r} cannot be read: {error.strerror}") from None


def requests_left(
    source: Path, output: BatchOutput, max_request_bytes: int, counts: BatchCounts
) -> Iterator[tuple[InputLine, BatchRequest]]:
    """The lines of `source` that have no result in `output` and need an engine for one.

    On the way to each, those before it are counted that an earlier run did, and those that are no request get
    their result.

    Raises:
        ConfigError: a file that cannot be read or written.
    """
    first_line: dict[str, int] = {}
    for line in read_lines(source):
        if line.id in output.line_ids:
            counts.resumed += 1
            _note_id(line, first_line)
            continue
        try:
            request = _parse(line, first_line, max_request_bytes)
        except ApiError as error:
            output.write(BatchResult(line.id, _custom_id(line), None, _as_batch_error(error)))
            counts.refused += 1
            continue
        if request.custom_id in output.custom_ids:
            counts.resumed += 1
            counts.changed += 1
            continue
        yield line, request


async def run_batch(
    service: Service,
    requests: Iterable[tuple[InputLine, BatchRequest]],
    output: BatchOutput,
    max_concurrency: int,
    counts: BatchCounts,
    on_result: Callable[[], None] = lambda: None,
) -> None:
    """Answer requests (as `requests_left` finds them); results are written as they finish.

    Args:
        max_concurrency: most lines under way at once.
        counts: of the run.
        on_result: called after each answer.

    Raises:
        ConfigError: a file that cannot be read or written.
        EngineDeadError: the engine ended; lines without a result are left for the next run.
    """
    room = asyncio.Semaphore(max_concurrency)
    tasks: set[asyncio.Task[None]] = set()
    failures: list[BaseException] = []

    async def answer(line: InputLine, request: BatchRequest) -> None:
        result = await _answer(service, line, request)
        output.write(result)
        assert result.response is not None
        if result.response.status_code < 400:
            counts.answered += 1
        else:
            counts.refused += result.response.status_code < 500
            counts.failed += result.response.status_code >= 500
        on_result()

    def ended(task: asyncio.Task[None]) -> None:
        tasks.discard(task)
        room.release()
        if not task.cancelled() and (error := task.exception()) is not None:
            failures.append(error)

    try:
        for line, request in requests:
            await room.acquire()
            if failures:
                room.release()
                break
            task = asyncio.create_task(answer(line, request))
            tasks.add(task)
            task.add_done_callback(ended)
        while tasks and not failures:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        left = list(tasks)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
    if failures:
        raise failures[0]


def _custom_id(line: InputLine) -> str | None:
    """The custom_id of a line that may be wrong in any other way."""
    try:
        return msgspec.json.decode(line.data, type=_OnlyId).custom_id
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _note_id(line: InputLine, first_line: dict[str, int]) -> None:
    custom_id = _custom_id(line)
    if custom_id is not None:
        first_line.setdefault(custom_id, line.number)


def _parse(line: InputLine, first_line: dict[str, int], max_bytes: int) -> BatchRequest:
    """The request of a line.

    Raises:
        ApiError: the line is none, or its custom_id stands in an earlier line.
    """
    where = f"line {line.number}"
    if len(line.data) > max_bytes:
        raise bad_request(
            f"{where} is larger than {max_bytes} bytes: send less, or raise --max-request-bytes"
        )
    try:
        request = decode_body(line.data, BatchRequest)
    except ApiError as error:
        what = str(error).replace("the request body", "the line")
        raise ApiError(400, f"{where}: {what}", code=error.code, param=error.param) from None
    earlier = first_line.setdefault(request.custom_id, line.number)
    if earlier != line.number:
        raise ApiError(
            400,
            f"{where}: custom_id {request.custom_id!r} stands in line {earlier} too: give each line its own",
            code="duplicate_custom_id",
            param="custom_id",
        )
    if request.url not in ENDPOINTS:
        raise bad_request(f"{where}: url {request.url[:128]!r} is none of {', '.join(ENDPOINTS)}", "url")
    if request.method != "POST":
        raise bad_request(f"{where}: method {request.method[:16]!r} is not POST", "method")
    return request


async def _answer(service: Service, line: InputLine, request: BatchRequest) -> BatchResult:
    """What the server would answer.

    Raises:
        EngineDeadError: which is no answer to this request.
    """
    request_id = uuid.uuid4().hex
    operation = ENDPOINTS[request.url]
    scope = {"headers": [(b"x-request-id", request_id.encode())]}
    try:
        assert operation.request is not None
        body: Any = decode_body(bytes(request.body), operation.request, service.config.strict_fields)
        if getattr(body, "stream", None):  # embeddings and scores have none
            raise bad_request("stream is not available in a batch: leave it out", "stream")
        response: Any = await operation.handler(service, scope, body)
        status, content = response.status_code, bytes(response.body)
    except EngineDeadError:
        raise
    except Exception as error:
        refusal = as_api_error(error)
        status, content = refusal.status, msgspec.json.encode(refusal.body())
    return BatchResult(line.id, request.custom_id, BatchResponse(status, request_id, Raw(content)), None)


def _as_batch_error(error: ApiError) -> BatchError:
    return BatchError(error.code or "invalid_value", str(error), error.param or UNSET)
