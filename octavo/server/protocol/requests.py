"""Bodies of requests. A field that is None counts as left out."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Protocol

from msgspec import Meta, Struct

from octavo.server.tools.protocol import PastToolCall, Tool, ToolChoice


class StreamOptions(Struct):
    """What a stream reports besides text."""

    include_usage: bool | None = None
    """A last chunk without choices carries the usage; the others carry `usage: null`."""
    continuous_usage_stats: bool | None = None
    """With include_usage: every chunk carries the usage so far."""
    include_obfuscation: bool | None = None
    """Accepted for compatibility; nothing is padded."""


class JsonSchemaFormat(Struct):
    """A schema by OpenAI's `response_format`."""

    name: str
    schema: dict[str, Any] | None = None
    """None: any JSON object."""
    description: str | None = None
    strict: bool | None = None
    """Without effect: the schema always holds."""


class ResponseFormat(Struct, kw_only=True):
    """The form of an answer."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    structures: list[dict[str, Any]] | None = None
    """Of a structural_tag: objects with begin, schema and end."""
    triggers: list[str] | None = None
    """Of a structural_tag: texts with which structures begin."""


class SamplingFields(Struct, kw_only=True):
    """What every generating request may set. Fields left out take the model's generation_config."""

    model: str | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    logit_bias: dict[str, float] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    """Tokens of the prompt's end that are read; -1: as many as leave room for the answer."""
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    cache_salt: str | None = None
    """Requests with different salts share no prefix cache."""
    priority: int | None = None
    """Lower runs first, under the priority policy."""
    request_id: str | None = None
    response_format: ResponseFormat | None = None
    """The form of the answer: text, json_object, json_schema, or vLLM's structural_tag."""
    structured_outputs: dict[str, Any] | None = None
    """The form of the answer, as `StructuredOutputsParams`: json, regex, choice, grammar, …"""
    guided_json: str | dict[str, Any] | None = None
    """An older name of structured_outputs.json; likewise the next ones."""
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    """Log-probabilities name tokens as `token_id:N`."""
    user: str | None = None
    """Accepted for compatibility; without effect."""


class CompletionRequest(SamplingFields, kw_only=True):
    """Body of POST /v1/completions."""

    prompt: str | list[str | int | list[int]]
    """A text, token ids, or a list of texts or of lists of token ids (not mixed)."""
    max_tokens: int | None = 16
    logprobs: int | None = None
    best_of: int | None = None
    """Choices that are made of each prompt; the n whose tokens are likeliest on average are told."""
    echo: bool | None = None
    add_special_tokens: bool | None = None


class EmbeddingRequest(Struct, kw_only=True):
    """Body of POST /v1/embeddings."""

    input: str | list[str | int | list[int]]
    """A text, token ids, or a list of texts or of lists of token ids."""
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    """Numbers, or the base64 of little-endian float32."""
    dimensions: int | None = None
    """Leading numbers to keep; the rest is left out before the embedding gets length 1."""
    normalize: bool | None = None
    truncate_prompt_tokens: int | None = None
    """Tokens of a text's beginning that are read; -1: as many as the model takes."""
    prompt_name: str | None = None
    """Which of the model's own prompts is put before each text."""
    cache_salt: str | None = None
    """Requests with different salts share no prefix cache."""
    priority: int | None = None
    """Lower runs first, under the priority policy."""
    request_id: str | None = None
    user: str | None = None
    """Accepted for compatibility; without effect."""


class ContentPart(Struct):
    """A piece of a message; this version takes text alone."""

    type: str
    text: str | None = None


class ChatMessage(Struct):
    """One message of a conversation."""

    role: Annotated[str, Meta(min_length=1, max_length=64)]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[PastToolCall] | None = None
    """Calls that the assistant made."""
    tool_call_id: str | None = None
    """The call whose result a `tool` message is."""
    reasoning_content: str | None = None
    """What the assistant thought; templates choose whether to show it."""
    reasoning: str | None = None
    """The same by another name."""


class TemplateFields(Protocol):
    """How a conversation becomes a prompt (structs cannot have two bases, so each states these fields)."""

    add_generation_prompt: bool | None
    continue_final_message: bool | None
    add_special_tokens: bool | None
    chat_template: str | None
    chat_template_kwargs: dict[str, Any] | None


class ChatRequest(SamplingFields, kw_only=True):
    """Body of POST /v1/chat/completions."""

    messages: list[ChatMessage]
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    chat_template: str | None = None
    """A Jinja template; only if the server was started with --trust-request-chat-template."""
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, str]] | None = None
    """Handed to the chat template."""
    echo: bool | None = None
    """Begin the answer with the last message's text, if that is the assistant's."""
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    reasoning_effort: str | None = None
    """Handed to the chat template."""
    include_reasoning: bool | None = None
    """False: what the model thinks is left out of the answer."""
    store: bool | None = None
    """Accepted for compatibility; nothing is stored."""
    metadata: dict[str, str] | None = None
    """Accepted for compatibility; without effect. Likewise the next ones."""
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    verbosity: str | None = None
    tools: list[Tool] | None = None
    """Functions that the model may call."""
    tool_choice: ToolChoice | None = None
    """Whether it may (auto, as if left out), must (required, or a named function) or must not (none)."""
    parallel_tool_calls: bool | None = None
    """False: at most one call."""


class TokenizeRequest(Struct, kw_only=True):
    """Body of POST /tokenize: a prompt or messages, not both."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    chat_template: str | None = None
    """A Jinja template; only if the server was started with --trust-request-chat-template."""
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Struct, kw_only=True):
    """Body of POST /detokenize."""

    tokens: list[int]
    model: str | None = None


class ScoreRequest(Struct, kw_only=True):
    """Body of POST /v1/score."""

    text_1: str | list[str]
    """A text, which is compared with each of text_2; or a list of as many."""
    text_2: str | list[str]
    model: str | None = None
    truncate_prompt_tokens: int | None = None
    """Tokens of a text's beginning that are read; -1: as many as the model takes."""
    prompt_name: str | None = None
    """Which of the model's own prompts is put before each text."""
    cache_salt: str | None = None
    """Requests with different salts share no prefix cache."""
    priority: int | None = None
    """Lower runs first, under the priority policy."""
    request_id: str | None = None
    user: str | None = None
    """Accepted for compatibility; without effect."""
