"""Messages on a socket: a 4-byte little-endian length, then so many bytes."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

_LENGTH = struct.Struct("<I")


def framed(data: bytes) -> bytes:
    """A message as it goes over the socket."""
    return _LENGTH.pack(len(data)) + data


def send_frame(sock: socket.socket, data: bytes) -> None:
    """Send one frame (blocks while the socket's buffer is full)."""
    sock.sendall(framed(data))


def receive_frame(sock: socket.socket) -> bytearray | None:
    """The next frame, or None if the other side has closed."""
    head = _receive_exactly(sock, _LENGTH.size)
    return None if head is None else _receive_exactly(sock, _LENGTH.unpack(head)[0])


def take_frames(received: bytearray) -> Iterator[bytearray]:
    """The frames at the beginning of what was received that are whole; they are taken out of it."""
    while len(received) >= _LENGTH.size:
        end = _LENGTH.size + _LENGTH.unpack_from(received)[0]
        if len(received) < end:
            return
        frame = received[_LENGTH.size : end]
        del received[:end]
        yield frame


def _receive_exactly(sock: socket.socket, size: int) -> bytearray | None:
    data = bytearray(size)
    view, filled = memoryview(data), 0
    while filled < size:
        count = sock.recv_into(view[filled:])
        if count == 0:
            return None
        filled += count
    return data
