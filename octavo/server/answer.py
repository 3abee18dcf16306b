"""From a model's text to what the API shows of it: reasoning, content, calls of tools."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from octavo.errors import RequestError
from octavo.sampling.structured.lark import as_lark
from octavo.server.config import ServerConfig
from octavo.server.errors import ApiError, bad_request
from octavo.server.reasoning import REASONING_FORMATS, ReasoningFormat, ReasoningParser, Thinking
from octavo.server.tools.choice import ToolMode, ToolRequest
from octavo.server.tools.json_list import JsonListParser
from octavo.server.tools.parser import CallDelta, ToolDelta, ToolParser
from octavo.server.tools.registry import TOOL_PARSERS
from octavo.server.tools.shape import CallGrammar, SpecialId
from octavo.structured_outputs import StructuredOutputsParams


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
    """How the answers to one request are made and read.

    Attributes:
        form: what their text must look like, reasoning apart.
        guaranteed: whether `form` makes sure that calls are well formed.
        calls_in_form, content_in_form: whether `form` says what calls and what other text look like.
    """

    tools: ToolRequest
    tool_parser: type[ToolParser] | None = None
    reasoning: ReasoningFormat | None = None
    form: StructuredOutputsParams | None = None
    guaranteed: bool = False
    calls_in_form: bool = False
    content_in_form: bool = False

    def form_after(self, thinking: Thinking | None) -> StructuredOutputsParams | None:
        """What the whole text must look like, by how it begins: the form waits for the reasoning's end."""
        if self.form is None or self.reasoning is None or thinking == Thinking.OVER:
            return self.form
        maybe = (thinking or self.reasoning.default) == Thinking.MAYBE
        return msgspec.structs.replace(
            self.form,
            reasoning_end=self.reasoning.end,
            reasoning_start=self.reasoning.start if maybe else None,
        )

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


def plan_answer(
    config: ServerConfig,
    tools: ToolRequest,
    form: StructuredOutputsParams | None,
    special_id: SpecialId,
) -> AnswerPlan:
    """How to make and read the answers to a request.

    Args:
        form: what the request says of its content.
        special_id: of the model's tokenizer.

    Raises:
        ApiError: 400 for what the server's settings do not serve, or its format of calls has no grammar for.
        RequestError: a form that cannot be read.
    """
    reasoning = None if config.reasoning_parser is None else REASONING_FORMATS[config.reasoning_parser]
    parser = None if config.tool_call_parser is None else TOOL_PARSERS[config.tool_call_parser]
    if tools.mode == ToolMode.NONE:
        return AnswerPlan(tools, reasoning=reasoning, form=form)
    shape = None if parser is None else parser.shape(special_id)
    if tools.mode == ToolMode.REQUIRED:
        # An answer that is calls has no content, for which another form could be asked.
        if parser is None or shape is None:
            parser, shape = JsonListParser, JsonListParser.shape(special_id)
        grammar = CallGrammar(shape, tools.callable, tools.parallel, special_id)
        return AnswerPlan(tools, parser, reasoning, _lark(grammar.required()), True, True)
    if parser is None or not config.enable_auto_tool_choice:
        raise ApiError(
            400,
            "tool_choice auto needs a server that was started with --enable-auto-tool-choice and "
            "--tool-call-parser: start it so, or set tool_choice to none, required or one tool",
            param="tool_choice",
            code="unsupported_parameter",
        )
    strict = any(tool.strict for tool in tools.callable)
    if form is None and not strict:
        return AnswerPlan(tools, parser, reasoning)
    if shape is None:
        what = "strict tools are" if strict else "a form of the content beside tools is"
        raise ApiError(
            400,
            f"{what} not supported with --tool-call-parser {config.tool_call_parser}, whose calls are not "
            "JSON: leave it out, or set tool_choice to required or none",
            param="tools" if strict else "response_format",
            code="unsupported_parameter",
        )
    grammar = CallGrammar(shape, tools.callable, tools.parallel, special_id)
    if form is None:
        return AnswerPlan(tools, parser, reasoning, _lark(grammar.optional()), shape.marked, True)
    content = as_lark(form)
    both = _lark(grammar.or_form(content))
    return AnswerPlan(tools, parser, reasoning, both, shape.marked, True, True)


def _lark(grammar: str) -> StructuredOutputsParams:
    try:
        return StructuredOutputsParams(grammar=grammar)
    except RequestError as error:
        raise bad_request(f"tools: {error}", "tools") from None
