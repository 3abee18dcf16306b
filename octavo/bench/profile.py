"""A workload run once more, under the engine's profiler."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from octavo.bench.workloads import WorkItem, rounds
from octavo.errors import RequestError
from octavo.llm import LLM
from octavo.sampling_params import SamplingParams


def profile_run(llm: LLM, items: Sequence[WorkItem], params: SamplingParams) -> dict[str, Any]:
    """Record the workload's first steps (`profiler_max_iterations`, after `profiler_delay_iterations`).

    Answers are cut where later steps could not be recorded any more.

    Returns:
        Paths of the trace and of its page, and how many steps it holds; or `error`, since what was measured
        before is worth no less without a profile.
    """
    config = llm.config
    most = config.profiler_delay_iterations + config.profiler_max_iterations
    indices = rounds(list(items))[0]
    own = [params.clone(max_tokens=min(items[i].max_tokens, most)) for i in indices]
    prompts: list[Any] = []
    for i in indices:
        messages = items[i].messages
        prompts.append(items[i].prompt if messages is None else llm.render_chat(messages))
    try:
        llm.start_profile()
        llm.generate(prompts, own, use_tqdm=False)
        return msgspec.structs.asdict(llm.stop_profile())
    except RequestError as error:
        return {"error": str(error)}


def profile_lines(summary: dict[str, Any]) -> str:
    """The paths of a profile, under a table."""
    found = summary.get("profile")
    if found is None:
        return ""
    if found.get("error"):
        return f"\nnote: no profile: {found['error']}"
    return f"\nprofile: {found['trace']} ({found['num_steps']} steps), {found['summary']}"
