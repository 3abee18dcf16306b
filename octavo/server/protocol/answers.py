"""Bodies of answers, whole ones and the chunks of streams."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, Struct, UnsetType, field

from octavo.server.tools.protocol import ToolCall, ToolCallDelta

FinishReason = Literal["stop", "length", "tool_calls"]


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
