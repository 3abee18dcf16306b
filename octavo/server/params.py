"""From the fields of a request body to `SamplingParams`, and the checks that both APIs share."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from typing import Any, Protocol

from octavo.errors import RequestError
from octavo.sampling_params import RequestOutputKind, SamplingParams
from octavo.server.errors import bad_request
from octavo.server.protocol.requests import ResponseFormat, SamplingFields
from octavo.server.request_ids import MAX_ID_LENGTH, is_request_id
from octavo.structured_outputs import StructuredOutputsParams, structured_outputs_from

_FORM = "structured_outputs"

_COPIED = (
    "n temperature top_p top_k min_p presence_penalty frequency_penalty repetition_penalty seed stop "
    "logit_bias min_tokens ignore_eos stop_token_ids include_stop_str_in_output skip_special_tokens "
    "spaces_between_special_tokens prompt_logprobs allowed_token_ids bad_words truncate_prompt_tokens"
).split()


class Defaults(Protocol):
    """What an engine says of requests that leave settings out."""

    @property
    def most_output_tokens(self) -> int | None: ...

    def default_params(self) -> SamplingParams: ...


def sampling_params(
    body: SamplingFields, engine: Defaults, max_tokens: int | None, **own: Any
) -> SamplingParams:
    """Sampling settings of a request.

    Args:
        engine: its settings fill what the request leaves out, and bound the answer's length.
        max_tokens: None: as many as the context holds.
        own: fields whose names or meaning differ between the APIs.

    Raises:
        RequestError: a value out of its bounds.
    """
    values = {name: value for name in _COPIED if (value := getattr(body, name)) is not None}
    limits = [limit for limit in (max_tokens, engine.most_output_tokens) if limit is not None]
    values["max_tokens"] = min(limits, default=None)
    values["output_kind"] = RequestOutputKind.DELTA if body.stream else RequestOutputKind.FINAL_ONLY
    if (form := output_form(body)) is not None:
        values["structured_outputs"] = form
    return engine.default_params().clone(**(values | own))


def output_form(body: SamplingFields) -> StructuredOutputsParams | None:
    """The form that a request asks its answer to have, by whichever of the fields that may say so.

    Raises:
        ApiError: 400 where several do, or one is wrong or incomplete.
    """
    for name, fields in _forms(body).items():
        try:
            return structured_outputs_from(fields)
        except RequestError as error:
            raise bad_request(_renamed(str(error), _FORM, name), name) from None
    return None


def form_field(body: SamplingFields) -> str:
    """The field that asks for the form of the answer; that of the engine's setting where none does."""
    return next(iter(_forms(body)), _FORM)


def named_by(error: RequestError, names: Mapping[str, str]) -> RequestError:
    """What the engine found wrong, by the names of the fields that its settings came from.

    Args:
        names: a request's field, or several in words, by the setting's name.
    """
    own = error.param or ""
    name = names.get(own, own)
    if name == own:
        return error
    return RequestError(_renamed(str(error), own, name), name.partition(" ")[0], error.code)


def _renamed(message: str, own: str, name: str) -> str:
    """A message that begins with a setting's name, with that of a request's field; made grammars are no
    text of the client's, so that what cites them is left out."""
    if own != name and own == _FORM and name.startswith("tools"):
        message = re.sub(r"(?<=: )at \d+\(\d+\): | \d+ \| .*", "", message, flags=re.DOTALL)
        message = message.replace(f"{own}.grammar", own, 1)
    return re.sub(rf"^{own}\b", name, message)


def _forms(body: SamplingFields) -> dict[str, dict[str, Any]]:
    """What asks for a form, by field.

    Raises:
        ApiError: 400 where several do, or one is incomplete.
    """
    forms: dict[str, dict[str, Any]] = {}
    asked = body.structured_outputs
    if asked is not None and any(value is not None and value is not False for value in asked.values()):
        forms[_FORM] = asked
    for name in ("json", "regex", "choice", "grammar"):
        if (value := getattr(body, f"guided_{name}")) is not None:
            forms[f"guided_{name}"] = {name: value, "whitespace_pattern": body.guided_whitespace_pattern}
    if body.response_format is not None and (fields := _format_fields(body.response_format)):
        forms["response_format"] = fields
    if len(forms) > 1:
        raise bad_request(f"{' and '.join(forms)} are set: give one of them", next(iter(forms)))
    return forms


def _format_fields(given: ResponseFormat) -> dict[str, Any]:
    """Fields of `StructuredOutputsParams`; none for plain text."""
    if given.type == "json_object":
        return {"json_object": True}
    if given.type == "json_schema":
        if given.json_schema is None:
            raise bad_request("response_format.json_schema is missing", "response_format.json_schema")
        schema = given.json_schema.schema
        return {"json_object": True} if schema is None else {"json": schema}
    if given.type == "structural_tag":
        return {"structural_tag": {"structures": given.structures, "triggers": given.triggers}}
    return {}


def check_request(body: SamplingFields) -> None:
    """Check the fields that are neither the engine's nor one API's.

    Raises:
        ApiError: 400 naming the field.
    """
    if body.stream_options is not None and not body.stream:
        raise bad_request("stream_options needs stream=true: leave it out", "stream_options")
    if body.prompt_logprobs is not None and body.stream:
        raise bad_request("prompt_logprobs is not available in a stream: set stream=false", "prompt_logprobs")
    if body.request_id is not None:
        check_request_id(body.request_id, "request_id")


def new_request_id() -> str:
    """A name for a request that brings none: unique, but no secret, so that no system call is spent on it."""
    return f"{random.getrandbits(128):032x}"


def check_request_id(request_id: str, param: str) -> None:
    """Request ids enter logs and answers.

    Raises:
        ApiError: 400 unless it is 1 to 256 printable ASCII characters without spaces.
    """
    if not is_request_id(request_id):
        raise bad_request(
            f"{param} is not valid: give 1 to {MAX_ID_LENGTH} printable ASCII characters without spaces",
            param,
        )
