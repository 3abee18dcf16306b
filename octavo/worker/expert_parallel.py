"""Whether ranks hold whole experts."""

from __future__ import annotations

import logging

from octavo.config import EngineConfig
from octavo.models.config import ModelConfig
from octavo.parallel.state import tensor_parallel_group

logger = logging.getLogger(__name__)


def expert_parallel(config: EngineConfig, model: ModelConfig) -> bool:
    """Whether the model's experts are divided among the ranks whole; where the setting asks for it and
    there is nothing to divide, the log says so."""
    if not config.enable_expert_parallel:
        return False
    if model.moe is None:
        logger.info("enable_expert_parallel changes nothing: %s has no experts", model.architecture)
        return False
    if tensor_parallel_group().size == 1:
        logger.info("enable_expert_parallel changes nothing: there is one rank, which has all experts")
        return False
    return True
