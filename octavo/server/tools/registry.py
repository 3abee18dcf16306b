"""The formats of tool calls by the names that `--tool-call-parser` takes, which are vLLM's."""

from __future__ import annotations

from octavo.server.tools.hermes import HermesParser
from octavo.server.tools.parser import ToolParser

TOOL_PARSERS: dict[str, type[ToolParser]] = {"hermes": HermesParser}
