"""Errors of other libraries as a part of ours."""

from __future__ import annotations

import pytest

from octavo.errors import first_line


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (RuntimeError("out of memory"), "out of memory"),
        (RuntimeError("\n  out of memory\nand a trace"), "out of memory"),
        (MemoryError(), "MemoryError"),
        (RuntimeError(" \n"), "RuntimeError"),
    ],
)
def test_the_first_line_or_the_kind(error, line):
    assert first_line(error) == line
