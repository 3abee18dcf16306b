"""What the page does in a real browser, over an engine that answers what the test wants it to."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.conftest import Running, running
from tests.server.fakes import FakeEngine
from tests.server.page.browser import Browser, Page
from tests.server.page.conftest import Open

EVIL = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script><b>bold</b>'
TILES = "document.querySelectorAll('.tile').length > 5"


@pytest.fixture(scope="module")
def server(browser: Browser) -> Iterator[Running]:
    with running() as server:
        yield server


def say(page: Page, text: str) -> str:
    """Send a message and wait for the end of its answer; the answer."""
    page.click('nav a[href="#chat"]')
    page.wait("document.querySelector('#field-seed')")  # what is served is known
    page.write("#draft", text)
    page.click("#send")
    page.wait("[...document.querySelectorAll('.message.assistant .note')].at(-1)?.textContent")
    return str(page.eval("[...document.querySelectorAll('.message.assistant .text')].at(-1).textContent"))


def test_answers_and_names_are_text_and_never_html(opened: Open) -> None:
    with running(FakeEngine(EVIL), served_model_name=[EVIL, "b"], page_show_texts=True) as server:
        server.engine.live.add(EVIL)
        with opened(server.url) as page:
            page.wait("document.querySelector('#requests tbody tr')")
            assert EVIL in page.eval("document.querySelector('#requests').textContent")
            page.click('nav a[href="#chat"]')
            page.choose("#field-max_tokens", str(len(EVIL)))
            assert say(page, EVIL) == EVIL
            assert page.eval("document.querySelector('.message.user .text').textContent") == EVIL
            page.click('nav a[href="#settings"]')
            page.wait("document.querySelector('#settings').innerText.includes('served_model_name')")
            assert page.eval("document.querySelectorAll('main img, main script, main b').length") == 0
            assert page.eval("window.hacked === undefined")


def test_an_error_of_the_server_is_shown(opened: Open) -> None:
    with running() as server, opened(server.url, expected="400") as page:
        page.wait(TILES)
        page.click('nav a[href="#chat"]')
        assert say(page, "a" * 300) == ""
        note = page.eval("document.querySelector('.message.assistant .note').textContent")
        assert "Failed: " in note and "300" in note or "context" in note
        assert say(page, "short") != ""  # and the failed question is not asked again
        assert len(server.engine.seen[-1][0]) < 100


def test_sampling_settings_are_sent(opened: Open, server: Running) -> None:
    given = {
        "temperature": 0.5, "max_tokens": 7, "top_p": 0.85, "top_k": 9, "min_p": 0.05,
        "repetition_penalty": 1.15, "presence_penalty": -0.5, "frequency_penalty": 0.3, "seed": 42,
    }  # fmt: skip
    with opened(server.url) as page:
        page.click('nav a[href="#chat"]')
        page.wait("document.querySelector('#field-seed')")
        for name, value in given.items():
            page.choose(f"#field-{name}", str(value))
        page.choose("#field-stopText", "END")
        page.choose("#system", "Be brief.")
        say(page, "Hello")
        prompt, params, _ = server.engine.seen[-1]
        assert {name: getattr(params, name) for name in given} == given and params.stop == ["END"]
        assert bytes(t for t in prompt if t < 256) == b"system:Be brief.\nuser:Hello\nassistant:"
        page.choose("#field-temperature", "3")  # out of range: is not sent
        page.write("#draft", "Again")
        count = len(server.engine.seen)
        page.click("#send")
        assert page.eval("document.querySelector('#draft').value") == "Again"
        assert len(server.engine.seen) == count


def test_enter_sends_but_not_while_characters_are_chosen(opened: Open, server: Running) -> None:
    with opened(server.url) as page:
        page.click('nav a[href="#chat"]')
        page.wait("document.querySelector('#field-seed')")
        page.write("#draft", "nihao")
        page.eval(
            "document.querySelector('#draft').dispatchEvent(new KeyboardEvent('keydown', "
            "{key: 'Enter', isComposing: true, cancelable: true, bubbles: true}))"
        )
        page.press_enter(modifiers=8)  # with Shift: a new line
        assert page.eval("document.querySelector('#messages').childElementCount") == 0
        assert page.eval("document.querySelector('#draft').value") == "nihao\n"
        page.press_enter()
        page.wait("document.querySelector('#messages').childElementCount === 2")


def test_a_model_without_chat_template_continues_a_text(opened: Open) -> None:
    engine = FakeEngine(text="abc")
    engine.tokenizer.has_chat_template = False
    with running(engine) as server, opened(server.url) as page:
        page.click('nav a[href="#chat"]')
        page.wait("document.querySelector('#field-max_tokens')")
        page.choose("#field-max_tokens", "5")
        assert say(page, "Once") == "abcab"
        assert bytes(t for t in engine.seen[-1][0] if t < 256) == b"Once"
        assert page.eval("document.querySelector('#system-field').hidden")


@pytest.mark.parametrize("kind", ["embedding", "tokens"])
def test_other_models_say_what_to_do_instead(opened: Open, kind: str) -> None:
    engine = FakeEngine()
    if kind == "embedding":
        engine.facts.pooling_type = "LAST"
    else:
        engine.tokenizer = None
    with running(engine) as server, opened(server.url) as page:
        page.click('nav a[href="#chat"]')
        words = page.wait("document.querySelector('#chat-none').innerText")
        assert ("/v1/embeddings" if kind == "embedding" else "/v1/completions") in words
        assert page.eval("document.querySelector('#chat-area').hidden")


def test_the_key_is_asked_for_and_kept_in_the_tab(opened: Open) -> None:
    with running(api_key=["the key"]) as server, opened(server.url, expected="401") as page:
        page.wait("!document.querySelector('#ask-key').hidden")
        assert not [one for one in page.requests() if ".json" in one]  # nothing is asked without a key
        assert page.eval("document.querySelector('#content').hidden")
        page.write("#key", "wrong")
        page.press_enter()
        page.wait("!document.querySelector('#key-wrong').hidden")
        page.write("#key", "the key")
        page.press_enter()
        page.wait(TILES)
        assert page.eval("document.querySelector('#ask-key').hidden")
        assert say(page, "Hi")
        stored = page.eval("JSON.stringify([{...sessionStorage}, {...localStorage}])")
        assert json.loads(stored) == [{"octavo-key": "the key"}, {}]
        page.reload()
        page.wait("document.querySelector('#ask-key').hidden && !document.querySelector('#content').hidden")
        page.click("#forget")
        assert page.eval("sessionStorage.length") == 0 and page.eval(
            "document.querySelector('#content').hidden"
        )


def test_language_is_the_browsers_then_the_one_chosen(opened: Open, server: Running) -> None:
    with opened(server.url, language="zh-CN") as page:
        page.wait(TILES)
        assert "首 token 延迟" in page.text() and page.eval("document.documentElement.lang") == "zh-CN"
        page.choose("#language", "en")
        assert "Time to first token" in page.text() and "延迟" not in page.text()
        page.reload()
        page.wait(TILES)
        assert "Time to first token" in page.text() and page.eval("document.documentElement.lang") == "en"
    with opened(server.url, language="de-DE") as page:
        page.wait(TILES)
        assert "Time to first token" in page.text()
        page.choose("#language", "zh")
        assert "首 token 延迟" in page.text()
        for view, word in (("chat", "采样参数"), ("settings", "生效的设置")):
            page.click(f'nav a[href="#{view}"]')
            page.wait(f"document.body.innerText.includes('{word}')")


LIGHTNESS = """(() => {
  const light = color => {
    const [r, g, b] = color.match(/[\\d.]+/g).map(Number).map(v => v / 255)
      .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const style = s => getComputedStyle(document.querySelector(s));
  const back = light(style('.tile').backgroundColor);
  const inks = ['.tile .value', '.tile .note', 'nav a:not([aria-current])'];
  return [back, ...inks.map(selector => light(style(selector).color))];
})()"""


def contrast(one: float, other: float) -> float:
    """WCAG's ratio of two relative luminances."""
    return (max(one, other) + 0.05) / (min(one, other) + 0.05)


def test_dark_and_light(opened: Open, server: Running) -> None:
    with opened(server.url, dark=True) as page:
        page.wait(TILES)
        for dark in (True, False):
            page.prefer(dark)
            page.wait(f"document.documentElement.dataset.theme === '{'dark' if dark else 'light'}'")
            back, *inks = page.eval(LIGHTNESS)
            assert (back < 0.1) == dark and all(contrast(back, ink) >= 4.5 for ink in inks), (
                dark,
                back,
                inks,
            )
        page.choose("#theme", "dark")
        page.reload()
        page.wait(TILES)
        assert page.eval(LIGHTNESS)[0] < 0.1  # chosen, though the system prefers light


@pytest.mark.parametrize("language", ["en", "zh-CN"])
def test_a_phone_needs_no_scrolling_sideways(opened: Open, language: str) -> None:
    name = "organisation/A-Model-With-A-Rather-Long-Name-70B-Instruct-GPTQ-Int4"
    with running(FakeEngine(text="wide" * 60), served_model_name=[name, "b"], page_show_texts=True) as server:
        server.engine.live.update({f"{i}-{'long' * 12}" for i in range(3)})
        with opened(server.url, language=language) as page:
            page.resize(360, 740, mobile=True, scale=2)
            page.wait(TILES)
            page.wait("document.querySelector('#requests tbody tr')")
            say(page, "word" * 40)
            for view in ("monitor", "chat", "settings"):
                page.click(f'nav a[href="#{view}"]')
                page.wait(f"!document.querySelector('#view-{view}').hidden")
                if view == "settings":
                    page.click("#all-settings")
                assert page.eval("innerWidth") == 360
                assert page.eval("document.documentElement.scrollWidth") == 360, view


def test_a_dead_engine_is_told(opened: Open) -> None:
    with running() as server, opened(server.url, expected="503") as page:
        page.wait(TILES)
        server.call(server.engine.kill)
        words = page.wait(
            "!document.querySelector('#problem').hidden && document.querySelector('#problem').innerText"
        )
        assert "The server answers: " in words and "engine" in words


def test_speculation_is_shown_where_there_is_one(opened: Open) -> None:
    engine = FakeEngine()
    stats = engine.stats
    with running(engine) as server:
        with opened(server.url) as page:
            page.wait(TILES)
            assert page.eval("document.querySelector('#tile-drafts')") is None

        def speculating() -> Any:
            told = stats()
            told.spec_drafts, told.spec_draft_tokens, told.spec_accepted_tokens = 1000, 4000, 2500
            return told

        engine.stats = speculating  # type: ignore[method-assign]
        server.service.metrics._core._stats = speculating
        with opened(server.url) as page:
            words = page.wait("document.querySelector('#tile-drafts')?.innerText")
            assert "2,500 of 4,000" in words and "3.50 tokens a step" in words


HISTORY = """(async () => {
  const {History} = await import(location.origin + '/page/history.js');
  const state = (time, tokens, sum, ...counts) => ({time, metrics: {
    num_requests_running: 1, num_requests_waiting: 0, kv_cache_usage_perc: 0.5,
    generation_tokens_total: tokens, prompt_tokens_total: 0,
  }, histograms: Object.fromEntries(['time_to_first_token_seconds', 'inter_token_latency_seconds'].map(
    name => [name, {bounds: [0.1, 1], counts, sum}]))});
  const history = new History(), told = [];
  const tell = () => told.push([
    history.rate('generation_tokens_total', 5), history.recent('time_to_first_token_seconds'),
    history.whole('time_to_first_token_seconds'), history.points.at(-1), history.points.length]);
  history.add(state(1000, 100, 50, 10, 5, 0)); tell();
  history.add(state(1002, 120, 50.4, 18, 5, 0)); tell();
  history.add(state(1010, 120, 58.4, 18, 5, 4)); tell();
  history.add(state(1010, 999, 0, 0, 0, 0)); tell();
  history.add(state(1400, 150, 59.4, 18, 6, 4)); tell();
  history.add(state(1402, 3, 0.2, 0, 1, 0)); tell();
  return told;
})()"""


def test_figures_are_computed_from_what_was_told(opened: Open, server: Running) -> None:
    with opened(server.url) as page:
        first, second, third, same, late, anew = page.eval(HISTORY)
    assert first[0] is None and first[1]["count"] == 0 and first[3]["output"] is None
    assert first[2]["count"] == 15 and first[2]["mean"] == pytest.approx(50 / 15)
    assert second[0] == 10 and second[1]["count"] == 8 and second[1]["bound"] == 0.1 and not second[1]["over"]
    assert second[1]["mean"] == pytest.approx(0.05) and second[3]["ttft"] == pytest.approx(50)
    assert second[3]["output"] == 10 and second[3]["use"] == 50
    # Over 5 seconds: since the state that was the last one then.
    assert third[0] == 0 and third[1]["count"] == 12 and third[1]["over"] and third[1]["bound"] == 1
    assert same == third  # the same moment tells nothing new
    # Whatever is older than five minutes counts no more, but as what growth begins from.
    assert late[0] == pytest.approx(30 / 390) and late[1]["count"] == 1 and late[4] == 1
    assert anew[0] is None and anew[1]["count"] == 0 and anew[4] == 1  # another engine counts


def test_axes_have_even_steps_from_zero(opened: Open, server: Running) -> None:
    code = (
        "(async () => (await Promise.all([0, 0.03, 1, 4, 7, 99, 100, 101, 12345].map(async n => "
        "(await import(location.origin + '/page/chart.js')).scale(n)))))()"
    )
    with opened(server.url) as page:
        found = page.eval(code)
    for most, ticks in zip([0, 0.03, 1, 4, 7, 99, 100, 101, 12345], found, strict=True):
        steps = {round(b - a, 9) for a, b in zip(ticks, ticks[1:], strict=False)}
        assert ticks[0] == 0 and ticks[-1] >= most and len(steps) == 1 and 2 <= len(ticks) <= 6, (most, ticks)
        assert most == 0 or ticks[-1] <= 2 * most
        assert str(steps.pop()).replace(".", "").lstrip("0")[0] in "125"
