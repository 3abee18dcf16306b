"""From a model's text to what the API shows of it: reasoning, content, calls of tools."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from octavo.server.config import ServerConfig
from octavo.server.errors import ApiError
from octavo.server.reasoning import REASONING_FORMATS, ReasoningFormat, ReasoningParser, Thinking
from octavo.server.tools.choice import ToolMode, ToolRequest
from octavo.server.tools.parser import CallDelta, ToolDelta, ToolParser
from octavo.server.tools.registry import TOOL_PARSERS


@dataclass
class AnswerDelta:
    """What some text added to an answer."""

    content: str = ""
    reasoning: str = ""
    calls: list[CallDelta] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls)


class AnswerParser:
    """Reads one choice's text, in pieces or whole: the sum of all deltas is the same."""

    def __init__(self, reasoning: ReasoningParser | None, tools: ToolParser | None, most_calls: int | None):
        self._reasoning, self._tools = reasoning, tools
        self._most_calls = most_calls

    def feed(self, text: str, last: bool = False) -> AnswerDelta:
        """Read on; `last`: no text follows, so nothing is held back any more."""
        thought, said = ("", text) if self._reasoning is None else self._reasoning.feed(text)
        if last and self._reasoning is not None:
            more_thought, more_said = self._reasoning.finish()
            thought, said = thought + more_thought, said + more_said
        if self._tools is None:
            return AnswerDelta(said, thought)
        parts = [self._tools.feed(said)] + ([self._tools.finish()] if last else [])
        return AnswerDelta("".join(p.content for p in parts), thought, self._allowed(parts))

    @property
    def ends_in_calls(self) -> bool:
        """Whether the answer, which has ended, is calls that are all complete."""
        return self._tools is not None and self._tools.num_calls > 0 and not self._tools.cut

    def _allowed(self, parts: Sequence[ToolDelta]) -> list[CallDelta]:
        calls = [call for part in parts for call in part.calls]
        return [call for call in calls if self._most_calls is None or call.index < self._most_calls]


@dataclass(frozen=True)
class AnswerPlan:
    """How the answers to one request are read. `parser` is None where their text is shown as it is.

    Attributes:
        show_special_tokens: marks of the formats may be special tokens, which then must be in the text.
    """

    tools: ToolRequest
    tool_parser: type[ToolParser] | None = None
    reasoning: ReasoningFormat | None = None
    guaranteed: bool = False

    @property
    def reads(self) -> bool:
        """Whether there is something to find in the text."""
        return self.tool_parser is not None or self.reasoning is not None

    @property
    def markers(self) -> list[str]:
        """Marks that must stay in the text, be they special tokens or not."""
        marks = list(self.tool_parser.markers) if self.tool_parser is not None else []
        return marks + ([self.reasoning.start, self.reasoning.end] if self.reasoning is not None else [])

    def parser(self, thinking: Thinking | None) -> AnswerParser | None:
        """A parser of one choice, by how it begins."""
        if not self.reads:
            return None
        reasoning = None
        if self.reasoning is not None:
            reasoning = ReasoningParser(self.reasoning, thinking or self.reasoning.default)
        tools = None
        if self.tool_parser is not None:
            tools = self.tool_parser([f.name for f in self.tools.callable], self.guaranteed)
        return AnswerParser(reasoning, tools, None if self.tools.parallel else 1)


def plan_answer(config: ServerConfig, tools: ToolRequest) -> AnswerPlan:
    """How to read the answers to a request.

    Raises:
        ApiError: 400 for a choice of tools that the server's settings do not serve.
    """
    reasoning = None if config.reasoning_parser is None else REASONING_FORMATS[config.reasoning_parser]
    if tools.mode == ToolMode.NONE:
        return AnswerPlan(tools, reasoning=reasoning)
    if tools.mode == ToolMode.AUTO:
        if not config.enable_auto_tool_choice or config.tool_call_parser is None:
            raise ApiError(
                400,
                "tool_choice auto needs a server that was started with --enable-auto-tool-choice and "
                "--tool-call-parser: start it so, or set tool_choice to none, required or one tool",
                param="tool_choice",
                code="unsupported_parameter",
            )
        return AnswerPlan(tools, TOOL_PARSERS[config.tool_call_parser], reasoning)
    raise ApiError(400, "tool_choice required is not supported by this version", param="tool_choice")
