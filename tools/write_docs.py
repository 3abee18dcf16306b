"""Write the parts of the documentation that are generated from the code: run it after changing a setting.

docs/settings.md and docs/vllm.md as a whole, the table of fields in docs/sampling.md and those of
docs/models.md (between their comments; the latter come from the tests, see models_table.py).
`tests/test_docs.py` fails where either differs from the code.
"""

from __future__ import annotations

import sys
import typing
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import msgspec

from octavo.cli.sampling_args import field_docs
from octavo.config import EngineConfig, foreign_settings
from octavo.config_options import only_note
from octavo.sampling_params import SamplingParams
from octavo.server.config import ServerConfig
from octavo.vllm_names import DRAFTS, FORMS, SAMPLING, SHORT, Foreign

DOCS = Path(__file__).parent.parent / "docs"
BEGIN, END = "<!-- fields: begin (tools/write_docs.py) -->\n", "<!-- fields: end -->\n"

HEAD = """\
# Settings

<!-- Written by tools/write_docs.py from octavo/config.py and octavo/server/config.py. -->

`LLM(...)` and `AsyncLLM.create(...)` take an engine's settings as keywords (`max_model_len=2048`), commands
as options (`--max-model-len 2048`); where a setting is on or off, `--no-…` turns it off. Amounts of tokens
and bytes may be written `8k` (8000), `8K` (8192), `4GiB`. What this version cannot do as asked is refused by
name.
"""

ENVIRONMENT = """\
## Environment

| variable | |
|---|---|
| `CUDA_VISIBLE_DEVICES` | The GPUs that `device` counts. |
| `HF_HUB_CACHE`, `HF_HOME` | Where models from the hub are kept; by default `~/.cache/huggingface/hub`. |
| `HF_HUB_OFFLINE` | `1`: models from the hub are taken from its cache alone. |
| `HF_TOKEN` | Opens the hub's private and gated models. |
| `HF_ENDPOINT` | Address of another hub. |
| `OCTAVO_API_KEY` | A key that clients of the server may send, besides those of `--api-key`. |
| `OCTAVO_CACHE` | Folder of pulled models and built CPU kernels; by default `octavo` in `$XDG_CACHE_HOME` or `~/.cache`. |
| `OCTAVO_CPU_KERNELS` | `0`: plain PyTorch instead of the C++ kernels. |
| `OCTAVO_DEBUG` | `1`: commands show the traceback of an error. |
| `OCTAVO_LOG_LEVEL` | `DEBUG`, `INFO` (default), `WARNING`, `ERROR` or `CRITICAL`, of `octavo serve` and every engine process. |
"""  # noqa: E501


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _code(value: Any) -> str:
    return "" if value is None else f"`{value}`"


def _default(spec: Any) -> Any:
    return spec.default if spec.default is not MISSING else spec.default_factory()


def settings_table(cls: type) -> str:
    """The settings of a dataclass as a Markdown table."""
    lines = ["| setting | default | |", "|---|---|---|"]
    for spec in fields(cls):
        meta = spec.metadata
        text = meta["help"]
        if meta["choices"]:
            named = [_code(choice) for choice in meta["choices"] if choice is not None]
            text += f" One of {', '.join(named)}."
        if meta["aliases"]:
            pairs = (f"{_code(word)} is {_code(choice)}" for word, choice in meta["aliases"].items())
            text += f" As in vLLM, {', '.join(pairs)}."
        if meta["low"] is not None and meta["high"] is not None:
            text += f" From {meta['low']} to {meta['high']}."
        elif meta["low"] is not None:
            text += f" At least {meta['low']}."
        if meta["only"] is not None:
            text += " " + only_note(meta["only"])
        lines.append(f"| `{spec.name}` | {_code(_default(spec))} | {_cell(text)} |")
    return "\n".join(lines) + "\n"


def settings_page() -> str:
    """docs/settings.md."""
    engine, server = settings_table(EngineConfig), settings_table(ServerConfig)
    return f"{HEAD}\n## Engine\n\n{engine}\n## Server\n\nOf `octavo serve`.\n\n{server}\n{ENVIRONMENT}"


VLLM = """\
# Coming from vLLM

<!-- Written by tools/write_docs.py from octavo/vllm_names.py. -->

Names are vLLM's: change `from vllm import` to `from octavo import` and `vllm serve` to `octavo serve`.
Options may be written with `_` for `-` (`--max_model_len`), JSON ones in parts
(`--speculative-config.method ngram`), and these have short forms:
{short}.

`LLM`, `SamplingParams`, `AsyncLLM` (also as `AsyncLLMEngine`, with `from_engine_args`), `EngineArgs`,
`AsyncEngineArgs`, `PoolingParams`, `TextPrompt`, `TokensPrompt`, `StructuredOutputsParams` and
`GuidedDecodingParams` are there; `LLMEngine` and beam search are not. Metrics have vLLM's names with
[`--metrics-prefix vllm`](monitoring.md).

What vLLM has as a setting and Octavo doesn't is below. It is taken where it changes nothing, with a line in
the log, and refused otherwise, with what to do instead, unless it asks for nothing (`None`, `False`, the
default).
"""


def _reasons(table: Mapping[str, Foreign], passes: bool) -> str:
    """Settings by what is said of them: those that are taken, or those that are refused."""
    by_note: dict[str, list[str]] = {}
    for name, foreign in table.items():
        if (foreign.passes is None) == passes:
            by_note.setdefault(foreign.note, []).append(_code(name))
    head = "| taken | because |" if passes else "| refused | instead |"
    lines = [f"| {', '.join(sorted(names))} | {_cell(note)} |" for note, names in by_note.items()]
    return "\n".join([head, "|---|---|", *lines]) + "\n"


def vllm_page() -> str:
    """docs/vllm.md."""
    short = ", ".join(f"`{SHORT[name]}` {name}" for name in sorted(SHORT))
    page = VLLM.format(short=short)
    parts = {
        "Engine": foreign_settings(EngineConfig),
        "`octavo serve`": foreign_settings(ServerConfig),
        "`speculative_config`": DRAFTS,
        "`SamplingParams`": SAMPLING,
        "`StructuredOutputsParams`": FORMS,
    }
    for title, table in parts.items():
        page += f"\n## {title}\n\n{_reasons(table, True)}\n{_reasons(table, False)}"
    return page


def sampling_table() -> str:
    """The fields of SamplingParams as a Markdown table."""
    helps, hints = field_docs(SamplingParams), typing.get_type_hints(SamplingParams)
    lines = ["| field | default | |", "|---|---|---|"]
    for spec in msgspec.structs.fields(SamplingParams):
        default = spec.default
        shown = getattr(default, "name", default)
        assert spec.name in hints and spec.name in helps, f"{spec.name} has no documentation"
        lines.append(f"| `{spec.name}` | {_code(shown)} | {_cell(helps[spec.name])} |")
    return "\n".join(lines) + "\n"


def with_table(page: str) -> str:
    """docs/sampling.md with its table as the code has it."""
    head, _, rest = page.partition(BEGIN)
    _, _, tail = rest.partition(END)
    assert tail, "docs/sampling.md has lost the comments around its table"
    return f"{head}{BEGIN}\n{sampling_table()}\n{END}{tail}"


def models_page() -> str:
    """docs/models.md with its tables as the tests have them."""
    sys.path.insert(0, str(Path(__file__).parent))
    from models_table import updated

    return updated(DOCS / "models.md")


def main() -> None:
    (DOCS / "settings.md").write_text(settings_page(), encoding="utf-8")
    (DOCS / "vllm.md").write_text(vllm_page(), encoding="utf-8")
    path = DOCS / "sampling.md"
    path.write_text(with_table(path.read_text(encoding="utf-8")), encoding="utf-8")
    (DOCS / "models.md").write_text(models_page(), encoding="utf-8")


if __name__ == "__main__":
    main()
