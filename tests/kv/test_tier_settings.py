"""Settings of host and disk tier: one value under two names, and no tier that could not work."""

from __future__ import annotations

import pytest

from octavo.config import EngineConfig
from octavo.errors import ConfigError


@pytest.mark.parametrize(
    "given", [{"swap_space": 4}, {"kv_offloading_size": 4}, {"swap_space": 4, "kv_offloading_size": 4.0}]
)
def test_swap_space_has_two_names(given):
    assert EngineConfig(**given).swap_space == 4
    assert EngineConfig().swap_space == 0


DISK = {"kv_disk_path": "/d", "kv_disk_size": 2, "swap_space": 1}


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"swap_space": 4, "kv_offloading_size": 3}, "swap_space=4 and kv_offloading_size=3"),
        ({"swap_space": 4, "kv_offloading_size": 0}, "swap_space=4 and kv_offloading_size=0"),
        ({"swap_space": -1}, "swap_space=-1"),
        ({"swap_space": float("nan")}, "swap_space=nan"),
        ({"kv_disk_size": 2}, "kv_disk_size=2 needs a folder"),
        ({**DISK, "kv_disk_size": 0}, "kv_disk_path='/d' needs its size"),
        ({**DISK, "swap_space": 0}, "needs swap_space"),
        ({**DISK, "enable_prefix_caching": False}, "enable_prefix_caching"),
        ({**DISK, "prefix_caching_hash_algo": "xxhash"}, "choose sha256"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(given, told):
    with pytest.raises(ConfigError, match=told) as caught:
        EngineConfig(**given)
    assert "\n" not in str(caught.value)
    assert EngineConfig(**DISK).kv_disk_path == "/d"
