"""What the extra fields do to the tokens of a real (tiny, float32) model behind a real server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pydantic
import pytest

from tests import tiny
from tests.server.test_metrics_traffic import info
from tests.server.test_real_engine import CHAT, MESSAGES, TEXTS, Octavo, octavo

GREEDY = tiny.greedy("llama", 0)


@pytest.fixture(scope="module")
def server() -> Iterator[Octavo]:
    with octavo(
        "--kv-cache-memory-bytes", "8MiB", "--strict-fields", "--trust-request-chat-template"
    ) as server:
        yield server


def tokens(server: Octavo, **body: Any) -> list[int]:
    found: list[int] = server.text(**({"max_tokens": 24, "return_token_ids": True} | body))["token_ids"]
    return found


def test_filters_that_leave_one_token_are_greedy(server: Octavo) -> None:
    for field in ({"top_k": 1}, {"min_p": 1.0}, {"top_p": 1e-6}):
        assert tokens(server, temperature=1.0, seed=4, ignore_eos=True, **field) == GREEDY[:24]
    assert tokens(server, temperature=1.0, seed=4, ignore_eos=True) != GREEDY[:24]


def test_the_best_choices_are_the_likeliest_of_as_many(server: Octavo) -> None:
    ask = {"prompt": tiny.PROMPTS[1], "max_tokens": 12, "seed": 5, "temperature": 1.0, "ignore_eos": True}
    ask |= {"logprobs": 0, "return_token_ids": True}
    made = server.post(TEXTS, **ask, n=6).json()["choices"]
    means = [sum(c["logprobs"]["token_logprobs"]) / len(c["token_ids"]) for c in made]
    ranked = sorted(range(6), key=lambda place: -means[place])
    assert len({tuple(c["token_ids"]) for c in made}) > 1 and ranked[:2] != [0, 1]  # else nothing is chosen
    answer = server.post(TEXTS, **ask, n=2, best_of=6).json()
    assert [c["token_ids"] for c in answer["choices"]] == [made[place]["token_ids"] for place in ranked[:2]]
    assert answer["usage"]["completion_tokens"] == 6 * 12


def test_what_the_settings_say_of_the_cache_and_of_requests() -> None:
    override = '{"temperature": 0, "max_new_tokens": 5}'
    with octavo("--num-gpu-blocks-override", "24", "--override-generation-config", override) as server:
        ask = {"prompt": tiny.PROMPTS[0], "ignore_eos": True, "return_token_ids": True}
        for more, length in (({"max_tokens": 48}, 5), ({"max_tokens": 3}, 3), ({}, 5)):
            choice = server.post(TEXTS, **ask, **more).json()["choices"][0]
            assert choice["token_ids"] == GREEDY[:length] and choice["finish_reason"] == "length"
        assert server.metrics()["octavo:kv_blocks"] == 24
        labels = info(server, "octavo:cache_config_info")
        assert (labels["num_gpu_blocks"], labels["num_gpu_blocks_override"]) == ("24", "24")


def test_stop_tokens_and_min_tokens(server: Octavo) -> None:
    stop = GREEDY[6]
    first = GREEDY.index(stop)
    choice = server.text(stop_token_ids=[stop], return_token_ids=True, ignore_eos=True)
    assert (choice["token_ids"], choice["stop_reason"]) == (GREEDY[: first + 1], stop)
    later = tokens(server, stop_token_ids=[stop], min_tokens=first + 3, ignore_eos=True)
    assert len(later) >= first + 3 and stop not in later[: first + 3]


def word_of(server: Octavo, token: int) -> tuple[str, int] | None:
    """A token's text and itself, if that text alone is this token."""
    text = server.post("/detokenize", tokens=[token]).json()["prompt"]
    again = server.post("/tokenize", prompt=text, add_special_tokens=False).json()["tokens"]
    return (text, token) if again == [token] and text.strip() == text else None


def test_tokens_that_are_forced_or_barred(server: Octavo) -> None:
    assert set(tokens(server, allowed_token_ids=[70, 71])) <= {70, 71}
    assert tokens(server, logit_bias={"77": 100}, max_tokens=3, ignore_eos=True) == [77] * 3
    barred = tokens(server, logit_bias={str(GREEDY[0]): -100}, max_tokens=1)
    assert barred != GREEDY[:1]
    word, token = next(found for t in GREEDY[:24] if (found := word_of(server, t)) is not None)
    assert token in tokens(server) and token not in tokens(server, bad_words=[word])


def test_a_penalty_on_repetition_leaves_none(server: Octavo) -> None:
    free, bound = (tokens(server, repetition_penalty=p, ignore_eos=True) for p in (1.0, 1e6))
    assert len(set(bound)) == 24 and not set(bound) & set(tiny.PROMPTS[0])
    assert free == GREEDY[:24]


def test_truncation_is_the_shorter_prompt(server: Octavo) -> None:
    prompt = tiny.PROMPTS[1]
    whole = server.text(prompt=prompt, truncate_prompt_tokens=7)
    assert whole["text"] == server.text(prompt=prompt[-7:])["text"] and whole["usage"]["prompt_tokens"] == 7
    long = server.text(prompt=[7] * 500, truncate_prompt_tokens=-1, max_tokens=20, ignore_eos=True)
    assert long["usage"]["prompt_tokens"] == tiny.CONTEXT - 20
    assert long["usage"]["completion_tokens"] == 20


def test_prompt_logprobs_and_echo_are_the_prompts(server: Octavo) -> None:
    prompt = tiny.PROMPTS[2]
    choice = server.text(prompt=prompt, prompt_logprobs=2, echo=True, logprobs=1, max_tokens=2)
    assert choice["prompt_logprobs"][0] is None
    for token, entry in zip(prompt[1:], choice["prompt_logprobs"][1:], strict=True):
        assert len(entry) in (2, 3) and str(token) in entry
    told = choice["logprobs"]["token_logprobs"]
    assert len(told) == len(prompt) + 2
    assert told[1:-2] == [
        entry[str(token)]["logprob"]
        for token, entry in zip(prompt[1:], choice["prompt_logprobs"][1:], strict=True)
    ]


def test_special_tokens_stay_if_asked(server: Octavo) -> None:
    ask = {"logit_bias": {str(tiny.EOS): 100}, "ignore_eos": True, "max_tokens": 3}
    assert server.text(**ask)["text"] == ""
    assert server.text(**ask, skip_special_tokens=False)["text"] != ""


def test_chat_template_of_a_request(server: Octavo) -> None:
    ask = {
        "messages": MESSAGES, "temperature": 0, "max_tokens": 12, "return_token_ids": True,
        "chat_template": "{{ word }} {{ messages[0].content }}", "chat_template_kwargs": {"word": "so"},
    }  # fmt: skip
    answer = server.post(CHAT, **ask).json()
    want = server.post("/tokenize", prompt="so The quick brown fox", add_special_tokens=False).json()[
        "tokens"
    ]
    assert answer["prompt_token_ids"] == want
    assert answer["choices"][0]["message"]["content"] == server.text(prompt=want, max_tokens=12)["text"]


def test_continued_message_is_the_text_itself(server: Octavo) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "jumps over"}]
    ask = {"messages": messages, "continue_final_message": True, "max_tokens": 12, "temperature": 0}
    answer = server.post(CHAT, **ask, return_token_ids=True, echo=True).json()
    prompt = answer["prompt_token_ids"]
    assert server.post("/detokenize", tokens=prompt).json()["prompt"].endswith("jumps over")
    text = server.text(prompt=prompt, max_tokens=12)["text"]
    assert answer["choices"][0]["message"]["content"] == "jumps over" + text


def test_usage_grows_with_every_chunk(server: Octavo) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    counts = [c["usage"]["completion_tokens"] for c in server.stream(max_tokens=9, stream_options=options)]
    assert counts == sorted(counts) and counts[-1] == 9 and len(set(counts)) > 5


def test_strict_fields(server: Octavo) -> None:
    error = server.post(TEXTS, prompt="a", max_token=3).json()["error"]
    assert error["param"] == "max_token" and "max_tokens" in error["message"]


def client_of(server: Octavo) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.client.base_url}/v1", api_key="none", max_retries=0)


def test_responses_say_what_chats_say(server: Octavo) -> None:
    responses = client_of(server).responses
    ask: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_output_tokens": 30}
    first = responses.create(**ask, input="The quick brown fox", instructions="be brief")
    system = {"role": "system", "content": "be brief"}
    chat = server.post(CHAT, messages=[system, *MESSAGES], temperature=0, max_tokens=30).json()
    assert first.output_text == chat["choices"][0]["message"]["content"]
    assert first.usage is not None and first.usage.output_tokens == chat["usage"]["completion_tokens"]
    deltas = [
        event.delta
        for event in responses.create(**ask, input="and then", previous_response_id=first.id, stream=True)
        if event.type == "response.output_text.delta"
    ]
    said = [
        *MESSAGES,
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "and then"},
    ]
    chat = server.post(CHAT, messages=said, temperature=0, max_tokens=30).json()
    assert "".join(deltas) == chat["choices"][0]["message"]["content"]
    assert len(deltas) > 3


def test_cached_tokens_are_told_alike_by_every_api(server: Octavo) -> None:
    """0 included, whole and at a stream's end."""
    asked = "an answer that nobody else here asks for, and long enough for two blocks"
    chat = {"messages": [{"role": "user", "content": asked}], "max_tokens": 2}
    response = {"input": asked, "max_output_tokens": 2}

    def of_chat() -> int:
        return int(server.post(CHAT, **chat).json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    def of_response() -> int:
        return int(
            server.post("/v1/responses", **response).json()["usage"]["input_tokens_details"]["cached_tokens"]
        )

    assert of_chat() == 0
    cached = of_chat()
    assert cached >= 32 and of_response() == cached
    usage = server.stream(CHAT, **chat, stream_options={"include_usage": True})[-1]["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == cached
    *_, last = client_of(server).responses.create(model="tiny", **response, stream=True)
    assert last.response.usage.input_tokens_details.cached_tokens == cached
    response["input"] = f"Not {asked}"
    assert of_response() < cached


def test_responses_are_parsed_by_the_official_client(server: Octavo) -> None:
    class Answer(pydantic.BaseModel):
        colour: Literal["red", "green"]
        sure: bool

    responses = client_of(server).responses
    parsed = responses.parse(
        model="tiny", input="Which?", text_format=Answer, max_output_tokens=100, temperature=0
    )
    assert parsed.status == "completed" and isinstance(parsed.output_parsed, Answer)


def test_responses_of_the_asynchronous_client_at_once(server: Octavo) -> None:
    async def main() -> list[str]:
        url = f"{server.client.base_url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            calls = [
                client.responses.create(model="tiny", input=f"{i % 2}", max_output_tokens=20, temperature=0)
                for i in range(8)
            ]
            return [answer.output_text for answer in await asyncio.gather(*calls)]

    texts = asyncio.run(main())
    assert texts == [texts[0], texts[1]] * 4
