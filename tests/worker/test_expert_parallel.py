"""Where `enable_expert_parallel` changes something, and what the log says where it doesn't."""

from __future__ import annotations

import logging

import pytest

from octavo.config import EngineConfig
from octavo.models.loader import load_model_config
from octavo.models.locate import find_model
from octavo.parallel.state import TensorParallelGroup, use_group
from octavo.worker.expert_parallel import expert_parallel
from tests import tiny


@pytest.mark.parametrize(
    ("variant", "size", "asked", "want", "said"),
    [
        ("mixtral", 2, True, True, ""),
        ("mixtral", 2, False, False, ""),
        ("mixtral", 1, True, False, "changes nothing: there is one rank"),
        ("llama", 2, True, False, "changes nothing: LlamaForCausalLM has no experts"),
    ],
)
def test_expert_parallel(
    variant: str, size: int, asked: bool, want: bool, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = load_model_config(find_model(str(tiny.checkpoint(variant))))
    with use_group(TensorParallelGroup(0, size)), caplog.at_level(logging.INFO, "octavo"):
        assert expert_parallel(EngineConfig(enable_expert_parallel=asked), config) is want
    assert (said in caplog.text) if said else not caplog.text
