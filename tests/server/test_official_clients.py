"""Every endpoint that the official client knows, by its synchronous and its asynchronous class."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import openai
import pytest

from tests.server.conftest import Running, running
from tests.server.fakes import FakeEngine

TEXT = "hello world. "
ANSWER = TEXT * 2
CHAT: dict[str, Any] = {
    "model": "some/model",
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": 26,
}
PROMPT: dict[str, Any] = {"model": "some/model", "prompt": "hi", "max_tokens": 26}
INPUT: dict[str, Any] = {"model": "some/model", "input": "hi", "max_output_tokens": 26}
VECTOR = [3.0, 256.0, 0.25, -1.5]


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(FakeEngine(TEXT), api_key=["right"]) as server:
        yield server


async def got(value: Any) -> Any:
    """What a call of either class gives."""
    return await value if inspect.isawaitable(value) else value


async def listed(stream: Any) -> list[Any]:
    stream = await got(stream)
    return [part async for part in stream] if hasattr(stream, "__aiter__") else list(stream)


async def models(api: Any) -> None:
    assert [model.id for model in await listed(api.models.list())] == ["some/model"]
    assert (await got(api.models.retrieve("some/model"))).id == "some/model"


async def chat(api: Any) -> None:
    whole = await got(api.chat.completions.create(**CHAT, n=2, logprobs=True, top_logprobs=1))
    assert [choice.message.content for choice in whole.choices] == [ANSWER] * 2
    assert whole.usage.completion_tokens == 2 * 26 and len(whole.choices[1].logprobs.content) == 26
    chunks = await listed(
        api.chat.completions.create(**CHAT, stream=True, stream_options={"include_usage": True})
    )
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == ANSWER
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 26


async def completions(api: Any) -> None:
    whole = await got(api.completions.create(**PROMPT, logprobs=1, best_of=3, n=2))
    assert [choice.text for choice in whole.choices] == [ANSWER] * 2
    assert whole.usage.completion_tokens == 3 * 26 and len(whole.choices[0].logprobs.tokens) == 26
    assert "".join(
        c.choices[0].text for c in await listed(api.completions.create(**PROMPT, stream=True))
    ) == (ANSWER)


async def responses(api: Any) -> None:
    made = await got(api.responses.create(**INPUT))
    assert made.output_text == ANSWER and made.usage.output_tokens == 26
    kept = await got(api.responses.retrieve(made.id))
    assert kept.output_text == ANSWER
    events = await listed(api.responses.create(**INPUT, previous_response_id=made.id, stream=True))
    assert "".join(event.delta for event in events if event.type.endswith("text.delta")) == ANSWER
    await got(api.responses.delete(made.id))
    with pytest.raises(openai.NotFoundError):
        await got(api.responses.retrieve(made.id))


async def embeddings(api: Any) -> None:
    for form in ({}, {"encoding_format": "float"}, {"encoding_format": "base64"}):
        answer = await got(api.embeddings.create(model="some/model", input=["ab"], **form))
        assert len(answer.data) == 1 and answer.usage.prompt_tokens == 3
        if form.get("encoding_format") != "base64":  # which is what was asked for
            assert answer.data[0].embedding == VECTOR
    short = await got(api.embeddings.create(model="some/model", input="ab", dimensions=2))
    assert short.data[0].embedding == VECTOR[:2]


async def errors(api: Any) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        await got(api.chat.completions.create(**CHAT | {"temperature": -1}))
    assert (bad.value.param, bad.value.code) == ("temperature", "invalid_value")
    with pytest.raises(openai.BadRequestError) as bad:
        await listed(api.completions.create(**PROMPT | {"prompt": [1] * 300}, stream=True))
    assert bad.value.param == "prompt"
    with pytest.raises(openai.NotFoundError) as missing:
        await got(api.chat.completions.create(**CHAT | {"model": "other"}))
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.AuthenticationError):
        await got(api.with_options(api_key="wrong").models.list())


@pytest.mark.parametrize("use", [models, chat, completions, responses, embeddings, errors])
@pytest.mark.parametrize("kind", [openai.OpenAI, openai.AsyncOpenAI])
def test_the_official_client(server: Running, kind: Any, use: Callable[[Any], Awaitable[None]]) -> None:
    async def main() -> None:
        api = kind(base_url=server.url + "/v1", api_key="right", max_retries=0, timeout=20)
        try:
            await use(api)
        finally:
            await got(api.close())

    asyncio.run(main())
