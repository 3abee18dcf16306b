"""Pictures are well-formed SVG whose points lie where the figures say."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest

from octavo.bench.plot import Chart, Series, _log_ticks, _ticks, draw

SVG = "{http://www.w3.org/2000/svg}"


def test_points_are_placed_by_their_values():
    chart = Chart(
        "A & B", "x", "y", [Series("one", [(1, 0.0), (4, 10.0)]), Series("two", [(1, 5.0)], dashed=True)]
    )
    root = ElementTree.fromstring(draw([chart, chart], "caption < more"))
    assert root.attrib["width"] == "1040"
    dots = [(float(c.attrib["cx"]), float(c.attrib["cy"])) for c in root.iter(f"{SVG}circle")]
    assert len(dots) == 4
    (x0, y0), (x1, y1) = dots[:2]
    assert x0 < x1 and y0 > y1  # upwards
    lines = [line.attrib["points"] for line in root.iter(f"{SVG}polyline")]
    assert float(lines[1].split(",")[1]) == pytest.approx((y0 + y1) / 2, abs=0.1)
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert {"A & B", "one", "two", "caption < more", "1", "4"} <= set(texts)


@pytest.mark.parametrize("points", [[], [(0, 1.0)], [(1, float("nan"))]])
def test_what_cannot_be_drawn_is_refused(points):
    with pytest.raises(ValueError, match="title"):
        draw([Chart("title", "x", "y", [Series("s", points)])], "")


@pytest.mark.parametrize(("most", "last"), [(0, 1), (0.3, 0.3), (7, 8), (99, 100), (11111, 12500)])
def test_ticks_are_round_and_reach_the_top(most, last):
    ticks = _ticks(most)
    assert ticks[0] == 0 and ticks[-1] == pytest.approx(last) and 2 <= len(ticks) <= 7


def test_logarithmic_ticks_enclose_the_range():
    assert _log_ticks(3.0, 40.0) == pytest.approx([2, 5, 10, 20, 50])
    assert _log_ticks(2.0, 2.0) == pytest.approx([2, 5])
