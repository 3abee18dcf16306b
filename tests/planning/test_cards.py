"""The table of cards, and how they are named."""

from __future__ import annotations

import pytest

from octavo.errors import ConfigError
from octavo.planning.cards import CARDS, GIB, find_card
from octavo.planning.machines import planned_machine


@pytest.mark.parametrize(
    "name,card",
    [
        ("A100-40G", "A100-40G"),
        ("a100 40gb", "A100-40G"),
        ("NVIDIA A100 80GB", "A100-80G"),
        ("nvidia h200", "H200"),
        ("RTX 4090", "RTX-4090"),
        ("NVIDIA GeForce RTX 3090", "RTX-3090"),
        ("4090", "RTX-4090"),
        ("Tesla T4", "T4"),
        ("l4", "L4"),
        ("L40S", "L40S"),
        ("h100_sxm", "H100-SXM"),
        ("b200", "B200"),
    ],
)
def test_names_as_people_write_them(name: str, card: str):
    assert find_card(name).name == card


def test_wrong_and_ambiguous_names_tell_what_there_is():
    with pytest.raises(ConfigError, match="one of several: say H100-SXM or H100-PCIe"):
        find_card("H100")
    with pytest.raises(ConfigError, match=r"not known: choose T4, .*did you mean H200"):
        find_card("H220")
    with pytest.raises(ConfigError, match="not known"):
        find_card("")
    with pytest.raises(ConfigError, match="contradicts device='cpu'"):
        planned_machine("cpu", "T4")


@pytest.mark.parametrize("card", CARDS, ids=lambda c: c.name)
def test_figures_are_of_their_kind(card):
    assert card.source.startswith("https://")
    assert 10 * GIB < card.memory < 200 * GIB
    assert 2e11 < card.bandwidth < 1e13
    assert ("bfloat16" in card.flops) == (card.capability >= (8, 0))
    assert ("fp8" in card.flops) == (card.capability >= (8, 9))
    assert card.flops["float16"] > card.flops["float32"]


def test_the_datasheet_s_memory_is_in_the_name_where_there_is_one():
    for card in CARDS:
        nominal = card.name.rpartition("-")[2]
        if nominal.endswith("G"):
            assert 0.9 < card.memory / (float(nominal[:-1]) * 1e9) <= 1.074
