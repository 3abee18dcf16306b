"""POST /v1/score: how similar texts are, by the cosine of their embeddings."""

from __future__ import annotations

import time

import msgspec
import numpy as np
from starlette.responses import Response

from octavo.errors import RequestError
from octavo.pooling_params import PoolingParams
from octavo.server.embeddings import embed_all, embedding_usage
from octavo.server.errors import bad_request
from octavo.server.params import check_request_id, new_request_id
from octavo.server.protocol.answers import Score, ScoreResponse
from octavo.server.protocol.requests import ScoreRequest
from octavo.server.service import Service
from octavo.server.streaming import AsgiResponse


async def create_score(service: Service, body: ScoreRequest, request_id: str | None) -> AsgiResponse:
    """Answer a request for scores: one per text of `text_2`.

    Raises:
        ApiError, RequestError: the request cannot be served.
    """
    model = service.check_model(body.model)
    if body.request_id is not None:
        check_request_id(body.request_id, "request_id")
    _check_head(service)
    left, right = _texts(service, body.text_1, "text_1"), _texts(service, body.text_2, "text_2")
    if len(left) not in (1, len(right)):
        raise bad_request(
            f"text_1 has {len(left)} texts and text_2 {len(right)}: give one text_1, or as many as text_2",
            "text_1",
        )
    # The lengths of embeddings don't matter to a cosine.
    params = PoolingParams(truncate_prompt_tokens=body.truncate_prompt_tokens)
    name = f"score-{body.request_id or request_id or new_request_id()}"
    try:
        outputs = await embed_all(service, left + right, params, name, body)
    except RequestError as error:
        if error.param == "prompt":  # what the engine calls either
            raise bad_request(f"text_1 or text_2: {error}", "text_1", error.code) from None
        raise
    vectors = np.array([output.outputs.embedding for output in outputs], np.float64)
    scores = cosines(vectors[: len(left)], vectors[len(left) :])
    answer = ScoreResponse(
        id=name,
        created=int(time.time()),
        model=model,
        data=[Score(i, score) for i, score in enumerate(scores.tolist())],
        usage=embedding_usage(outputs),
    )
    return Response(msgspec.json.encode(answer), media_type="application/json")


def cosines(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Cosines of pairs of vectors, as PyTorch's `cosine_similarity` computes them.

    Args:
        left: float64 `[1 or n, d]`.
        right: float64 `[n, d]`.

    Returns:
        float64 `[n]`; 0 where a vector is all zeros.
    """
    lengths = np.linalg.norm(left, axis=1) * np.linalg.norm(right, axis=1)
    products: np.ndarray = (left * right).sum(1)
    return np.clip(products / np.maximum(lengths, 1e-8), -1.0, 1.0)


def _check_head(service: Service) -> None:
    """Refuse a cross-encoder, whose head this version does not run: a cosine would be wrong of it."""
    for name in service.engine.model_config.extra.get("architectures") or ():
        if str(name).endswith("ForSequenceClassification"):
            raise bad_request(
                f"{service.engine.model_name} is a cross-encoder ({name}), which this version does not "
                "serve: use a model that makes embeddings"
            )


def _texts(service: Service, given: str | list[str], name: str) -> list[str | list[int]]:
    texts: list[str | list[int]] = [given] if isinstance(given, str) else list(given)
    if not texts:
        raise bad_request(f"{name} is empty: give a text, or a list of them", name)
    most = service.config.max_prompts_per_request
    if len(texts) > most:
        raise bad_request(f"{name} holds {len(texts)} texts: at most {most} are allowed in one request", name)
    return texts
