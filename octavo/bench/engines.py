"""Loads models for measurements; measurements with the same settings share one."""

from __future__ import annotations

from octavo.config import EngineConfig
from octavo.llm import LLM


class Engines:
    """Holds the engine that was asked for last; another one takes its place, so that memory holds one."""

    def __init__(self) -> None:
        self._config: EngineConfig | None = None
        self._llm: LLM | None = None

    def get(self, config: EngineConfig) -> LLM:
        """An engine with these settings and an empty prefix cache. It is this object's: do not close it.

        Raises:
            ConfigError, ModelError: it cannot be loaded.
        """
        if self._llm is None or self._config != config:
            self.close()
            self._llm, self._config = LLM(**vars(config)), config
        self._llm.reset_prefix_cache()
        return self._llm

    def close(self) -> None:
        """Free the engine."""
        llm, self._llm = self._llm, None
        if llm is not None:
            llm.close()

    def __enter__(self) -> Engines:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
