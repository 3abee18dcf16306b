"""Bounds of the figures that describe a measurement."""

from __future__ import annotations

from octavo.errors import ConfigError


def at_least(options: object, **lows: float) -> None:
    """Hold attributes to their least values; None, where one may be, passes.

    Raises:
        ConfigError: one is smaller, or no number.
    """
    for name, low in lows.items():
        value = getattr(options, name)
        if value is not None and not value >= low:
            raise ConfigError(f"{name}={value} is not valid: give at least {low}")
