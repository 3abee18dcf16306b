"""Every example in the documentation runs, or says why it doesn't.

A fenced `python` block is executed as it stands, with the default model, in a folder of its own.
Blocks of one page share their names, in the order of the page, as a reader would type them. Of a
fenced `console` block each line that begins with `$ octavo` is parsed by the real command line
(every command, option and value must exist); commands that start servers or load models are run by
the tests of the commands. A block after an HTML comment `<!-- not run: reason -->` is left out. Options
and metrics that the text names exist.
"""

from __future__ import annotations

import argparse
import functools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    [*ROOT.glob("*.md"), *(p for d in ("docs", "benchmarks", "deploy") for p in (ROOT / d).rglob("*.md"))]
)
CODE = ("octavo", "tests", "benchmarks", "tools")
FENCE = re.compile(
    r"(?P<skip><!-- not run: [^>]+ -->\s*\n)?^```(?P<language>\w+)\n(?P<body>.*?)^```$", re.M | re.S
)

OPTION = r"--[a-z][a-z0-9_-]*[a-z0-9]"


class Block(NamedTuple):
    language: str
    body: str
    line: int
    skipped: bool


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(m["language"], m["body"], text.count("\n", 0, m.start("body")) + 1, m["skip"] is not None)
        for m in FENCE.finditer(text)
    ]


def pages_to_execute() -> list[Path]:
    """Pages with Python examples. The Chinese README's are held equal to the English one's (below)."""
    return [
        page
        for page in PAGES
        if page.name != "README.zh-CN.md"
        and any(b.language == "python" and not b.skipped for b in blocks(page))
    ]


@pytest.mark.parametrize("page", pages_to_execute(), ids=lambda p: str(p.relative_to(ROOT)))
def test_python_examples_run(page, default_model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "example"}
    for block in blocks(page):
        if block.language == "python" and not block.skipped:
            # Blank lines in front, so that a traceback points into the page.
            exec(compile("\n" * (block.line - 1) + block.body, str(page), "exec"), names)


def commands(page: Path) -> list[tuple[int, list[str]]]:
    """Lines and words of a page's `$ octavo` commands; of variables, a line before sets each."""
    found = []
    for block in blocks(page):
        if block.language != "console" or block.skipped:
            continue
        lines = block.body.replace("\\\n", " ").splitlines()
        variables: dict[str, str] = {}
        for number, line in enumerate(lines, block.line):
            if setting := re.fullmatch(r'\$ (\w+)="(.*)"', line):
                variables[setting[1]] = setting[2]
            if line.startswith("$ octavo"):
                for name, value in variables.items():
                    line = line.replace(f"${name}", value)
                argv = shlex.split(line[2:], comments=True)
                cut = next((i for i, word in enumerate(argv) if word in ("|", ">", "<", "&")), len(argv))
                found.append((number, argv[1:cut]))
    return found


@pytest.mark.parametrize("page", [p for p in PAGES if commands(p)], ids=lambda p: str(p.relative_to(ROOT)))
def test_console_examples_parse(page):
    from octavo.cli.main import build_parser

    for number, argv in commands(page):
        try:
            build_parser(argv[0]).parse_args(argv)
        except SystemExit as stop:
            if stop.code:
                pytest.fail(f"{page.name}:{number}: octavo {shlex.join(argv)} is refused")


@functools.cache
def options() -> set[str]:
    """The options of all commands."""
    from octavo.cli.main import COMMANDS, build_parser

    found: set[str] = set()
    parsers = [build_parser(name) for name in COMMANDS]
    for parser in parsers:  # grows while it is read
        for action in parser._actions:
            found.update(action.option_strings)
            if isinstance(action, argparse._SubParsersAction):
                parsers += action.choices.values()
    return found


def spans(page: Path) -> list[str]:
    """What a page has in backticks, blocks of code apart."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", text)]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_options_that_the_text_names_exist(page):
    """Those of the commands; of the scripts of benchmarks/ where it runs one, or is a page of theirs."""
    scripts = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "benchmarks").glob("*.py"))
    known, lost = options() | {"--no"}, []  # `--no-…`
    own = set(re.findall(OPTION, scripts))
    for span in spans(page):
        if span.startswith("-") or "octavo" in span or span.startswith("python "):
            more = own if span.startswith("python ") or page.parent.name == "benchmarks" else set()
            named = {name.replace("_", "-") for name in re.findall(rf"(?<!\S){OPTION}", span)}
            lost += named - known - more
    assert not lost


def anchors(page: Path) -> set[str]:
    """The names that GitHub gives a page's headings."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S)
    heads = re.findall(r"^#+ +(.*)$", text, re.M)
    return {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" not in target and not target.startswith(("#", "mailto:")):
            assert (page.parent / target.partition("#")[0]).exists(), f"{page.name} links to {target}"
        path, _, anchor = target.partition("#")
        if anchor and "://" not in target:
            other = page.parent / path if path else page
            assert anchor in anchors(other), f"{page.name} links to {target}, which {other.name} lacks"


def texts() -> Iterator[tuple[str, str]]:
    """All that a reader is told: pages, and the code with its docstrings and comments."""
    for path in (*PAGES, *(path for part in CODE for path in (ROOT / part).rglob("*.py"))):
        yield str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")


def test_files_that_are_named_exist():
    there = {f"/{path.relative_to(ROOT)}" for part in CODE for path in (ROOT / part).rglob("*.*")}
    elsewhere = {"convert_hf_to_gguf.py", "src/llama-model.cpp"}  # llama.cpp's
    lost = [
        f"{where}: {name}"
        for where, text in texts()
        for name in re.findall(r"`([\w/.-]+\.(?:py|cpp|h|js|css))`", text)
        if name not in elsewhere and not any(path.endswith("/" + name) for path in there)
    ]
    assert not lost


def test_names_of_our_modules_that_are_given_in_full_exist():
    """`octavo.engine.watchdog`, or `octavo.engine.watchdog.Watch`."""
    spans = {"octavo.service", "octavo.schedule"}  # of traces and profiles
    lost = []
    for where, text in texts():
        for name in set(re.findall(r"`(octavo(?:\.\w+)+)[`(]", text)) - spans:
            module, rest = ROOT / "octavo", name.split(".")[1:]
            while rest and ((module / rest[0]).is_dir() or (module / f"{rest[0]}.py").is_file()):
                module /= rest.pop(0)
            if rest:
                path = module / "__init__.py" if module.is_dir() else module.with_suffix(".py")
                words = set(re.findall(r"\w+", path.read_text(encoding="utf-8")))
                if not words.issuperset(rest):
                    lost.append(f"{where}: {name}")
    assert not lost


def test_what_is_generated_from_the_code_is_what_the_code_says():
    import importlib.util

    spec = importlib.util.spec_from_file_location("write_docs", ROOT / "tools" / "write_docs.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    hint = "run `python tools/write_docs.py`"
    assert (ROOT / "docs" / "settings.md").read_text(encoding="utf-8") == tool.settings_page(), hint
    assert (ROOT / "docs" / "vllm.md").read_text(encoding="utf-8") == tool.vllm_page(), hint
    sampling = (ROOT / "docs" / "sampling.md").read_text(encoding="utf-8")
    assert sampling == tool.with_table(sampling), hint
    assert (ROOT / "docs" / "models.md").read_text(encoding="utf-8") == tool.models_page(), hint


@functools.cache
def metric_names() -> set[str]:
    """The names of all metrics."""
    from octavo.messages import CoreStats
    from octavo.server.metrics import Metrics

    # Speculation's and a pipeline's are there only where there is one.
    metrics = (
        Metrics(
            lambda: CoreStats(spec_drafts=1, pipeline_total_seconds=1.0), "m", 128, synthetic_acceptance=[0.5]
        )
        .render()
        .decode()
    )
    names = re.findall(r"^# TYPE (octavo:\S+)", metrics, re.M)
    return {name for name in names if not name.endswith("_created")}


def test_monitoring_page_names_every_metric():
    page = (ROOT / "docs" / "monitoring.md").read_text(encoding="utf-8")
    assert set(re.findall(r"`(octavo:\w+)(?:\{\w+=[^`]*\})?`", page)) == metric_names()


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_metrics_that_the_text_names_exist(page):
    told = {name for span in spans(page) for name in re.findall(r"octavo:\w+", span)}
    assert told <= metric_names()


def test_server_page_names_every_endpoint():
    from octavo.server.endpoints import DEVELOPMENT, KV_DEBUG, OPERATIONS, PAGE, PROFILING

    page = (ROOT / "docs" / "server.md").read_text(encoding="utf-8")
    endpoints = set(re.findall(r"`((?:GET|POST|DELETE) /[^`]*)`", page))
    operations = OPERATIONS + PAGE + PROFILING + DEVELOPMENT + KV_DEBUG
    shown = [operation for operation in operations if not operation.hidden]
    assert endpoints == {f"{operation.method} {operation.path}" for operation in shown}


def test_batch_page_names_every_url():
    from octavo.server.batch import ENDPOINTS

    page = (ROOT / "docs" / "run-batch.md").read_text(encoding="utf-8")
    sentence = page[page.index("`url` is") : page.index("`method` may")]
    assert set(re.findall(r"`(/[^`]+)`", sentence)) == set(ENDPOINTS)


def test_the_readme_exists_in_two_languages_with_the_same_examples():
    english, chinese = blocks(ROOT / "README.md"), blocks(ROOT / "README.zh-CN.md")
    assert [b.language for b in english] == [b.language for b in chinese]

    def code(page: list[Block]) -> list[str]:
        return [re.sub(r"#.*|\"[^\"]*\"|'[^']*'", "", b.body) for b in page]

    assert code(english) == code(chinese)
