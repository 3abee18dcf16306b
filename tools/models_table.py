"""What each family of models is tested for, found by asking the tests themselves.

A test that shows something of a model says so with `@pytest.mark.proves(column, …)` and has the tiny
model's name as its parameter `variant`, that of a class run by the fallback as `family`, or names a real
checkpoint or an architecture in the mark. Collecting the tests gives the cells; nothing is run, and
nothing is in the tables that no test names.
"""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
COLUMNS = ("safetensors", "GGUF", "chunked prefill", "prefix cache", "preemption", "tensor parallel")
PLACES = ("tests/models", "tests/engine")
# Names in tests/engine/test_real_models_parity.py.
REAL = {"gemma3": "Gemma-3-270M (GGUF, Q4_K_M)", "qwen2": "Qwen2.5-Coder-0.5B-Instruct (GGUF, Q4_K_M)"}


class Marks:
    """A pytest plugin that keeps what the collected tests show: columns and variants by model."""

    def __init__(self) -> None:
        self.families: dict[str, set[str]] = defaultdict(set)
        self.variants: dict[str, set[str]] = defaultdict(set)
        self.fallback: dict[str, set[str]] = defaultdict(set)
        self.real: dict[str, set[str]] = defaultdict(set)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        for item in items:
            for mark in item.iter_markers("proves"):
                self._keep(item, mark)

    def _keep(self, item: Any, mark: Any) -> None:
        from tests import tiny

        facts = {**(item.callspec.params if hasattr(item, "callspec") else {}), **mark.kwargs}
        if "model" in facts:
            self.real[facts["model"]].update(mark.args)
        elif "path" in facts:  # of the fixture that fetches real ones
            self.real[REAL[facts["path"]]].update(mark.args)
        elif "family" in facts:
            for column in mark.args:
                self.fallback[column].add(facts["family"])
        elif "architecture" in facts:
            self.families[facts["architecture"]].update(mark.args)
        elif "variant" in facts:
            name = _architecture(item.module, facts["variant"])
            self.families[name].update(mark.args)
            if facts["variant"] in tiny.VARIANTS:
                self.variants[name].add(facts["variant"])
        else:
            raise ValueError(f"{item.nodeid}: the mark `proves` finds no model in its parameters")


def _architecture(module: Any, variant: str) -> str:
    """The class of a tiny model: of the module's own, or of the shared ones."""
    from tests import tiny

    own = getattr(module, "VARIANTS", None)
    known = {**tiny.VARIANTS, **(own if isinstance(own, dict) else {})}
    prefix = known[variant][0]
    return prefix.removesuffix("Text") + "ForCausalLM"


def collect() -> Marks:
    """The marks of all tests, slow ones too."""
    marks = Marks()
    arguments = ["--collect-only", "-q", "-m", "", "-p", "no:cacheprovider", *PLACES]
    with contextlib.redirect_stdout(io.StringIO()) as said:
        status = pytest.main(arguments, plugins=[marks])
    if status:
        raise RuntimeError(f"the tests cannot be collected:\n{said.getvalue()[-2000:]}")
    return marks


def tables(marks: Marks) -> dict[str, str]:
    """Markdown by name."""
    from octavo.models.registry import ARCHITECTURES

    unknown = set(marks.families) - set(ARCHITECTURES)
    if unknown:
        raise ValueError(f"tests name architectures that the registry lacks: {unknown}")
    lines = [f"| architecture | {' | '.join(COLUMNS)} | tiny models |", "|---" * (len(COLUMNS) + 2) + "|"]
    for name in ARCHITECTURES:
        ticks = " | ".join("✓" if column in marks.families[name] else "–" for column in COLUMNS)
        lines.append(f"| `{name}` | {ticks} | {', '.join(sorted(marks.variants[name]))} |")
    real = [f"| {name} | {', '.join(sorted(what))} |" for name, what in sorted(marks.real.items())]
    fallback = [f"| {what} | {', '.join(sorted(marks.fallback[what]))} |" for what in ("runs", "refused")]
    return {
        "families": "\n".join(lines),
        "real": "\n".join(["| checkpoint | compared |", "|---|---|", *real]),
        "fallback": "\n".join(["| | classes in Transformers |", "|---|---|", *fallback]),
    }


def page_with_tables(page: str) -> str:
    """docs/models.md with its tables as the tests have them."""
    for name, table in tables(collect()).items():
        begin, end = f"<!-- {name}: begin (tools/models_table.py) -->\n", f"<!-- {name}: end -->\n"
        head, found, rest = page.partition(begin)
        _, closed, tail = rest.partition(end)
        if not found or not closed:
            raise ValueError(f"docs/models.md has lost the comments around its table of {name}")
        page = f"{head}{begin}\n{table}\n\n{end}{tail}"
    return page


def updated(path: Path) -> str:
    """`page_with_tables` of a file, by a process of its own: pytest's state is this process's alone."""
    command = [sys.executable, __file__, str(path)]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", cwd=ROOT)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return done.stdout


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    text = page_with_tables(Path(sys.argv[1]).read_text(encoding="utf-8"))
    sys.stdout.reconfigure(encoding="utf-8")  # type: ignore[union-attr]
    sys.stdout.write(text)
