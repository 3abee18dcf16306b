"""Bodies of requests and responses, OpenAI's fields and vLLM's extra ones.

The structs parse requests, encode responses and are the source of the OpenAPI document. A request
field that is None counts as left out.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Protocol

from msgspec import UNSET, Meta, Struct, UnsetType, field

from octavo.server.tools.protocol import PastToolCall, Tool, ToolCall, ToolCallDelta, ToolChoice

FinishReason = Literal["stop", "length", "tool_calls"]


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


Synthetic = list[float] | UnsetType
"""Marks answers of a benchmark in which drafts stand by chance, with the rates: no text of the model's."""


class PromptTokensDetails(Struct):
    """Parts of the prompt's tokens."""

    cached_tokens: int
    """Those that the prefix cache served."""


class Usage(Struct):
    """Tokens of a request, all its choices together."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class PromptLogprob(Struct):
    """Log-probability of a token at a prompt position."""

    logprob: float
    rank: int | None
    decoded_token: str | None


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class CompletionLogprobs(Struct):
    """Log-probabilities in the completion API's form; all lists have one entry per token.

    A prompt's first token has none: null.
    """

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(Struct):
    """One choice of a completion, or what is new of it in a stream."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class Completion(Struct):
    """Answer of POST /v1/completions."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    object: Literal["text_completion"] = "text_completion"
    synthetic_acceptance: Synthetic = UNSET


class CompletionChunk(Struct):
    """One event of a streamed completion."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None | UnsetType = UNSET
    object: Literal["text_completion"] = "text_completion"
    synthetic_acceptance: Synthetic = UNSET


class TopLogprob(Struct):
    """A token that could have stood at a position. `bytes` is its UTF-8, in pieces of characters too."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """The token that stands at a position, and the likeliest there."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    """Log-probabilities in the chat API's form."""

    content: list[TokenLogprob]


class AssistantMessage(Struct):
    """What the model said."""

    content: str | None
    """None beside reasoning or calls without text."""
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    tool_calls: list[ToolCall] | UnsetType = UNSET
    reasoning_content: str | None | UnsetType = UNSET
    """Only with --reasoning-parser."""
    reasoning: str | None | UnsetType = UNSET
    """The same by another name."""


class ChatChoice(Struct):
    """One choice of a chat answer."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(Struct):
    """Answer of POST /v1/chat/completions."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: Literal["chat.completion"] = "chat.completion"
    synthetic_acceptance: Synthetic = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class Delta(Struct):
    """What a chunk adds to a message: the role first, then reasoning, text and calls."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(Struct):
    """What is new of one choice."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(Struct):
    """One event of a streamed chat answer."""

    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    synthetic_acceptance: Synthetic = UNSET


class Embedding(Struct):
    """One text's embedding."""

    index: int
    embedding: list[float] | str
    object: Literal["embedding"] = "embedding"


class EmbeddingResponse(Struct, kw_only=True):
    """Answer of POST /v1/embeddings."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Embedding]
    usage: Usage


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


class Score(Struct):
    """How similar two texts are: the cosine of their embeddings, -1 to 1."""

    index: int
    score: float
    object: Literal["score"] = "score"


class ScoreResponse(Struct, kw_only=True):
    """Answer of POST /v1/score."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Score]
    usage: Usage


class LoadResponse(Struct):
    """Answer of GET /load."""

    server_load: int
    """Requests for texts, embeddings and scores under way."""


class ModelCard(Struct):
    """A name under which the model is served."""

    id: str
    created: int
    root: str
    max_model_len: int
    object: Literal["model"] = "model"
    owned_by: str = "octavo"
    parent: str | None = None


class ModelList(Struct):
    """Answer of GET /v1/models."""

    data: list[ModelCard]
    object: Literal["list"] = "list"


class TokenizeResponse(Struct):
    """Answer of POST /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeResponse(Struct):
    """Answer of POST /detokenize."""

    prompt: str


class PrefixCacheInfo(Struct):
    """What another program needs to compute this server's block keys."""

    enabled: bool
    root: str
    """Hex digest of everything that makes KV values."""
    hash_algorithm: str
    block_size: int


class VersionResponse(Struct):
    """Answer of GET /version."""

    version: str
    prefix_cache: PrefixCacheInfo


class ProfileResponse(Struct):
    """Answer of POST /stop_profile: paths on the server of what was written; with several ranks, each has a
    trace of its own beside the engine's."""

    trace: str
    summary: str
    num_steps: int
    rank_traces: list[str]


class StatusResponse(Struct):
    """Answer of GET /health, /ready and /ping while all is well; `draining` while the server shuts down."""

    status: Literal["ok", "draining"] = field(default="ok")
