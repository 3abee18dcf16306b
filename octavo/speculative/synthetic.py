"""Synthetic acceptance: how likely drafts are to stand in a benchmark, whatever the model says of them.

For models of random weights, and for the comparison of engines: acceptance is given as it was published.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from octavo.errors import ConfigError


def parse_rates(given: Any, name: str, count: int | None = None) -> list[float]:
    """Probabilities, from a list or from text such as `0.8,0.6`.

    Args:
        name: of the setting, for errors.
        count: how many there must be; None: any number.

    Raises:
        ConfigError: no such list, a value that is no probability, or another number of them.
    """
    refusal = f"{name}={given!r} is not valid"
    remedy = "give probabilities from 0 to 1, such as 0.8,0.6"
    items: Any = given.split(",") if isinstance(given, str) else given
    if not isinstance(items, (list, tuple)) or not items or any(isinstance(x, bool) for x in items):
        raise ConfigError(f"{refusal}: {remedy}")
    rates = []
    for item in items:
        try:
            rate = float(item)
        except (TypeError, ValueError):
            raise ConfigError(f"{refusal}: {item!r} is no number; {remedy}") from None
        if not 0.0 <= rate <= 1.0:
            raise ConfigError(f"{refusal}: {item} is no probability; {remedy}")
        rates.append(rate)
    if count is not None:
        _check_number(rates, count, refusal)
    return rates


def from_marginals(rates: Sequence[float], count: int) -> list[float]:
    """What each draft's probability is if all before it stood, of those that it stands with all before it.

    Raises:
        ConfigError: they rise, or are not `count`.
    """
    refusal = f"synthetic_acceptance_rates={list(rates)!r} is not valid"
    _check_number(rates, count, refusal)
    for before, rate in zip(rates, rates[1:], strict=False):
        if rate > before:
            raise ConfigError(
                f"{refusal}: {rate} is above {before}, and a draft stands only if those before it do: give "
                "rates that don't rise"
            )
    return [rate / before if before else 0.0 for before, rate in zip([1.0, *rates], rates, strict=False)]


def from_length(length: float, count: int) -> list[float]:
    """Rates by which a step of `count` drafts yields so many tokens in the mean: always the whole number
    below, or one more.

    Raises:
        ConfigError: more than `count` drafts can yield.
    """
    if not 1.0 <= length <= count + 1:
        raise ConfigError(
            f"synthetic_acceptance_length={length:g} is out of range: num_speculative_tokens={count} yield "
            f"{count + 1} tokens at most; give 1 to {count + 1}, or raise that"
        )
    whole = int(length - 1)
    return [1.0 if i < whole else length - 1 - whole if i == whole else 0.0 for i in range(count)]


def _check_number(rates: Sequence[float], count: int, refusal: str) -> None:
    if len(rates) != count:
        raise ConfigError(
            f"{refusal}: it has {len(rates)} rates, num_speculative_tokens is {count}: give one each"
        )


def show_rates(rates: Any) -> str:
    """Rates for logs and tables: `0.8,0.6`."""
    return ",".join(f"{rate:g}" for rate in rates)
