"""The formats of tool calls by the names that `--tool-call-parser` takes, which are vLLM's."""

from __future__ import annotations

from octavo.server.tools.gemma import FunctionGemmaParser, Gemma4Parser
from octavo.server.tools.hermes import HermesParser
from octavo.server.tools.llama3_json import Llama3JsonParser
from octavo.server.tools.mistral import MistralParser
from octavo.server.tools.parser import ToolParser
from octavo.server.tools.pythonic import PythonicParser

TOOL_PARSERS: dict[str, type[ToolParser]] = {
    "hermes": HermesParser,
    "llama3_json": Llama3JsonParser,
    "mistral": MistralParser,
    "functiongemma": FunctionGemmaParser,
    "gemma4": Gemma4Parser,
    "pythonic": PythonicParser,
}
