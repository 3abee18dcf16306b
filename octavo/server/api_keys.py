"""The API keys that a server takes: from its settings, its environment and a file."""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
from pathlib import Path

from octavo.errors import ConfigError
from octavo.server.config import API_KEY_VARIABLE, ServerConfig

logger = logging.getLogger(__name__)


class ApiKeys:
    """Knows which keys open the server.

    Raises (on construction):
        ConfigError: a key that is none; the file of keys cannot be read, or holds none.
    """

    def __init__(self, config: ServerConfig):
        self._config = config
        self._digests = self._read()

    @property
    def wanted(self) -> bool:
        """Whether clients need one at all."""
        return bool(self._digests)

    def allow(self, key: bytes) -> bool:
        """Whether it is one of them, in a time that does not tell how near it came to any."""
        digest = _digest(key)
        return any([hmac.compare_digest(digest, known) for known in self._digests])

    def reload(self) -> None:
        """Read the file once more; the old keys stay if that fails."""
        try:
            self._digests = self._read()
        except ConfigError as error:
            logger.error("%s; the keys are those of before", error)
        else:
            logger.info("%d API keys are known now", len(self._digests))

    def _read(self) -> list[bytes]:
        config = self._config
        keys = list(config.api_key or [])
        if os.environ.get(API_KEY_VARIABLE):
            keys.append(os.environ[API_KEY_VARIABLE])
        if any(not key or key != key.strip() for key in keys):
            # An empty one, of a variable that isn't set say, would let in whoever sends none; white space
            # around it is taken off what clients send.
            raise ConfigError(
                f"api_key (or {API_KEY_VARIABLE}) is empty, or begins or ends with white space: give keys, "
                "or leave it out"
            )
        if config.api_key_file is not None:
            keys += _keys_of(config.api_key_file)
        # Digests have one length, so that the time of a comparison tells nothing about a key.
        return [_digest(key.encode("utf-8", "surrogateescape")) for key in keys]


def _keys_of(path: str) -> list[str]:
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"api_key_file={path!r} cannot be read: {error}") from None
    keys = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not keys:
        raise ConfigError(f"api_key_file={path!r} holds no key: write one a line, or leave the setting out")
    return keys


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
