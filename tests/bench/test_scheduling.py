"""Scheduling of 512 running requests: what it costs, and that it grows with them and not faster."""

from __future__ import annotations

import pytest

from octavo.bench.scheduling import SchedulingOptions, measure_scheduling
from octavo.errors import ConfigError


@pytest.mark.parametrize("stream", [False, True])
def test_a_step_of_512_requests_takes_about_a_millisecond(stream):
    """CPU time, so that other work on the machine counts little; three times the aim is still refused."""
    figures = measure_scheduling(SchedulingOptions(512, 48, stream))
    assert 0 < figures["median_schedule_us"] and 0 < figures["median_update_us"]
    assert figures["median_step_us"] < 3000


def test_a_step_costs_at_most_in_proportion_to_its_requests():
    small, large = (measure_scheduling(SchedulingOptions(count, 48)) for count in (64, 512))
    assert large["median_step_us"] < 12 * small["median_step_us"]


@pytest.mark.parametrize(
    "wrong", [{"num_seqs": 0}, {"num_seqs": 10**8}, {"num_steps": 0}, {"num_steps": 10**8}]
)
def test_sizes_out_of_range_are_named(wrong):
    with pytest.raises(ConfigError, match=f"{next(iter(wrong))}=.* is out of range"):
        SchedulingOptions(**wrong)
