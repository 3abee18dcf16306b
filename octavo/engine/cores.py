"""Which engine core a model needs."""

from __future__ import annotations

from octavo.config import EngineConfig
from octavo.engine.core import EngineCore
from octavo.engine.encoder_core import EncoderCore
from octavo.models.loader import load_model_config
from octavo.models.locate import configured_model
from octavo.models.transformers_config import ENCODER

Core = EngineCore | EncoderCore


def make_core(config: EngineConfig) -> Core:
    """The core that runs the model of the settings: with a cache and a scheduler, or an encoder's.

    Raises:
        ConfigError, ModelError: it cannot be started.
    """
    model = load_model_config(configured_model(config), config.model_impl)
    return EncoderCore(config) if model.implementation == ENCODER else EngineCore(config)
