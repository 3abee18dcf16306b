"""What one request may come to, all its choices together: a small body can ask for very much."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.errors import RequestError
from octavo.sampling_params import SamplingParams

MOST_LOGPROBS = 1 << 22
"""Log-probabilities: each takes a few hundred bytes on its way, so this is about a GB."""

MOST_VALUES = 1 << 24
"""Token ids and the like that are sent to the engine, which gets them anew for each choice."""

_TEXT = 8  # characters that count as one value


def check_bounds(
    prompts: Sequence[Sequence[int]], params: SamplingParams, room: int, vocab_size: int
) -> None:
    """Refuse a request that would take more memory than others can spare.

    Args:
        prompts: token ids of each.
        room: tokens of the context.
        vocab_size: tokens that there are, of each of which -1 asks for the log-probability.

    Raises:
        RequestError: naming the setting.
    """
    lengths = [len(prompt) for prompt in prompts]
    _check_logprobs(lengths, params, room, vocab_size)
    choices = params.n * len(prompts)
    values = params.n * sum(lengths) + choices * _values(params)
    if values > MOST_VALUES:
        raise RequestError(
            f"{choices} choices, with their prompts, lists of tokens and forms, come to {values} values: at "
            f"most {MOST_VALUES} are taken in one request, so lower n or the number of prompts, or shorten "
            "these",
            "n",
        )


def _values(params: SamplingParams) -> int:
    """What the settings of each choice come to."""
    lists = (params.allowed_token_ids, params.stop_token_ids, params.logit_bias, params.logit_bias)
    stop = [params.stop] if isinstance(params.stop, str) else params.stop or []
    texts = [*stop, *(params.bad_words or ())]
    if params.structured_outputs is not None:
        texts.append(params.structured_outputs.text)
    return sum(len(ids) for ids in lists if ids) + sum(len(text) // _TEXT for text in texts)


def _check_logprobs(lengths: Sequence[int], params: SamplingParams, room: int, vocab_size: int) -> None:
    most = params.max_tokens or room
    of_outputs = params.n * sum(min(most, max(room - length, 0)) for length in lengths)
    for name, each, tokens in (
        ("logprobs", params.logprobs, of_outputs),
        ("prompt_logprobs", params.prompt_logprobs, sum(lengths)),
    ):
        if each is None:
            continue
        if (count := tokens * (vocab_size if each < 0 else each + 1)) > MOST_LOGPROBS:
            raise RequestError(
                f"{name}={each} of up to {tokens} tokens are {count} log-probabilities: at most "
                f"{MOST_LOGPROBS} are made for one request, so lower it, or max_tokens, n or the number of "
                "prompts",
                name,
            )
