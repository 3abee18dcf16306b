"""Bodies of the Responses API: OpenAI's fields, and vLLM's extra ones."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, field

from octavo.server.protocol.answers import Synthetic, TokenLogprob
from octavo.server.tools.protocol import ToolName

Status = Literal["in_progress", "completed", "incomplete", "failed"]
ItemStatus = Literal["in_progress", "completed", "incomplete"]


class InputPart(Struct, kw_only=True):
    """A piece of a message; this version takes text alone."""

    type: str
    """input_text, output_text, reasoning_text or refusal."""
    text: str | None = None
    refusal: str | None = None


class InputItem(Struct, kw_only=True):
    """One item of the input: a message, the result of a call, or an item of an earlier response's output."""

    type: str = "message"
    """message, function_call, function_call_output or reasoning."""
    role: str | None = None
    """user, assistant, system or developer."""
    content: str | list[InputPart] | None = None
    id: str | None = None
    status: str | None = None
    call_id: str | None = None
    """Of a call and its result, which it ties together."""
    name: str | None = None
    """Of a call: the function."""
    arguments: str | None = None
    """Of a call: JSON text."""
    output: str | list[InputPart] | None = None
    """Of a call's result: what the function returned."""


class FunctionTool(Struct, kw_only=True):
    """A function that the model may call."""

    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """A JSON schema of its arguments, an object; None: it has none."""
    strict: bool | None = None
    """Calls follow the schema for sure: a grammar sees to it."""


class AllowedTool(Struct, kw_only=True):
    """One of the tools by its name."""

    type: Literal["function"] = "function"
    name: str


class ToolChoiceItem(Struct, kw_only=True):
    """A choice that names tools: the function to call, or those that may be called."""

    type: Literal["function", "allowed_tools"]
    name: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: list[AllowedTool] | None = None


ResponseToolChoice = Literal["none", "auto", "required"] | ToolChoiceItem


class TextFormat(Struct, kw_only=True, omit_defaults=True):
    """The form of the text."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None
    """Without effect: the schema always holds."""


class TextConfig(Struct, kw_only=True):
    """How the answer's text is to be."""

    format: TextFormat | None = None
    verbosity: str | None = None
    """Accepted for compatibility; without effect."""


class ReasoningConfig(Struct, kw_only=True):
    """How the model is to reason."""

    effort: str | None = None
    """Handed to the chat template."""
    summary: str | None = None
    """Accepted for compatibility; there are no summaries."""


class ResponseStreamOptions(Struct):
    """What a stream reports besides its events."""

    include_obfuscation: bool | None = None
    """Accepted for compatibility; nothing is padded."""


class ResponseRequest(Struct, kw_only=True):
    """Body of POST /v1/responses."""

    input: str | list[InputItem]
    """What the user says, or the items of a conversation."""
    model: str | None = None
    instructions: str | None = None
    """A system message before all others; a response that builds on this one does not take it over."""
    previous_response_id: str | None = None
    """A stored response, whose conversation this request goes on with."""
    store: bool | None = None
    """Keep the response for later requests; by default true where the server stores any."""
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    max_output_tokens: int | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    include: list[str] | None = None
    """message.output_text.logprobs: log-probabilities of the tokens."""
    top_logprobs: int | None = None
    truncation: Literal["auto", "disabled"] | None = None
    """This version knows only disabled: what does not fit the context is refused."""
    background: bool | None = None
    """Refused by this version, like the next two."""
    conversation: Any = None
    prompt: Any = None
    metadata: dict[str, str] | None = None
    """Comes back with the response."""
    user: str | None = None
    """Comes back with the response; without effect. Likewise the next ones."""
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    max_tool_calls: int | None = None
    tools: list[FunctionTool] | None = None
    """Functions that the model may call."""
    tool_choice: ResponseToolChoice | None = None
    """Whether it may (auto, as if left out), must (required, or a named function) or must not (none)."""
    parallel_tool_calls: bool | None = None
    """False: at most one call."""
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    logit_bias: dict[str, float] | None = None
    top_k: int | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    """Tokens of the prompt's end that are read; -1: as many as leave room for the answer."""
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    cache_salt: str | None = None
    """Requests with different salts share no prefix cache."""
    priority: int | None = None
    """Lower runs first, under the priority policy."""
    structured_outputs: dict[str, Any] | None = None
    """The form of the answer, as `StructuredOutputsParams`: json, regex, choice, grammar, …"""
    chat_template_kwargs: dict[str, Any] | None = None


class OutputText(Struct, kw_only=True, tag="output_text"):
    """The text of a message."""

    text: str = ""
    annotations: list[None] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)


class ReasoningText(Struct, kw_only=True, tag="reasoning_text"):
    """What the model thinks."""

    text: str = ""


class OutputMessage(Struct, kw_only=True, tag="message"):
    """What the model says."""

    id: str
    role: Literal["assistant"] = "assistant"
    status: ItemStatus = "in_progress"
    content: list[OutputText] = field(default_factory=list)


class ReasoningItem(Struct, kw_only=True, tag="reasoning"):
    """What the model thinks before it answers; only with --reasoning-parser."""

    id: str
    status: ItemStatus = "in_progress"
    summary: list[None] = field(default_factory=list)
    content: list[ReasoningText] = field(default_factory=list)


class FunctionCallItem(Struct, kw_only=True, tag="function_call"):
    """A call of a function. `arguments` is JSON text."""

    id: str
    call_id: str
    name: str
    arguments: str = ""
    status: ItemStatus = "in_progress"


OutputItem = OutputMessage | ReasoningItem | FunctionCallItem


class InputTokensDetails(Struct):
    """Parts of the prompt's tokens."""

    cached_tokens: int
    """Those that the prefix cache served."""
    cache_write_tokens: int = 0
    """Always 0: entering the cache costs nothing."""


class OutputTokensDetails(Struct):
    """Parts of the answer's tokens."""

    reasoning_tokens: int
    """Those of steps before the answer itself began, marks included."""


class ResponseUsage(Struct):
    """Tokens of a response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(Struct):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseFailure(Struct):
    """Why a response failed."""

    message: str
    code: Literal["server_error"] = "server_error"


class ResponseObject(Struct, kw_only=True):
    """A response, finished or as it grows."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: Status = "in_progress"
    error: ResponseFailure | None = None
    incomplete_details: IncompleteDetails | None = None
    background: Literal[False] = False
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem] = field(default_factory=list)
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: ReasoningConfig
    service_tier: Literal["default"] = "default"
    store: bool
    temperature: float
    text: TextConfig
    tool_choice: ResponseToolChoice
    tools: list[FunctionTool]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None
    user: str | None
    safety_identifier: str | None
    prompt_cache_key: str | None
    max_tool_calls: int | None
    synthetic_acceptance: Synthetic = UNSET


class ResponseDeleted(Struct):
    """Answer of DELETE /v1/responses/{response_id}."""

    id: str
    deleted: Literal[True] = True
    object: Literal["response"] = "response"
