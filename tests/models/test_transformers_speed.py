"""How code of Transformers is recognised."""

from __future__ import annotations

import ast
import threading
import time
from typing import Any

import pytest
from transformers.models.llama import modeling_llama

from octavo.models import transformers_speed


def test_syntax_is_parsed_by_one_thread_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPython 3.11 raises SystemError where a collection lets a second thread parse in between."""
    forward = modeling_llama.LlamaAttention.forward
    expected = transformers_speed.syntax(forward)
    parse = ast.parse
    inside: list[int] = []
    most: list[int] = []
    found: list[str | None] = []

    def slow(*args: Any, **more: Any) -> Any:
        inside.append(1)
        most.append(len(inside))
        time.sleep(0.05)
        inside.pop()
        return parse(*args, **more)

    monkeypatch.setattr(transformers_speed.ast, "parse", slow)
    threads = [
        threading.Thread(target=lambda: found.append(transformers_speed.syntax.__wrapped__(forward)))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    monkeypatch.undo()
    assert (most, found) == ([1, 1, 1], [expected] * 3)
