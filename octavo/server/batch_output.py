"""The output file of a batch: one result a line, appended whole; what is there says what is done."""

from __future__ import annotations

import fcntl
import os
import stat
from pathlib import Path

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from octavo.errors import ConfigError

_START = b'{"id":"batch_req_'


class BatchResponse(Struct):
    """The HTTP answer that the server would have given."""

    status_code: int
    request_id: str
    body: Raw


class BatchError(Struct):
    """Why a line is no request."""

    code: str
    message: str
    param: str | UnsetType | None = UNSET


class BatchResult(Struct):
    """One line of the output: of `response` and `error` one is null."""

    id: str
    custom_id: str | None
    response: BatchResponse | None
    error: BatchError | None


class BatchOutput:
    """Owns the output file, locked, and knows which lines have results.

    Every result is one write of a whole line at the end of the file, so that a kill can tear none but
    the last. Opening mends such a line: it is completed if only its line end is missing, else cut off.

    Attributes:
        line_ids: ids of the results in the file.
        custom_ids: custom_ids that have been answered (with any status).
        dropped: bytes of a torn line that were cut off.

    Raises (on construction):
        ConfigError: a file that can't be opened, is in use by another run, or isn't a batch's output.
    """

    def __init__(self, path: Path):
        self.path = path
        self.line_ids: set[str] = set()
        self.custom_ids: set[str] = set()
        self.dropped = 0
        self._failed: ConfigError | None = None
        self._encoder = msgspec.json.Encoder()
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise ConfigError(f"output file {str(path)!r} cannot be opened: {error.strerror}") from None
        try:
            if not stat.S_ISREG(os.fstat(self._fd).st_mode):
                raise ConfigError(f"output {str(path)!r} is not a file, which resuming needs: name one")
            self._lock()
            self._read()
        except BaseException:
            os.close(self._fd)
            raise

    def write(self, result: BatchResult) -> None:
        """Append a result.

        Raises:
            ConfigError: it cannot be written (no space).
        """
        if self._failed is not None:  # nothing may follow a torn line
            raise self._failed
        data = self._encoder.encode(result) + b"\n"
        try:
            written = os.write(self._fd, data)
            while written < len(data):  # a full disk or a signal: the rest, or an error
                written += os.write(self._fd, data[written:])
        except OSError as error:
            self._failed = ConfigError(
                f"output file {str(self.path)!r} cannot be written: {error.strerror}; run again to resume"
            )
            raise self._failed from None
        self._note(result)

    def close(self) -> None:
        """Let go of the file once its data are on the disk."""
        try:
            os.fsync(self._fd)
        finally:
            os.close(self._fd)

    def __enter__(self) -> BatchOutput:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _lock(self) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"output file {str(self.path)!r} is being written by another run: wait, or name another file"
            ) from None
        except OSError:  # a file system without locks
            pass

    def _read(self) -> None:
        decoder = msgspec.json.Decoder(BatchResult)
        whole = 0
        with open(self._fd, "rb", closefd=False) as file:
            for number, line in enumerate(file, 1):
                try:
                    result = decoder.decode(line)
                except (msgspec.DecodeError, UnicodeDecodeError):
                    torn = not line.endswith(b"\n") and (line.startswith(_START) or _START.startswith(line))
                    if not torn:
                        raise ConfigError(
                            f"output file {str(self.path)!r} holds something else than batch results "
                            f"(line {number}): name another file"
                        ) from None
                    self.dropped = len(line)
                    os.ftruncate(self._fd, whole)
                    return
                whole += len(line)
                self._note(result)
                if not line.endswith(b"\n"):
                    os.write(self._fd, b"\n")

    def _note(self, result: BatchResult) -> None:
        self.line_ids.add(result.id)
        if result.response is not None and result.custom_id is not None:
            self.custom_ids.add(result.custom_id)
