"""The Responses API over a pretend engine: the official client, events, store, refusals."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any

import openai
import pydantic
import pytest
from openai.types.responses import Response, ResponseStreamEvent

from tests.server.conftest import Running, running
from tests.server.fakes import FakeEngine
from tests.server.test_bad_input import check_error

PATH = "/v1/responses"
TEXT = "héllo 🙂 world. "
ANSWER = (TEXT.encode() * 3)[:30].decode()
ASK: dict[str, Any] = {"model": "some/model", "input": "hi", "max_output_tokens": 30}
_EVENTS: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(ResponseStreamEvent)


def response_events(server: Running, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a stream; each has its type as its name, and none follows the last."""
    answer = server.post(PATH, body | {"stream": True})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    parts = answer.text.split("\n\n")
    assert parts.pop() == ""
    found = []
    for part in parts:
        name, data = part.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def client_of(server: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


def prompt_of(server: Running) -> str:
    return bytes(server.engine.seen[-1][0]).decode()


def test_official_client(server: Running) -> None:
    answer = client_of(server).responses.create(
        **ASK, instructions="be brief", temperature=0.25, metadata={"k": "v"}, user="me"
    )
    assert answer.output_text == ANSWER
    assert prompt_of(server) == "system:be brief\nuser:hi\nassistant:"
    assert (answer.status, answer.incomplete_details and answer.incomplete_details.reason) == (
        "incomplete", "max_output_tokens",
    )  # fmt: skip
    assert answer.usage is not None
    assert (answer.usage.input_tokens, answer.usage.output_tokens, answer.usage.total_tokens) == (34, 30, 64)
    assert (answer.temperature, answer.metadata, answer.instructions) == (0.25, {"k": "v"}, "be brief")
    assert answer.id.startswith("resp_") and answer.output[0].id.startswith("msg_")
    Response.model_validate(answer.model_dump(), strict=True)


def test_official_client_streams(server: Running) -> None:
    client = client_of(server)
    with client.responses.stream(model="some/model", input="hi", max_output_tokens=30) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        # The client's own final response wants response.completed; this one is incomplete.
    assert text == ANSWER
    kinds = [event.type for event in client.responses.create(**ASK, stream=True)]
    assert kinds[0] == "response.created" and kinds[-1] == "response.incomplete"


def test_official_asynchronous_client(server: Running) -> None:
    async def main() -> tuple[str, str]:
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
            whole = await client.responses.create(**ASK)
            parts = [
                event.delta
                async for event in await client.responses.create(**ASK, stream=True)
                if event.type == "response.output_text.delta"
            ]
            return whole.output_text, "".join(parts)

    assert asyncio.run(main()) == (ANSWER, ANSWER)


def test_events_in_their_order(server: Running) -> None:
    found = response_events(server, ASK | {"metadata": {"k": "v"}})
    for event in found:
        _EVENTS.validate_python(event)
    kinds = [event["type"].removeprefix("response.") for event in found]
    deltas = kinds.count("output_text.delta")
    assert deltas > 5
    assert kinds == [
        "created", "in_progress", "output_item.added", "content_part.added", *["output_text.delta"] * deltas,
        "output_text.done", "content_part.done", "output_item.done", "incomplete",
    ]  # fmt: skip
    first, last = found[0]["response"], found[-1]["response"]
    assert first["status"] == "in_progress" and first["output"] == [] and first["usage"] is None
    item = found[2]["item"]
    assert item["content"] == [] and item["status"] == "in_progress"
    assert found[3]["part"]["text"] == ""
    text = "".join(event["delta"] for event in found if event["type"].endswith(".delta"))
    assert text == found[-4]["text"] == found[-3]["part"]["text"] == ANSWER
    assert last["output"] == [found[-2]["item"]] and last["output"][0]["content"][0]["text"] == ANSWER
    assert {event["item_id"] for event in found if "item_id" in event} == {item["id"]}
    assert {key for key in first if first[key] != last[key]} == {
        "status", "output", "usage", "incomplete_details", "completed_at",
    }  # fmt: skip


def test_whole_and_streamed_are_the_same(server: Running) -> None:
    ask = ASK | {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    whole = server.post(PATH, ask).json()
    last = response_events(server, ask)[-1]["response"]
    part = whole["output"][0]["content"][0]
    assert bytes(b for entry in part["logprobs"] for b in entry["bytes"]).decode() == ANSWER == part["text"]
    assert all(len(entry["top_logprobs"]) == 2 for entry in part["logprobs"])
    for answer in (whole, last):
        for name in ("id", "created_at", "completed_at"):
            answer.pop(name)
        answer["output"][0].pop("id")
        answer["usage"].pop("input_tokens_details")  # the second finds the first's blocks
    assert whole == last


def test_completed_where_the_model_ends() -> None:
    engine = FakeEngine()
    engine.ends = True
    with running(engine) as server:
        answer = client_of(server).responses.create(model="some/model", input="hi", max_output_tokens=30)
        assert (answer.status, answer.incomplete_details) == ("completed", None)
        with client_of(server).responses.stream(model="some/model", input="hi") as stream:
            assert stream.get_final_response().output_text.startswith(TEXT)


def test_items_become_messages(server: Running) -> None:
    items = [
        {"role": "developer", "content": "d"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "one"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "two", "annotations": []}]},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
        {"role": "user", "content": "three"},
    ]
    assert server.post(PATH, ASK | {"input": items}).status_code == 200
    assert prompt_of(server) == "system:d\nuser:one\nassistant:two\nassistant:no\nuser:three\nassistant:"


def test_output_items_can_be_sent_back(server: Running) -> None:
    client = client_of(server)
    items: list[Any] = [{"role": "user", "content": "hi"}]
    items += [item.model_dump() for item in client.responses.create(**ASK | {"input": items}).output]
    client.responses.create(**ASK | {"input": [*items, {"role": "user", "content": "more"}]})
    assert prompt_of(server) == f"user:hi\nassistant:{ANSWER}\nuser:more\nassistant:"


@pytest.mark.parametrize("stream", [False, True])
def test_conversations_go_on(server: Running, stream: bool) -> None:
    def ask(**more: Any) -> str:
        body = ASK | {"max_output_tokens": 6} | more
        answer = response_events(server, body)[-1]["response"] if stream else server.post(PATH, body).json()
        assert answer["previous_response_id"] == more.get("previous_response_id")
        return str(answer["id"])

    said = TEXT.encode()[:6].decode()
    first = ask(instructions="one")
    second = ask(input="again", previous_response_id=first, instructions="two")
    assert prompt_of(server) == f"system:two\nuser:hi\nassistant:{said}\nuser:again\nassistant:"
    ask(input="third", previous_response_id=second)
    assert prompt_of(server) == (
        f"user:hi\nassistant:{said}\nuser:again\nassistant:{said}\nuser:third\nassistant:"
    )
    ask(input="fork", previous_response_id=first)  # the first is as it was
    assert prompt_of(server) == f"user:hi\nassistant:{said}\nuser:fork\nassistant:"


def test_stored_responses_are_read_and_deleted(server: Running) -> None:
    client = client_of(server)
    made = client.responses.create(**ASK)
    assert client.responses.retrieve(made.id) == made
    client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)
    assert check_error(server.client.delete(f"{PATH}/{made.id}"), 404)["code"] == "response_not_found"
    error = check_error(server.post(PATH, ASK | {"previous_response_id": made.id}))
    assert (error["param"], error["code"]) == ("previous_response_id", "previous_response_not_found")


def test_what_has_no_effect_comes_back(server: Running) -> None:
    given = {"user": "me", "safety_identifier": "s", "prompt_cache_key": "k", "max_tool_calls": 3}
    answer = server.post(PATH, ASK | given).json()
    assert {name: answer[name] for name in given} == given
    plain = server.post(PATH, ASK).json()
    assert [plain[name] for name in given] == [None] * 4


def test_what_is_not_to_be_stored_is_not(server: Running) -> None:
    made = server.post(PATH, ASK | {"store": False}).json()
    assert made["store"] is False
    check_error(server.client.get(f"{PATH}/{made['id']}"), 404)


def test_the_store_is_bounded() -> None:
    with running(FakeEngine(), response_store_bytes=16_000) as server:
        ids = [server.post(PATH, ASK | {"input": f"hi {i}"}).json()["id"] for i in range(40)]
        kept = [i for i in ids if server.client.get(f"{PATH}/{i}").status_code == 200]
        assert kept == ids[-len(kept) :] and 2 <= len(kept) <= 16
        store = server.service.responses
        assert len(store) == len(kept) and 0 < store.num_bytes <= 16_000
        server.client.get(f"{PATH}/{kept[0]}")  # used, so that the second goes first
        server.post(PATH, ASK)
        assert server.client.get(f"{PATH}/{kept[0]}").status_code == 200
        assert server.client.get(f"{PATH}/{kept[1]}").status_code == 404
        for response_id in [i for i in ids if store.get(i) is not None]:
            store.delete(response_id)
        assert len(store) == 1  # the last one made


def test_what_is_too_large_to_store_says_so() -> None:
    with running(FakeEngine(), response_store_bytes=1100) as server:
        made = server.post(PATH, ASK).json()
        assert made["store"] is False and made["status"] == "incomplete"
    with running(FakeEngine(), response_store_bytes=0) as server:
        assert server.post(PATH, ASK).json()["store"] is False
        assert check_error(server.post(PATH, ASK | {"store": True}))["param"] == "store"


def test_structured_text_reaches_the_engine(server: Running) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
    answer = server.post(PATH, ASK | {"text": {"format": form}}).json()
    asked = server.engine.seen[-1][1].structured_outputs
    assert asked is not None and json.loads(asked.json) == schema
    assert answer["text"]["format"] == form
    server.post(PATH, ASK | {"text": {"format": {"type": "json_object"}}})
    assert server.engine.seen[-1][1].structured_outputs.json_object is True
    assert server.post(PATH, ASK).json()["text"] == {"format": {"type": "text"}, "verbosity": None}


def test_extra_fields_reach_the_engine(server: Running) -> None:
    extra = {
        "top_k": 7, "min_p": 0.25, "repetition_penalty": 1.5, "presence_penalty": 0.5, "seed": 3,
        "frequency_penalty": -0.5, "min_tokens": 3, "ignore_eos": True, "stop_token_ids": [5, 6],
        "include_stop_str_in_output": True, "allowed_token_ids": [97, 98], "bad_words": ["no"],
        "skip_special_tokens": False, "stop": ["x"], "temperature": 0.3, "top_p": 0.6,
    }  # fmt: skip
    more = {"cache_salt": "s", "priority": 2, "truncate_prompt_tokens": 4}
    assert server.post(PATH, ASK | extra | more).status_code == 200
    prompt, params, rest = server.engine.seen[-1]
    assert {name: getattr(params, name) for name in extra} == extra
    assert (rest["cache_salt"], rest["priority"], bytes(prompt)) == ("s", 2, b"ant:")


REPLY = '<think>so so</think>let me see <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
CALLS: dict[str, Any] = {
    "input": "Tools?",
    "tools": [{"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}}],
    "max_output_tokens": 500,
}
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.reasoning_content or '' }}|{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}[{{ c.id }} {{ c.function.name }} {{ c.function.arguments | tojson }}]"
    "{% endfor %}{% if m.tool_call_id %}({{ m.tool_call_id }}){% endif %};{% endfor %}"
)


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    path = tmp_path_factory.mktemp("template") / "t.jinja"
    path.write_text(TEMPLATE)
    engine = FakeEngine(chat_template=str(path))
    engine.ends, engine.replies = True, {"Tools?": REPLY}
    engine.max_model_len = 2000
    settings = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
    with running(engine, enable_auto_tool_choice=True, **settings) as server:
        yield server


def test_reasoning_text_and_calls_are_items(tools: Running) -> None:
    answer = client_of(tools).responses.create(model="some/model", **CALLS)
    Response.model_validate(answer.model_dump(), strict=True)
    thought, said, call = answer.output
    assert thought.type == "reasoning" and thought.content and thought.content[0].text == "so so"
    assert said.type == "message" and answer.output_text.strip() == "let me see"
    assert call.type == "function_call" and call.name == "f" and json.loads(call.arguments) == {"a": 1}
    assert {item.status for item in (thought, said, call)} == {"completed"} == {answer.status}
    assert answer.usage is not None
    marked = len("<think>so so</think>")
    assert marked <= answer.usage.output_tokens_details.reasoning_tokens <= marked + 1
    assert [tool.type for tool in answer.tools] == ["function"] and answer.tool_choice == "auto"
    plain = client_of(tools).responses.create(model="some/model", input="hi")
    assert plain.usage is not None and plain.usage.output_tokens_details.reasoning_tokens == 0


def test_events_of_items(tools: Running) -> None:
    found = response_events(tools, CALLS)
    for event in found:
        _EVENTS.validate_python(event)
    kinds = [event["type"].removeprefix("response.") for event in found]
    once = [kind for i, kind in enumerate(kinds) if not kind.endswith("delta") or kinds[i - 1] != kind]
    assert once == [
        "created", "in_progress",
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done",
        "content_part.done", "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.done",
        "content_part.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done",
        "output_item.done", "completed",
    ]  # fmt: skip
    output = found[-1]["response"]["output"]
    assert [event["item"] for event in found if event["type"].endswith("item.done")] == output
    for kind, index in (("reasoning_text", 0), ("output_text", 1), ("function_call_arguments", 2)):
        deltas = [event for event in found if event["type"] == f"response.{kind}.delta"]
        assert {(event["output_index"], event["item_id"]) for event in deltas} == {
            (index, output[index]["id"])
        }
        whole = "".join(event["delta"] for event in deltas)
        assert whole == (output[2]["arguments"] if index == 2 else output[index]["content"][0]["text"])
    added = next(event for event in found if event["type"].endswith("added") and event["output_index"] == 2)
    assert (added["item"]["name"], added["item"]["arguments"]) == ("f", "")


@pytest.mark.parametrize("stored", [False, True])
def test_calls_and_their_results_go_on(tools: Running, stored: bool) -> None:
    client = client_of(tools)
    answer = client.responses.create(model="some/model", **CALLS)
    call = answer.output[-1]
    assert call.type == "function_call"
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "42"}
    if stored:
        client.responses.create(model="some/model", input=[result], previous_response_id=answer.id)
    else:
        items: list[Any] = [{"role": "user", "content": CALLS["input"]}]
        items += [item.model_dump() for item in answer.output]
        client.responses.create(model="some/model", input=[*items, result])
    user, assistant, tool, end = prompt_of(tools).split(";")
    assert user == "user:|Tools?" and tool == f"tool:|42({call.call_id})" and end == ""
    assert assistant.startswith("assistant:so so|let me see")
    assert f"[{call.call_id} f " in assistant and "a" in assistant.split(" f ")[1]


def test_log_probabilities_beside_parsers_are_refused(tools: Running) -> None:
    body = {"input": "hi", "include": ["message.output_text.logprobs"]}
    assert check_error(tools.post(PATH, body))["param"] == "include"


def test_an_answer_that_is_cut_in_a_call_is_what_a_chat_says(tools: Running) -> None:
    most = REPLY.index("1}")
    answer = tools.post(PATH, CALLS | {"max_output_tokens": most}).json()
    function = {name: value for name, value in CALLS["tools"][0].items() if name != "type"}
    messages = [{"role": "user", "content": CALLS["input"]}]
    chat = {"messages": messages, "tools": [{"type": "function", "function": function}], "max_tokens": most}
    message = tools.post("/v1/chat/completions", chat).json()["choices"][0]["message"]
    assert answer["status"] == "incomplete"
    assert [item["status"] for item in answer["output"]] == ["completed", "incomplete"]
    texts = [item["content"][0]["text"] for item in answer["output"]]
    assert texts == [message["reasoning"], message["content"]]


BAD: list[tuple[dict[str, Any], str]] = [
    ({"input": []}, "input"),
    ({"input": 3}, "input"),
    ({"input": [{"content": "a"}]}, "input[0].role"),
    ({"input": [{"role": "tool", "content": "a"}]}, "input[0].role"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
    ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
    ({"input": "x" * 100_000}, "input"),
    ({"input": "x" * 300}, "input"),
    ({"background": True}, "background"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"prompt": {"id": "p"}}, "prompt"),
    ({"truncation": "auto"}, "truncation"),
    ({"include": ["file_search_call.results"]}, "include"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "name": "f"}]}, "tool_choice"),  # the server has no parser
    ({"tool_choice": "required"}, "tool_choice"),
    ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
    ({"input": [{"type": "function_call_output", "call_id": "1"}]}, "input[0].output"),
    ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
    ({"temperature": -1}, "temperature"),
    ({"max_output_tokens": -1}, "max_output_tokens"),
    ({"previous_response_id": "resp_none"}, "previous_response_id"),
]


@pytest.mark.parametrize(("body", "param"), BAD)
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_wrong_is_named(server: Running, body: dict[str, Any], param: str, stream: bool) -> None:
    assert check_error(server.post(PATH, ASK | body | {"stream": stream}))["param"] == param


def test_a_failure_in_a_stream_is_its_last_event(server: Running) -> None:
    found = response_events(server, ASK | {"input": "hi\x18"})
    assert found[-1]["type"] == "response.failed"
    _EVENTS.validate_python(found[-1])
    failed = found[-1]["response"]
    assert failed["status"] == "failed" and "failed for a test" in failed["error"]["message"]
    assert failed["output"][0]["content"][0]["text"] == TEXT[:1]  # half a character is not told
    assert failed["output"][0]["status"] == "incomplete"
    check_error(server.client.get(f"{PATH}/{failed['id']}"), 404)
    assert check_error(server.post(PATH, ASK | {"input": "hi\x18"}), 500)["code"] == "request_failed"


def test_clients_that_leave_end_the_request() -> None:
    with running(FakeEngine(delay=0.2)) as server:
        ask = ASK | {"stream": True, "max_output_tokens": 150}
        with server.client.stream("POST", PATH, json=ask) as answer:
            next(answer.iter_lines())
        until = time.monotonic() + 5
        while server.engine.live and time.monotonic() < until:
            time.sleep(0.01)
        assert server.engine.aborted == 1 and not server.engine.live
