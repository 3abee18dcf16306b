"""From the fields of a request body to `SamplingParams`, and the checks that both APIs share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.sampling_params import RequestOutputKind, SamplingParams
from octavo.server.errors import bad_request
from octavo.server.protocol import SamplingFields

MAX_SALT_LENGTH = 128
MAX_ID_LENGTH = 256
_SALT_EXCLUDED = "/@\\\0"

_COPIED = (
    "n temperature top_p top_k min_p presence_penalty frequency_penalty repetition_penalty seed stop "
    "logit_bias min_tokens ignore_eos stop_token_ids include_stop_str_in_output skip_special_tokens "
    "spaces_between_special_tokens prompt_logprobs allowed_token_ids bad_words"
).split()
_DEFAULTABLE = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def sampling_params(
    body: SamplingFields, defaults: Mapping[str, Any], max_tokens: int | None, **own: Any
) -> SamplingParams:
    """Sampling settings of a request.

    Args:
        defaults: the model's generation_config; fills what the request leaves out.
        max_tokens: None: as many as the context holds.
        own: fields whose names or meaning differ between the APIs.

    Raises:
        RequestError: a value out of its bounds.
    """
    values = {name: defaults[name] for name in _DEFAULTABLE if defaults.get(name) is not None}
    for name in _COPIED:
        value = getattr(body, name)
        if value is not None:
            values[name] = value
    values["max_tokens"] = max_tokens
    values["output_kind"] = RequestOutputKind.DELTA if body.stream else RequestOutputKind.FINAL_ONLY
    return SamplingParams(**(values | own))


def check_request(body: SamplingFields) -> None:
    """Check the fields that are neither the engine's nor one API's.

    Raises:
        ApiError: 400 naming the field.
    """
    if body.cache_salt is not None:
        check_salt(body.cache_salt)
    if body.stream_options is not None and not body.stream:
        raise bad_request("stream_options needs stream=true: leave it out", "stream_options")
    if body.prompt_logprobs is not None and body.stream:
        raise bad_request("prompt_logprobs is not available in a stream: set stream=false", "prompt_logprobs")
    if body.priority is not None and not -(2**31) <= body.priority < 2**31:
        raise bad_request(f"priority={body.priority} is not valid: give a 32-bit integer", "priority")
    if body.request_id is not None:
        check_request_id(body.request_id, "request_id")


def check_salt(salt: str) -> None:
    """A salt ends up in block keys that other programs may store under paths.

    Raises:
        ApiError: 400 for an empty or long one, or one with `/`, `@`, `\\` or NUL.
    """
    if not 1 <= len(salt) <= MAX_SALT_LENGTH:
        raise bad_request(f"cache_salt has {len(salt)} characters: give 1 to {MAX_SALT_LENGTH}", "cache_salt")
    for char in _SALT_EXCLUDED:
        if char in salt:
            raise bad_request(f"cache_salt holds {char!r}: leave out / @ \\ and NUL", "cache_salt")


def check_request_id(request_id: str, param: str) -> None:
    """Request ids enter logs and answers.

    Raises:
        ApiError: 400 unless it is 1 to 256 printable ASCII characters without spaces.
    """
    if not 1 <= len(request_id) <= MAX_ID_LENGTH or not all("!" <= char <= "~" for char in request_id):
        raise bad_request(
            f"{param} is not valid: give 1 to {MAX_ID_LENGTH} printable ASCII characters without spaces",
            param,
        )
