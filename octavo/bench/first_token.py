"""Loads a model and makes one token, telling when: `python -m octavo.bench.first_token`, for `startup`.

Reads one line of JSON (`engine`: settings, `input_len`: tokens of the prompt) and writes one per event.
"""

from __future__ import annotations

import json
import resource
import sys
from typing import Any


def tell(event: str, **values: Any) -> None:
    """Write one event."""
    print(json.dumps({"event": event, **values}), flush=True)


def main() -> int:
    """Do it; the exit code is 1 if it fails, and the last event says why."""
    wanted = json.loads(sys.stdin.readline())
    from octavo.errors import OctavoError

    try:
        from octavo.bench.workloads import random_requests, vocab_bounds
        from octavo.llm import LLM
        from octavo.sampling_params import SamplingParams

        with LLM(**wanted["engine"]) as llm:
            tell("ready", summary=llm.facts.summary)
            params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
            length = (wanted["input_len"], wanted["input_len"])
            [item] = random_requests(1, length, (1, 1), vocab=vocab_bounds(llm.facts.vocab_size))
            llm.generate([item.prompt_token_ids], params, use_tqdm=False)
            tell("first_token", peak_rss=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    except OctavoError as error:
        tell("error", kind=type(error).__name__, message=str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
