"""Frames to a process that may have stopped reading: whoever sends never waits for it."""

from __future__ import annotations

import collections
import socket
import threading

from octavo.engine.frames import framed


class FrameSender:
    """Owns the sending half of a socket. Frames arrive whole and in the order of `send`.

    What the socket's buffer takes is sent at once; a thread, started when it is first needed, sends the rest.
    """

    def __init__(self, sock: socket.socket):
        self._socket = sock
        self._changed = threading.Condition()
        self._left: collections.deque[memoryview] = collections.deque()
        self._thread: threading.Thread | None = None
        self._error: OSError | None = None

    def send(self, data: bytes) -> None:
        """Send a frame; returns at once.

        Raises:
            OSError: the other side is gone.
        """
        frame = memoryview(framed(data))
        with self._changed:
            if self._error is not None:
                raise self._error
            if not self._left:
                try:
                    frame = frame[self._socket.send(frame, socket.MSG_DONTWAIT) :]
                except BlockingIOError:
                    pass
                if not frame:
                    return
            self._left.append(frame)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="octavo-core-sender", daemon=True)
                self._thread.start()
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._left:
                    self._changed.wait()
                frame = self._left[0]
            try:
                self._socket.sendall(frame)
            except OSError as error:
                with self._changed:
                    self._error = error
                    self._left.clear()
                return
            with self._changed:
                self._left.popleft()
