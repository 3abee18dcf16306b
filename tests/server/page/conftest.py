"""A browser for all tests of a module, and pages whose every complaint fails the test that opened them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.server.page.browser import NAMES, Browser, Page, started

Open = Callable[..., contextlib.AbstractContextManager[Page]]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with started() as found:
        if found is None:
            pytest.skip(f"no browser that runs without a screen ({', '.join(NAMES)})")
        yield found


@pytest.fixture
def opened(browser: Browser) -> Open:
    """Opens an address, and checks at the end that the console is silent and that nobody else was asked."""

    @contextlib.contextmanager
    def open_page(url: str, *, expected: str | None = None, **options: Any) -> Iterator[Page]:
        with browser.page(**options) as page:
            page.goto(f"{url}/")
            yield page
            complaints = [one for one in page.complaints() if expected is None or expected not in one]
            assert complaints == []
            others = {one for one in page.requests() if not one.startswith(f"{url}/")}
            assert others <= {"about:blank"}

    return open_page
