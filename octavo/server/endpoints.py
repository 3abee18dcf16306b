"""The routes of the server: one table that the application and its OpenAPI document are both made from."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Scope

from octavo.config import EngineConfig
from octavo.errors import EngineDeadError
from octavo.server.chat import create_chat_completion
from octavo.server.completions import create_completion
from octavo.server.config import ServerConfig
from octavo.server.conversation import chat_prompt
from octavo.server.debug_kv import MOST_CELLS, KVMapResponse, kv_map, kv_page
from octavo.server.dev import (
    MODES,
    IsSleepingResponse,
    SleepResponse,
    is_sleeping,
    reset_prefix_cache,
    sleep,
    wake_up,
)
from octavo.server.embeddings import create_embeddings
from octavo.server.errors import ApiError, bad_request
from octavo.server.metrics import CONTENT_TYPE
from octavo.server.page.files import ASSETS, page_asset, page_index
from octavo.server.page.info import ServerInfo, server_info
from octavo.server.page.state import ServerState, server_state
from octavo.server.params import check_request_id
from octavo.server.protocol.answers import (
    ChatChunk,
    ChatCompletion,
    Completion,
    CompletionChunk,
    DetokenizeResponse,
    EmbeddingResponse,
    LoadResponse,
    ModelCard,
    ModelList,
    PrefixCacheInfo,
    ProfileResponse,
    ScoreResponse,
    StatusResponse,
    TokenizeResponse,
    VersionResponse,
)
from octavo.server.protocol.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    ScoreRequest,
    TokenizeRequest,
)
from octavo.server.responses.events import ResponseEvent
from octavo.server.responses.handler import create_response, delete_response, read_response
from octavo.server.responses.protocol import ResponseDeleted, ResponseObject, ResponseRequest
from octavo.server.scoring import create_score
from octavo.server.service import Service
from octavo.server.streaming import AsgiResponse
from octavo.server.tools.choice import tool_request
from octavo.version import __version__

Handler = Callable[[Service, Scope, Any], Awaitable[AsgiResponse]]


@dataclass(frozen=True)
class Operation:
    """One method of one path.

    Attributes:
        request: struct of the body, None without one.
        response: struct of a 200 answer; None: text.
        chunk: struct of one event (or a union of them) when the request asks for a stream.
        done: whether a stream ends with `[DONE]`.
        open: needs no API key.
        generates: refused while the server shuts down.
        media_type: of an answer that is text.
        hidden: a part of a page, which the OpenAPI document leaves out.
        query: what the address may carry, and what it means: whole numbers, or words to choose from.
    """

    method: str
    path: str
    summary: str
    handler: Handler
    request: type[msgspec.Struct] | None = None
    response: type[msgspec.Struct] | None = None
    chunk: Any = None
    done: bool = True
    open: bool = False
    generates: bool = False
    media_type: str = "text/plain"
    hidden: bool = False
    query: Mapping[str, str | tuple[str, tuple[str, ...]]] = field(default_factory=dict)


def json_response(value: msgspec.Struct, status: int = 200) -> Response:
    """A struct as a JSON answer."""
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def header_request_id(scope: Scope) -> str | None:
    """The client's `X-Request-Id`, if any.

    Raises:
        ApiError: 400 for one that could not be told apart in a log.
    """
    for name, value in scope["headers"]:
        if name == b"x-request-id" and value:
            text: str = value.decode("latin-1")
            check_request_id(text, "X-Request-Id")
            return text
    return None


async def _completion(service: Service, scope: Scope, body: CompletionRequest) -> AsgiResponse:
    return await create_completion(service, body, header_request_id(scope))


async def _chat(service: Service, scope: Scope, body: ChatRequest) -> AsgiResponse:
    return await create_chat_completion(service, body, header_request_id(scope))


async def _response(service: Service, scope: Scope, body: ResponseRequest) -> AsgiResponse:
    return await create_response(service, body)


async def _read_response(service: Service, scope: Scope, body: None) -> AsgiResponse:
    return await read_response(service, scope["path_params"]["response_id"])


async def _delete_response(service: Service, scope: Scope, body: None) -> AsgiResponse:
    return await delete_response(service, scope["path_params"]["response_id"])


async def _embeddings(service: Service, scope: Scope, body: EmbeddingRequest) -> AsgiResponse:
    return await create_embeddings(service, body, header_request_id(scope))


async def _score(service: Service, scope: Scope, body: ScoreRequest) -> AsgiResponse:
    return await create_score(service, body, header_request_id(scope))


async def _tokenize(service: Service, scope: Scope, body: TokenizeRequest) -> AsgiResponse:
    service.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("give either prompt or messages", "prompt")
    if body.prompt is not None:
        tokens = await service.text.encode(body.prompt, body.add_special_tokens is not False, "prompt")
    else:
        tools = tool_request(body.tools, None, None).for_template()
        prompt = chat_prompt(service, body.messages or [], body, tools=tools)
        tokens = await service.text.encode_chat(prompt)
    answer = TokenizeResponse(len(tokens), service.engine.max_model_len, tokens)
    if body.return_token_strs:
        answer.token_strs = await asyncio.to_thread(service.text.pieces, tokens)
    return json_response(answer)


async def _detokenize(service: Service, scope: Scope, body: DetokenizeRequest) -> AsgiResponse:
    service.check_model(body.model)
    return json_response(
        DetokenizeResponse(await service.text.decode(body.tokens, skip_special_tokens=False))
    )


def _card(service: Service, name: str) -> ModelCard:
    return ModelCard(
        name,
        service.created,
        root=service.engine.config.model or name,
        max_model_len=service.engine.max_model_len,
    )


async def _models(service: Service, scope: Scope, body: None) -> AsgiResponse:
    return json_response(ModelList([_card(service, name) for name in service.names]))


async def _model(service: Service, scope: Scope, body: None) -> AsgiResponse:
    return json_response(_card(service, service.check_model(scope["path_params"]["model"])))


async def _health(service: Service, scope: Scope, body: None) -> AsgiResponse:
    await service.engine.check_health()
    return json_response(StatusResponse("draining" if service.draining else "ok"))


async def _ready(service: Service, scope: Scope, body: None) -> AsgiResponse:
    await service.check_ready()
    return json_response(StatusResponse())


async def _load(service: Service, scope: Scope, body: None) -> AsgiResponse:
    return json_response(LoadResponse(len(service.jobs)))


async def _version(service: Service, scope: Scope, body: None) -> AsgiResponse:
    config = service.engine.config
    cache = PrefixCacheInfo(
        enabled=config.enable_prefix_caching,
        root=service.engine.cache_root.hex(),
        hash_algorithm=config.prefix_caching_hash_algo,
        block_size=config.block_size,
    )
    return json_response(VersionResponse(__version__, cache))


async def _metrics(service: Service, scope: Scope, body: None) -> AsgiResponse:
    try:
        await service.engine.check_health()
    except EngineDeadError:
        text = service.metrics.render(engine_up=False)
    else:
        text = service.metrics.render()
    return Response(text, headers={"content-type": CONTENT_TYPE})


async def _start_profile(service: Service, scope: Scope, body: None) -> AsgiResponse:
    await service.engine.start_profile()
    return json_response(StatusResponse())


async def _stop_profile(service: Service, scope: Scope, body: None) -> AsgiResponse:
    status = await service.engine.stop_profile()
    assert status.trace is not None and status.summary is not None
    return json_response(ProfileResponse(status.trace, status.summary, status.num_steps, status.rank_traces))


async def _openapi(service: Service, scope: Scope, body: None) -> AsgiResponse:
    from octavo.server.openapi import openapi_document

    offered = operations(service.engine.config, service.config)
    document = openapi_document(offered, service.keys.wanted, service.config.root_path)
    return Response(msgspec.json.encode(document), media_type="application/json")


OPERATIONS: tuple[Operation, ...] = (
    Operation(
        "POST",
        "/v1/chat/completions",
        "Answer a conversation.",
        _chat,
        ChatRequest,
        ChatCompletion,
        ChatChunk,
        generates=True,
    ),
    Operation(
        "POST",
        "/v1/completions",
        "Continue a text.",
        _completion,
        CompletionRequest,
        Completion,
        CompletionChunk,
        generates=True,
    ),
    Operation(
        "POST",
        "/v1/responses",
        "Answer a conversation, and keep it for the next request.",
        _response,
        ResponseRequest,
        ResponseObject,
        ResponseEvent,
        done=False,
        generates=True,
    ),
    Operation(
        "GET",
        "/v1/responses/{response_id}",
        "A stored response.",
        _read_response,
        response=ResponseObject,
    ),
    Operation(
        "DELETE",
        "/v1/responses/{response_id}",
        "Forget a stored response.",
        _delete_response,
        response=ResponseDeleted,
    ),
    Operation(
        "POST",
        "/v1/embeddings",
        "Embed texts, with a model that makes embeddings.",
        _embeddings,
        EmbeddingRequest,
        EmbeddingResponse,
        generates=True,
    ),
    *(
        Operation(
            "POST",
            path,
            "How similar texts are, by a model that makes embeddings.",
            _score,
            ScoreRequest,
            ScoreResponse,
            generates=True,
        )
        for path in ("/v1/score", "/score")
    ),
    Operation("GET", "/v1/models", "Names under which the model is served.", _models, response=ModelList),
    Operation("GET", "/v1/models/{model}", "One of these names.", _model, response=ModelCard),
    Operation(
        "POST",
        "/tokenize",
        "Token ids of a text or conversation.",
        _tokenize,
        TokenizeRequest,
        TokenizeResponse,
    ),
    Operation(
        "POST", "/detokenize", "Text of token ids.", _detokenize, DetokenizeRequest, DetokenizeResponse
    ),
    Operation(
        "GET",
        "/health",
        "Whether the server and its engine live (200) or not (503).",
        _health,
        response=StatusResponse,
        open=True,
    ),
    Operation(
        "GET",
        "/ready",
        "Whether new requests are served (200) or not (503): while loading, shutting down, or engineless.",
        _ready,
        response=StatusResponse,
        open=True,
    ),
    Operation("GET", "/ping", "The same as /health.", _health, response=StatusResponse, open=True),
    Operation("POST", "/ping", "The same as /health.", _health, response=StatusResponse, open=True),
    Operation("GET", "/load", "How many requests are under way.", _load, response=LoadResponse),
    Operation(
        "GET", "/version", "Version, and what block keys are made from.", _version, response=VersionResponse
    ),
    Operation("GET", "/metrics", "Metrics in Prometheus's text format.", _metrics),
    Operation("GET", "/openapi.json", "This document.", _openapi),
)


PROFILING: tuple[Operation, ...] = (
    Operation(
        "POST",
        "/start_profile",
        "Record the engine's next steps.",
        _start_profile,
        response=StatusResponse,
    ),
    Operation(
        "POST",
        "/stop_profile",
        "End the profile and write its trace on the server.",
        _stop_profile,
        response=ProfileResponse,
    ),
)
"""For development: only where the settings name a folder for traces."""


PAGE: tuple[Operation, ...] = (
    # The page itself holds no data; it asks for it with the key that is typed into it.
    Operation(
        "GET", "/", "A page that shows the running server.", page_index, open=True, media_type="text/html"
    ),
    *(
        Operation("GET", f"/page/{name}", "A part of the page.", page_asset, open=True, hidden=True)
        for name in ASSETS
    ),
    Operation(
        "GET",
        "/server_info.json",
        "What is served, and the settings in force; secrets are left out.",
        server_info,
        response=ServerInfo,
    ),
    Operation(
        "GET",
        "/server_state.json",
        "The metrics, the KV map and the running requests at one moment.",
        server_state,
        response=ServerState,
    ),
)
"""The page at `/`: unless the settings turn it off."""


KV_DEBUG: tuple[Operation, ...] = (
    # The page itself holds no data; what it asks for needs the key that is typed into it.
    Operation(
        "GET",
        "/debug/kv",
        "The pool of KV blocks as a map, in a page.",
        kv_page,
        open=True,
        media_type="text/html",
    ),
    Operation(
        "GET",
        "/debug/kv.json",
        "The same as JSON.",
        kv_map,
        response=KVMapResponse,
        query={"cells": f"most cells of the answer, 1 to {MOST_CELLS} (the default)"},
    ),
)
"""For development: only where the settings ask for it."""


DEVELOPMENT: tuple[Operation, ...] = (
    Operation(
        "POST",
        "/reset_prefix_cache",
        "Forget all cached blocks.",
        reset_prefix_cache,
        response=StatusResponse,
    ),
    Operation(
        "POST",
        "/sleep",
        "Refuse requests and give memory back.",
        sleep,
        response=SleepResponse,
        query={
            "level": "1 (the default): the KV cache and a GPU's weights; 2: all weights too",
            "mode": ("what becomes of requests under way: they finish (the default), or end", MODES),
        },
    ),
    Operation("POST", "/wake_up", "Take the memory again.", wake_up, response=SleepResponse),
    Operation("GET", "/is_sleeping", "Whether the engine sleeps.", is_sleeping, response=IsSleepingResponse),
)
"""For development: only where the settings ask for it."""


def operations(engine: EngineConfig, server: ServerConfig) -> tuple[Operation, ...]:
    """What a server with these settings offers."""
    profiling = PROFILING if engine.torch_profiler_dir is not None else ()
    page = () if server.disable_page else PAGE
    development = DEVELOPMENT if server.enable_dev_endpoints else ()
    return OPERATIONS + page + profiling + development + (KV_DEBUG if server.enable_kv_debug else ())


_OPTIONS = (
    (PROFILING, "with --torch-profiler-dir"),
    (PAGE, "without --disable-page"),
    (DEVELOPMENT, "with --enable-dev-endpoints"),
    (KV_DEBUG, "with --enable-kv-debug"),
)


def not_found(path: str) -> ApiError:
    """404 for a path that no operation has, with the option that would bring it if there is one."""
    remedy = "/openapi.json lists what there is"
    for optional, how in _OPTIONS:
        if any(operation.path == path for operation in optional):
            remedy = f"it is there on a server that was started {how}"
    return ApiError(404, f"there is no {path[:128]!r}: {remedy}", code="not_found")
