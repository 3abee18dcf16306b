"""An engine without a model: its tokens are there at once, so that what is measured is all the rest.

`python -m octavo.bench.null_engine --step-ms MS FD` is an engine core's process as any other (scheduler,
prefix cache, messages), whose executor computes nothing. `NullLLM` is `AsyncLLM` with such a process.
"""

from __future__ import annotations

import argparse
import functools
import logging
import os
import sys
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from octavo.async_llm import AsyncLLM
from octavo.config import EngineConfig
from octavo.engine.client import CoreClient, ProcessClient
from octavo.engine.executor import Executor
from octavo.engine.process import main
from octavo.errors import ConfigError
from octavo.kv.format import KVFormat, KVGroup
from octavo.models.loader import load_model_config
from octavo.models.locate import configured_model, configured_tokenizer
from octavo.planning.budget import useful_blocks
from octavo.step_messages import ModelFacts, StepPlan, StepResult, TokenMasks
from octavo.tokenization.tokenizer import load_tokenizer

if TYPE_CHECKING:
    import asyncio

    from octavo.engine.cores import Core

_BUDGET = 8192  # rows of a step, unless the settings say


class _Done:
    """A step whose tokens are known; they are told when a real one's would be."""

    def __init__(self, result: StepResult, until: float):
        self._result = result
        self._until = until

    def sample(self, masks: TokenMasks) -> None:
        raise ConfigError("the engine without a model knows no forms of output: leave them out")

    def wait(self) -> StepResult:
        if (rest := self._until - time.perf_counter()) > 0:
            time.sleep(rest)
        return self._result


class NullExecutor(Executor):
    """Gives every request one word after another, whatever it asked.

    Args:
        config: model (of which sizes and tokenizer alone are read), max_model_len, max_num_seqs, block_size,
            max_num_batched_tokens count.
        step_seconds: what a step takes at least.
    """

    def __init__(self, config: EngineConfig, step_seconds: float = 0.0):
        source = configured_model(config)
        model = load_model_config(source, config.model_impl)
        given = config.max_model_len
        length = given if isinstance(given, int) else model.max_position_embeddings
        group = KVGroup("full", (0,), KVFormat("bfloat16", config.block_size, 1, 64))
        self.facts = ModelFacts(
            max_model_len=length,
            vocab_size=model.vocab_size,
            groups=[group],
            num_blocks=useful_blocks([group], config.max_num_seqs, length) * 51 // 50 + 1,
            cache_root=bytes(32),
            overlap=False,
            max_num_batched_tokens=config.max_num_batched_tokens or _BUDGET,
            summary={"weights": "none"},
        )
        self._step_seconds = step_seconds
        table = load_tokenizer(configured_tokenizer(config, source)).byte_table(True)
        words = [
            token
            for token in range(model.vocab_size)
            if len(text := table[token]) > 1 and text.isascii() and text.decode().isprintable()
        ]
        if not words:
            raise ConfigError("the tokenizer has no token of ASCII letters: name another model")
        self._words = np.array(words, np.int32)

    def execute(self, plan: StepPlan) -> _Done:
        places = (plan.start + plan.num_rows + 31 * plan.slots) % len(self._words)
        result = StepResult(self._words[places][:, None], plan.samples.astype(np.int32))
        return _Done(result, time.perf_counter() + self._step_seconds)

    def close(self) -> None:
        """There is nothing to free."""


class NullLLM(AsyncLLM):
    """`AsyncLLM` without a model.

    Args:
        step_seconds: what a step takes at least.
    """

    def __init__(
        self,
        config: EngineConfig,
        loop: asyncio.AbstractEventLoop,
        abandoned: threading.Event | None = None,
        restart_engine: bool = False,
        engine_timeout: float = 0.0,
        step_seconds: float = 0.0,
    ):
        self._step_seconds = step_seconds
        super().__init__(config, loop, abandoned, restart_engine, engine_timeout)

    def _start_engine(self) -> CoreClient:
        command = (__name__, "--step-ms", str(1e3 * self._step_seconds))
        return ProcessClient(
            self._processor.config, self._on_outputs, self._on_death, self._abandoned, command, self._watch
        )


def _make_core(step_seconds: float, config: EngineConfig) -> Core:
    from octavo.engine.core import EngineCore

    return EngineCore(config, NullExecutor(config, step_seconds))


def run(arguments: Sequence[str]) -> int:
    """Be the process."""
    parser = argparse.ArgumentParser(description="An engine core without a model, for `NullLLM`.")
    parser.add_argument("--step-ms", type=float, default=0.0)
    parser.add_argument("fd", type=int)
    args = parser.parse_args(arguments)
    return main(args.fd, functools.partial(_make_core, args.step_ms / 1e3))


if __name__ == "__main__":
    code = run(sys.argv[1:])
    logging.shutdown()
    os._exit(code)
