"""The log of Octavo's processes: one format, its level from the environment."""

from __future__ import annotations

import logging
import os

from octavo.errors import ConfigError

LEVEL_VARIABLE = "OCTAVO_LOG_LEVEL"
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


def configure_logging(least: int = logging.NOTSET, who: str = "") -> None:
    """Log to standard error from INFO on, or from the level that `OCTAVO_LOG_LEVEL` names.

    For processes that are ours (the server, the engine core): `LLM` leaves logging to its program.

    Args:
        least: a higher level, where less is to be logged.
        who: stands in every line.

    Raises:
        ConfigError: the variable names no level.
    """
    level = os.environ.get(LEVEL_VARIABLE, "INFO").upper()
    if level not in _LEVELS:
        raise ConfigError(f"{LEVEL_VARIABLE}={level} is no level: choose {', '.join(_LEVELS)}")
    logging.basicConfig(
        level=max(logging.getLevelName(level), least),
        format=f"%(asctime)s %(levelname)s {who}%(name)s: %(message)s",
        datefmt="%Y-%m-%d %H:%M:%S",
    )
