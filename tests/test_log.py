"""The log's level comes from the environment, or the process says why not."""

from __future__ import annotations

import logging

import pytest

from octavo.errors import ConfigError
from octavo.log import configure_logging


def test_level_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, object]] = []
    monkeypatch.setattr(logging, "basicConfig", lambda **options: calls.append(options))
    monkeypatch.delenv("OCTAVO_LOG_LEVEL", raising=False)
    configure_logging()
    monkeypatch.setenv("OCTAVO_LOG_LEVEL", "warning")
    configure_logging()
    configure_logging(logging.ERROR)  # never less than is asked for
    assert [call["level"] for call in calls] == [logging.INFO, logging.WARNING, logging.ERROR]
    monkeypatch.setenv("OCTAVO_LOG_LEVEL", "loud")
    with pytest.raises(ConfigError, match="OCTAVO_LOG_LEVEL=LOUD is no level: choose DEBUG"):
        configure_logging()
