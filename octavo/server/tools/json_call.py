"""One call written as a JSON object: `{"name": …, "arguments": {…}}`."""

from __future__ import annotations

import json

from octavo.server.tools.json_reader import JsonReader, Status

_ARGUMENTS = ("arguments", "parameters")


class JsonCall:
    """Reads one call; BROKEN where the object is none.

    Attributes:
        name: the tool's, once it is known for sure.
    """

    def __init__(self) -> None:
        self._json = JsonReader()
        self._told = 0
        self._broken = False
        self.name: str | None = None

    @property
    def status(self) -> Status:
        return Status.BROKEN if self._broken else self._json.status

    @property
    def text(self) -> str:
        """What was read."""
        return self._json.text

    @property
    def begun(self) -> bool:
        """Whether something was read."""
        return len(self._json) > 0

    @property
    def first_key(self) -> str | None:
        """The object's first name."""
        return self._json.first_key

    def feed(self, text: str) -> int:
        """Read on; how many characters belong to the call."""
        used = self._json.feed(text)
        if self.name is None and (name := self._json.member("name")) is not None:
            self.name = _plain_name(name)
            self._broken = self.name is None
        if self._json.status == Status.DONE and (self.name is None or self.arguments() is None):
            self._broken = True
        return used

    @property
    def call_id(self) -> str | None:
        """The call's `id`, where the format has one."""
        text = self._json.member("id")
        return None if text is None else _plain_name(text)

    def arguments(self) -> str | None:
        """The arguments of a complete call as JSON text; None if they are no object."""
        for key in _ARGUMENTS:
            text = self._json.member(key)
            if text is None:
                continue
            if text.startswith('"'):  # an object written as a string, as the API shows it
                text = json.loads(text)
                reader = JsonReader()
                whole = reader.feed(text) == len(text) and reader.status == Status.DONE
                return text if whole and _is_unicode(text) else None
            return text if text.startswith("{") else None
        return "{}"

    def new_arguments(self) -> str | None:
        """What has come of the arguments since the last call; None before they begin."""
        for key in _ARGUMENTS:
            if key in self._json.members:
                start, end = self._json.members[key]
                piece = self._json.slice(max(start, self._told), end)
                self._told = len(self._json)
                return piece
        return None


def _plain_name(text: str) -> str | None:
    """A JSON string's text; None for another value, or one that is no Unicode."""
    name = json.loads(text) if text.startswith('"') else None
    return name if name and _is_unicode(name) else None


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= char <= "\udfff" for char in text)
