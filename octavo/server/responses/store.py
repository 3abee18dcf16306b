"""Responses that later requests may ask for, in bounded memory."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from octavo.server.protocol.requests import ChatMessage

_OVERHEAD = 1024  # bytes that an entry takes besides its texts


@dataclass(frozen=True)
class StoredResponse:
    """A finished response.

    Attributes:
        body: as JSON.
        messages: the conversation that it ends, without its instructions.
        num_bytes: what counts against the store's limit. Messages that several responses share count
            for each, so that the limit holds whichever of them goes first.
    """

    body: bytes
    messages: list[ChatMessage]
    num_bytes: int


class ResponseStore:
    """Keeps responses by id; the one that was used least recently gives way. Lost when the server ends."""

    def __init__(self, limit: int):
        self.limit = limit
        self.num_bytes = 0
        self._entries: OrderedDict[str, StoredResponse] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, response_id: str, body: bytes, messages: list[ChatMessage]) -> bool:
        """Keep a response; False if it alone is larger than the limit."""
        size = _OVERHEAD + len(body) + sum(_size(message) for message in messages)
        if size > self.limit:
            return False
        self.delete(response_id)
        self._entries[response_id] = StoredResponse(body, messages, size)
        self.num_bytes += size
        while self.num_bytes > self.limit:
            self.delete(next(iter(self._entries)))
        return True

    def get(self, response_id: str) -> StoredResponse | None:
        """A response, None if it is not kept (any more)."""
        entry = self._entries.get(response_id)
        if entry is not None:
            self._entries.move_to_end(response_id)
        return entry

    def delete(self, response_id: str) -> bool:
        """Forget a response; False if it is not kept."""
        entry = self._entries.pop(response_id, None)
        if entry is None:
            return False
        self.num_bytes -= entry.num_bytes
        return True


def _size(message: ChatMessage) -> int:
    content = message.content or ""
    texts = [content] if isinstance(content, str) else [part.text or "" for part in content]
    texts.append(message.reasoning_content or "")
    for call in message.tool_calls or ():
        texts.append(f"{call.function.name}{call.function.arguments}")
    return 64 + sum(64 + 4 * len(text) for text in texts)  # at most 4 bytes a character
