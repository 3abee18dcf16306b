"""`octavo run-batch`: a file of OpenAI batch requests in, a file of results out."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.errors import ConfigError

if TYPE_CHECKING:
    from octavo.config import EngineConfig
    from octavo.server.batch import BatchCounts
    from octavo.server.batch_output import BatchOutput
    from octavo.server.config import ServerConfig

SUMMARY = "work through a file of OpenAI batch requests; run again, it resumes"

# The settings of a server that have a meaning without a socket.
_SERVER_SETTINGS = (
    "served_model_name",
    "max_request_bytes",
    "max_prompts_per_request",
    "strict_fields",
    "trust_request_chat_template",
    "default_chat_template_kwargs",
    "enable_auto_tool_choice",
    "tool_call_parser",
    "exclude_tools_when_tool_choice_none",
    "reasoning_parser",
    "return_tokens_as_token_ids",
    "tokenizer_threads",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from octavo.config import EngineConfig
    from octavo.config_options import add_config_arguments
    from octavo.server.config import ServerConfig

    parser.add_argument(
        "-i", "--input-file", required=True, metavar="FILE", help="JSON lines with custom_id, url and body."
    )
    parser.add_argument(
        "-o",
        "--output-file",
        required=True,
        metavar="FILE",
        help="Results, appended as they finish (not in the input's order). Lines that have one are skipped.",
    )
    parser.add_argument(
        "--max-concurrency",
        type=_positive,
        metavar="N",
        help="Most requests given to the engine at once. Default: twice max_num_seqs.",
    )
    parser.add_argument("--disable-tqdm", action="store_true", help="Show no progress.")
    others = tuple(n for n in ServerConfig.__dataclass_fields__ if n not in _SERVER_SETTINGS)
    add_config_arguments(parser, ServerConfig, "requests", skip=others)
    add_config_arguments(parser, EngineConfig, "engine")


def run(args: argparse.Namespace) -> int:
    from octavo.config import EngineConfig
    from octavo.config_options import config_from_args
    from octavo.server.config import ServerConfig

    # Everything that can be wrong with the command line is told before a model is loaded.
    server_config = config_from_args(args, ServerConfig)
    engine_config = config_from_args(args, EngineConfig)
    source, target = Path(args.input_file), Path(args.output_file)
    if source.resolve() == target.resolve():
        raise ConfigError(f"input and output are the same file {str(source)!r}: name another output file")
    total = _count_lines(source)

    from octavo.server.batch_output import BatchOutput

    with BatchOutput(target) as output:
        if output.dropped:
            _say(f"dropped a torn line of {output.dropped} bytes from {target}: its request is run again")
        with contextlib.suppress(asyncio.CancelledError):
            counts = asyncio.run(_run(args, engine_config, server_config, source, output, total))
            _say(_summary(counts))
            return 0
    _say("interrupted: run again to resume")
    return 130


async def _run(
    args: argparse.Namespace,
    engine_config: EngineConfig,
    server_config: ServerConfig,
    source: Path,
    output: BatchOutput,
    total: int,
) -> BatchCounts:
    from octavo.async_llm import AsyncLLM
    from octavo.server.batch import BatchCounts, requests_left, run_batch
    from octavo.server.service import Service

    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    counts = BatchCounts()
    requests = requests_left(source, output, server_config.max_request_bytes, counts)
    first = next(requests, None)
    if first is None:  # nothing that a model is needed for
        return counts
    engine = await AsyncLLM.create(engine_config)
    service = Service(engine, server_config)
    concurrency = args.max_concurrency or 2 * engine_config.max_num_seqs
    try:
        with _progress(total, counts, args.disable_tqdm) as show:

            def on_result() -> None:
                show(engine.stats().generation_tokens)

            left = itertools.chain([first], requests)
            await run_batch(service, left, output, concurrency, counts, on_result)
            on_result()  # lines after the last answer
            return counts
    finally:
        service.close()
        await engine.shutdown(0.0)


@contextlib.contextmanager
def _progress(total: int, counts: BatchCounts, disable: bool) -> Iterator[Callable[[int], None]]:
    """A bar; yields what brings it up to date with the counts, given how many tokens were generated."""
    from tqdm import tqdm

    options: dict[str, Any] = dict(desc="Lines", unit="line", dynamic_ncols=True, disable=disable)
    with tqdm(total=total, initial=counts.lines, **options) as bar:

        def show(generated: int) -> None:
            seconds = bar.format_dict["elapsed"] or 1e-9
            trouble = counts.refused + counts.failed
            bar.set_postfix_str(
                f"{generated / seconds:.1f} output tokens/s" + (f", {trouble} errors" if trouble else ""),
                refresh=False,
            )
            bar.update(counts.lines - bar.n)

        yield show


def _summary(counts: BatchCounts) -> str:
    parts = [f"{counts.answered} answered"]
    if counts.refused:
        parts.append(f"{counts.refused} refused")
    if counts.failed:
        parts.append(f"{counts.failed} failed")
    if counts.resumed:
        parts.append(f"{counts.resumed} done by an earlier run")
    text = ", ".join(parts)
    if counts.changed:
        text += (
            f"; {counts.changed} of these have changed in the input since: delete their results to have "
            "them answered again"
        )
    return text


def _count_lines(path: Path) -> int:
    try:
        with path.open("rb") as file:
            return sum(1 for line in file if line.strip())
    except OSError as error:
        raise ConfigError(f"input file {str(path)!r} cannot be read: {error.strerror}") from None


def _positive(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least 1")
    return int(text)


def _say(text: str) -> None:
    print(f"octavo: {text}", file=sys.stderr)
