"""POST /v1/embeddings."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from starlette.responses import Response

from octavo.errors import RequestError
from octavo.outputs import EmbeddingRequestOutput
from octavo.pooling_params import PoolingParams
from octavo.server.errors import bad_request
from octavo.server.params import check_request_id, new_request_id
from octavo.server.protocol.answers import Embedding, EmbeddingResponse, PromptTokensDetails, Usage
from octavo.server.protocol.requests import EmbeddingRequest, ScoreRequest
from octavo.server.service import Service
from octavo.server.streaming import AsgiResponse


async def create_embeddings(service: Service, body: EmbeddingRequest, request_id: str | None) -> AsgiResponse:
    """Answer a request for embeddings.

    Raises:
        ApiError, RequestError: the request cannot be served.
    """
    model = service.check_model(body.model)
    if body.request_id is not None:
        check_request_id(body.request_id, "request_id")
    params = PoolingParams(
        dimensions=body.dimensions,
        normalize=body.normalize,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
    )
    name = f"embd-{body.request_id or request_id or new_request_id()}"
    prompts = _prompts(service, body)
    try:
        outputs = await embed_all(service, prompts, params, name, body)
    except RequestError as error:
        if error.param == "prompt":  # what the engine calls it
            raise bad_request(str(error), "input", error.code) from None
        raise
    answer = EmbeddingResponse(
        id=name,
        created=int(time.time()),
        model=model,
        data=[_item(i, output, body.encoding_format) for i, output in enumerate(outputs)],
        usage=embedding_usage(outputs),
    )
    return Response(msgspec.json.encode(answer), media_type="application/json")


def embedding_usage(outputs: Sequence[EmbeddingRequestOutput]) -> Usage:
    """Tokens of all texts."""
    tokens = sum(len(output.prompt_token_ids) for output in outputs)
    cached = sum(output.num_cached_tokens for output in outputs)
    return Usage(tokens, 0, tokens, PromptTokensDetails(cached))


def _prompts(service: Service, body: EmbeddingRequest) -> list[str | list[int]]:
    """The texts of a request, each as text or token ids."""
    given = body.input
    items: list[Any] = [given] if isinstance(given, str) else list(given)
    kinds = set(map(type, items))
    if kinds == {int}:
        items, kinds = [items], {list}
    if not items:
        raise bad_request("input is empty: give a text, token ids, or a list of them", "input")
    most = service.config.max_prompts_per_request
    if len(items) > most:
        raise bad_request(
            f"input holds {len(items)} texts: at most {most} are allowed in one request", "input"
        )
    if int in kinds:
        raise bad_request("input mixes token ids and texts: give one kind", "input")
    return items


async def embed_all(
    service: Service,
    prompts: Sequence[str | list[int]],
    params: PoolingParams,
    name: str,
    body: EmbeddingRequest | ScoreRequest,
) -> list[EmbeddingRequestOutput]:
    """All embeddings in order; the first error, or the client's leaving, ends the others.

    Raises:
        RequestError, RequestFailedError, EngineDeadError: as the engine's `embed`.
        ApiError: 503 where too many wait.
    """
    service.check_queue()
    service.unfinished += len(prompts)

    async def embed(prompt: str | list[int], own: str) -> EmbeddingRequestOutput:
        await service.engine.check_health()  # what is refused counts nowhere
        own = service.take_name(own, exact=body.request_id is not None)
        record = service.metrics.start_embedding()
        key = "prompt" if isinstance(prompt, str) else "prompt_token_ids"
        salted = {key: prompt, "cache_salt": body.cache_salt}
        try:
            output = await service.engine.embed(
                salted, params, own, prompt_name=body.prompt_name, priority=body.priority or 0
            )
            record.observe_embedding(output)
            return output
        except Exception as error:
            record.fail(error)
            raise
        finally:
            record.close()
            service.live.discard(own)

    tasks = [asyncio.ensure_future(embed(prompt, f"{name}-{i}")) for i, prompt in enumerate(prompts)]
    try:
        return await asyncio.gather(*tasks)
    finally:
        service.unfinished -= len(prompts)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _item(index: int, output: EmbeddingRequestOutput, encoding: str | None) -> Embedding:
    values = output.outputs.embedding
    if encoding == "base64":  # little-endian float32, as OpenAI's clients read it
        return Embedding(index, base64.b64encode(np.asarray(values, "<f4").tobytes()).decode("ascii"))
    return Embedding(index, values)
