"""Reasoning and answer, apart in every way of cutting the text."""

from __future__ import annotations

import pytest

from octavo.server.reasoning import REASONING_FORMATS, ReasoningParser, Thinking
from tests.server.tools.reading import cuts

OPEN, MAYBE, OVER = Thinking.OPEN, Thinking.MAYBE, Thinking.OVER
CASES = [
    (MAYBE, "<think>\nHm, <b> é.\n</think>\n\nFour.\n", ("Hm, <b> é.", "Four.\n")),
    (MAYBE, "\n<think></think>\n\nFour.", ("", "Four.")),
    (MAYBE, "Four. <think>no</think>", ("", "Four. <think>no</think>")),
    (MAYBE, " Four.", ("", " Four.")),
    (MAYBE, "<thin", ("", "<thin")),
    (MAYBE, "", ("", "")),
    (MAYBE, "<think>\nHm, ", ("Hm,", "")),
    (OPEN, "Hm\n\nso.\n</think>\n\nFour. </think>", ("Hm\n\nso.", "Four. </think>")),
    (OPEN, "<think>\nHm </thin</think>Four", ("Hm </thin", "Four")),
    (OPEN, "Hm </thi", ("Hm </thi", "")),
    (OPEN, "<thin", ("<thin", "")),
    (OVER, "<think>no</think>", ("", "<think>no</think>")),
]


@pytest.mark.parametrize(("thinking", "text", "found"), CASES)
def test_however_it_is_cut(thinking: Thinking, text: str, found: tuple[str, str]) -> None:
    for pieces in [[text], *cuts(text)]:
        parser = ReasoningParser(REASONING_FORMATS["qwen3"], thinking)
        told = [*(parser.feed(piece) for piece in pieces), parser.finish()]
        assert ("".join(r for r, _ in told), "".join(c for _, c in told)) == found, pieces


def test_reasoning_is_told_as_it_comes() -> None:
    parser = ReasoningParser(REASONING_FORMATS["deepseek_r1"], OPEN)
    assert [parser.feed(word)[0] for word in ("Hm, ", "so ", "it is")] == ["Hm,", " so", " it is"]


def test_what_the_prompt_says() -> None:
    qwen, r1 = REASONING_FORMATS["qwen3"], REASONING_FORMATS["deepseek_r1"]
    asked = "what does <think> mean?<|im_end|>\n<|im_start|>assistant\n"
    assert (qwen.thinking(asked), r1.thinking(asked)) == (MAYBE, OPEN)
    assert {f.thinking(asked + "<think>\n") for f in (qwen, r1)} == {OPEN}
    assert {f.thinking(asked + "<think>\n\n</think>\n\n") for f in (qwen, r1)} == {OVER}
    assert [r1.continued(t) for t in ("<think>a", "<think>a</think>b", "b")] == [OPEN, OVER, OVER]
