"""The engine without a model: every token asked for comes, at the pace that is set, and ends as it should."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time

from octavo.bench.null_engine import NullExecutor, NullLLM
from octavo.config import EngineConfig
from octavo.outputs import RequestOutput
from octavo.sampling_params import RequestOutputKind, SamplingParams
from tests import tiny


def _config() -> EngineConfig:
    return EngineConfig(model=str(tiny.checkpoint("llama")), max_num_seqs=4, max_model_len=128)


def test_its_tokens_are_words_of_the_tokenizer() -> None:
    executor = NullExecutor(_config())
    words = [executor._words[i] for i in range(len(executor._words))]
    assert len(words) > 10
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(str(tiny.checkpoint("llama")))
    texts = [reference.decode([int(word)]) for word in words]
    assert all(len(text) > 1 and text.isascii() and text.isprintable() for text in texts)


def test_streams_as_many_tokens_as_are_asked_for() -> None:
    async def ask(llm: NullLLM, number: int) -> list[RequestOutput]:
        params = SamplingParams(max_tokens=10, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
        return [out async for out in llm.generate([1, 2, 3 + number], params)]

    async def all_of_them() -> tuple[list[list[RequestOutput]], float]:
        loop = asyncio.get_running_loop()
        async with await asyncio.to_thread(NullLLM, _config(), loop, step_seconds=0.02) as llm:
            begin = time.perf_counter()
            return await asyncio.gather(*(ask(llm, i) for i in range(3))), time.perf_counter() - begin

    answers, seconds = asyncio.run(all_of_them())
    assert seconds >= 10 * 0.02
    for outputs in answers:
        assert [len(out.outputs[0].token_ids) for out in outputs] == [1] * 10
        assert all(out.outputs[0].text for out in outputs)
        assert outputs[-1].finished and outputs[-1].outputs[0].finish_reason == "length"


def test_the_benchmark_counts_chunks_and_cpu_time() -> None:
    command = [sys.executable, "-m", "benchmarks.api_speed", str(tiny.checkpoint("llama")), "--clients", "2"]
    command += ["--tokens", "20", "--seconds", "0.3", "--runs", "1", "--step-ms", "4", "--json"]
    done = subprocess.run(
        [*command, "--", "--max-model-len", "512"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    best = json.loads(done.stdout)["best"]
    assert best["tokens_per_chunk"] <= 2 and best["chunks_per_s"] <= 2 * 1.1 * 1000 / 4
    assert best["answers"] >= 2 and best["chunks_per_api_cpu_s"] > 100 and best["first_ms"]["median"] >= 4
