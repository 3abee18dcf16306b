"""The page in a real browser over a real server, the default model and real traffic."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.server.page.browser import Browser, Page
from tests.server.page.conftest import Open
from tests.server.running import running
from tests.server.test_metrics import samples

CHAT, TEXTS = "/v1/chat/completions", "/v1/completions"
NAME = "smol <b>&amp; small</b>"
"""What the model is called here: what of it is taken for HTML shows."""
QUESTION = "Write a long story about a river."


@dataclass
class Octavo:
    url: str
    client: httpx.Client

    def metrics(self) -> dict[str, float]:
        """By name without prefix; choices that ended by `request_success_total/REASON` and in all."""
        found = {
            name.partition(":")[2]: value for name, value in samples(self.client.get("/metrics").text).items()
        }
        found["request_success_total"] = sum(
            v for k, v in found.items() if k.startswith("request_success_total/")
        )
        return found

    def idle(self) -> dict[str, float]:
        """The metrics once nothing runs."""
        until = time.monotonic() + 30
        while (found := self.metrics())["num_requests_running"] or found["num_requests_waiting"]:
            assert time.monotonic() < until
            time.sleep(0.05)
        return found

    def ask(self, question: str, **more: Any) -> dict[str, Any]:
        body = {"messages": [{"role": "user", "content": question}], "temperature": 0} | more
        answer = self.client.post(CHAT, json=body)
        assert answer.status_code == 200, answer.text
        told: dict[str, Any] = answer.json()
        return told


@pytest.fixture(scope="module")
def octavo(browser: Browser, default_model: Path) -> Iterator[Octavo]:
    sizes = ("--max-model-len", "1024", "--max-num-seqs", "8", "--kv-cache-memory-bytes", "64MiB")
    with running(str(default_model), "--served-model-name", NAME, *sizes) as (_, url, client):
        yield Octavo(url, client)


def figures(page: Page) -> dict[str, float]:
    """The exact numbers on the page by the metric that they are said to be."""
    return marked(page, "figure")


def marked(page: Page, name: str) -> dict[str, float]:
    """The numbers of the elements that carry a data attribute, by its value."""
    found = page.eval(
        f"Object.fromEntries([...document.querySelectorAll('[data-{name}]')]"
        f".map(e => [e.dataset.{name}, e.dataset.exact ?? e.textContent]))"
    )
    return {key: float(text.replace(",", "")) for key, text in found.items()}


def shown(page: Page, tile: str) -> str:
    return str(page.eval(f"document.querySelector('#tile-{tile} .value').textContent"))


def say(page: Page, text: str) -> None:
    page.click('nav a[href="#chat"]')
    page.wait("document.querySelector('#field-seed')")  # what is served is known
    page.write("#draft", text)
    page.press_enter()


def answer(page: Page) -> str:
    return str(
        page.eval("[...document.querySelectorAll('.message.assistant .text')].at(-1)?.textContent ?? ''")
    )


def test_numbers_are_those_of_the_metrics(octavo: Octavo, opened: Open) -> None:
    with opened(octavo.url) as page:
        page.wait("document.querySelector('#tile-ttft')")
        for n in (1, 1, 2):  # the second one finds the first one's blocks
            octavo.ask(
                "Tell me about the sea, please, in a few words that everybody understands.",
                max_tokens=12,
                n=n,
            )
        with octavo.client.stream(
            "POST", TEXTS, json={"prompt": "Once upon a time", "max_tokens": 900, "stream": True}
        ) as stream:
            next(stream.iter_lines())  # the client hangs up
        metrics = octavo.idle()
        assert metrics["request_success_total/abort"] >= 1 and metrics["prefix_cache_hits_total"] >= 16
        page.wait(
            "document.querySelector('[data-figure=generation_tokens_total]').textContent.replace(',', '') "
            f"=== '{metrics['generation_tokens_total']:.0f}'"
        )
        assert octavo.metrics()["generation_tokens_total"] == metrics["generation_tokens_total"]
        found = figures(page)
        aborted = found.pop('request_success_total{finished_reason="abort"}')
        assert aborted == metrics["request_success_total/abort"]
        assert found.keys() >= {
            "generation_tokens_total", "prompt_tokens_total", "time_to_first_token_seconds_count",
            "kv_blocks", "num_requests_running", "num_requests_waiting", "request_success_total",
            "num_preemptions_total", "prefix_cache_hits_total", "prefix_cache_queries_total",
        }  # fmt: skip
        assert found == {name: metrics[name] for name in found}

        mean = metrics["time_to_first_token_seconds_sum"] / metrics["time_to_first_token_seconds_count"]
        told = page.eval("document.querySelector('#tile-ttft').innerText")
        value = re.search(r"in all, mean ([\d.]+)\s(ms|s)", told)
        assert value, told
        assert float(value[1]) / (1000 if value[2] == "ms" else 1) == pytest.approx(mean, rel=0.01)
        # The page saw all of the traffic, so that the last five minutes are what there was since the start.
        hits = metrics["prefix_cache_hits_total"] / metrics["prefix_cache_queries_total"]
        assert float(shown(page, "hits").partition("%")[0]) == pytest.approx(100 * hits, abs=0.06)

        families = text_string_to_metric_families(octavo.client.get("/metrics").text)
        memory = {
            sample.labels["kind"]: sample.value
            for family in families
            if family.name == "octavo:memory_bytes"
            for sample in family.samples
        }
        rows = marked(page, "bytes")
        assert (
            rows == {kind: memory[kind] for kind in rows} and {"weights", "kv_cache", "total"} <= rows.keys()
        )
        blocks = marked(page, "blocks")
        assert sum(blocks.values()) == metrics["kv_blocks"]
        assert blocks["owned"] == blocks["shared"] == 0 and blocks["cached"] > 0


def test_running_requests_have_their_lengths(octavo: Octavo, opened: Open) -> None:
    with opened(octavo.url) as page:
        prompt = list(range(100, 137))
        body = {
            "prompt": prompt,
            "max_tokens": 500,
            "ignore_eos": True,
            "stream": True,
            "request_id": "watched",
        }
        with octavo.client.stream("POST", TEXTS, json=body) as stream:
            lines = stream.iter_lines()  # closes the answer when it is forgotten
            next(lines)
            # It may be seen waiting for its first step.
            page.wait("document.querySelector('#requests tbody')?.innerText.includes('\\trunning\\t')")
            row = page.eval("document.querySelector('#requests tbody tr').innerText")
            assert figures(page)["num_requests_running"] == 1
            one, state, length, output, *_ = row.split("\t")
            assert "watched" in one and (state, length) == ("running", "37")
            assert re.fullmatch(r"\d+ / 500", output.strip())
            assert page.eval("document.querySelector('#requests .text')") is None
        page.wait("document.querySelectorAll('#requests tr').length === 0")
        octavo.idle()


def test_chat_streams_an_answer(octavo: Octavo, opened: Open) -> None:
    expected = octavo.ask(QUESTION, max_tokens=24)
    with opened(octavo.url) as page:
        page.click('nav a[href="#chat"]')
        page.choose("#field-temperature", "0")
        page.choose("#field-max_tokens", "24")
        page.eval(
            "window.lengths = new Set(); new MutationObserver(() => lengths.add(document.querySelector("
            "'.message.assistant .text')?.textContent.length)).observe(document.querySelector('#messages'), "
            "{childList: true, subtree: true, characterData: true}); 0"
        )
        say(page, QUESTION)
        page.wait("document.querySelector('.message.assistant .note')?.textContent")
        assert answer(page) == expected["choices"][0]["message"]["content"]
        assert page.eval("lengths.size") > 8  # it came in pieces
        note = page.eval("document.querySelector('.message.assistant .note').textContent")
        usage = expected["usage"]
        assert "24 tokens, " in note and f"prompt {usage['prompt_tokens']}, " in note and "its limit" in note
        assert page.eval("document.querySelector('#draft').value") == ""
        # The next question carries the conversation.
        say(page, "And then?")
        page.wait("document.querySelectorAll('.message.assistant .note')[1]?.textContent")
        told = octavo.ask("", messages=[
            {"role": "user", "content": QUESTION},
            {"role": "assistant", "content": expected["choices"][0]["message"]["content"]},
            {"role": "user", "content": "And then?"},
        ], max_tokens=24)  # fmt: skip
        assert answer(page) == told["choices"][0]["message"]["content"]


def test_stop_ends_the_answer_here_and_on_the_server(octavo: Octavo, opened: Open) -> None:
    before = octavo.idle()
    with opened(octavo.url) as page:
        say(page, QUESTION)
        page.wait("document.querySelector('.message.assistant .text').textContent.length > 10")
        assert page.eval("document.querySelector('#send').hidden")
        page.click("#stop")
        page.wait("document.querySelector('.message.assistant .note').textContent === 'stopped'")
        stopped = answer(page)
        after = octavo.idle()
        assert after["request_success_total/abort"] == before["request_success_total/abort"] + 1
        time.sleep(0.3)
        assert answer(page) == stopped and page.eval("document.querySelector('#stop').hidden")
        page.choose("#field-max_tokens", "3")
        say(page, "Hello.")
        page.wait(
            "document.querySelectorAll('.message.assistant .note')[1]?.textContent.includes('3 tokens')"
        )
        page.click("#clear")
        assert page.eval("document.querySelector('#messages').childElementCount") == 0


def test_the_name_of_the_model_is_shown_as_text(octavo: Octavo, opened: Open) -> None:
    with opened(octavo.url) as page:
        page.wait(f"document.querySelector('#model').textContent.includes({NAME!r})")
        assert page.eval("document.querySelectorAll('#model b, #settings b').length") == 0
        assert page.eval("document.title").startswith(NAME)


def test_settings_in_force(octavo: Octavo, opened: Open) -> None:
    with opened(octavo.url) as page:
        page.click('nav a[href="#settings"]')
        text = page.wait("document.querySelector('#settings').innerText")
        rows = dict(line.split("\t")[:2] for line in text.splitlines() if "\t" in line)
        assert rows["max_model_len"] == "1024" and rows["max_num_seqs"] == "8" and "block_size" not in rows
        page.click("#all-settings")
        page.wait("document.querySelector('#settings').innerText.includes('block_size\\t16')")
        assert "LlamaForCausalLM" in page.eval("document.querySelector('#facts').innerText")


def test_charts_show_the_traffic(octavo: Octavo, opened: Open) -> None:
    with opened(octavo.url) as page:
        page.wait("document.querySelectorAll('.chart svg text').length > 30")
        seen = threading.Event()

        def ask() -> None:  # for as long as the page, which looks every few seconds, takes to see it
            while not seen.is_set():
                octavo.ask(QUESTION, max_tokens=300, ignore_eos=True)

        asking = threading.Thread(target=ask)
        asking.start()
        try:
            page.wait("document.querySelector('#chart-requests .keys').textContent.startsWith('running 1')")
        finally:
            seen.set()
            asking.join(60)
        page.wait("document.querySelector('#chart-output path')?.getBBox().height > 20")  # up, and down again
        for chart, title in (("ttft", "Time to first token, ms"), ("output", "Output, tokens/s")):
            words = page.eval(f"document.querySelector('#chart-{chart}').innerText")
            assert title in words
            labels = page.eval(
                f"[...document.querySelectorAll('#chart-{chart} text')].map(e => e.textContent)"
            )
            assert {"0", "−5 min", "−1 min", "now"} <= set(labels)
