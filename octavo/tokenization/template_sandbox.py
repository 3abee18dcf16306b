"""Jinja for templates from outside: what Hugging Face's sandbox allows, within bounds of time and memory.

Jinja's sandbox keeps a template from Python's internals and from changing what it is given. It does not
keep it from running for ever or from filling memory, and a template comes with a model, or even with a
request. So every loop step, call and operator passes through `_Meter`: the processor time of the
rendering thread is bounded, and no string or list may grow far beyond what went in. Bounds depend on
the messages' size, so that no honest template meets them; within them, output is unchanged.
"""

from __future__ import annotations

import contextvars
import functools
import re
import string
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.visitor import NodeTransformer

MAX_TEMPLATE_CHARS = 1 << 18
MAX_SECONDS = 10.0
BASE_CHARS = 1 << 20
CHARS_PER_CHAR = 16
MAX_WIDTH = 1000
_MAX_BITS = 1 << 14
_STEPS_PER_LOOK = 64
_MAX_SEARCH = 1 << 30
_MAX_SLOW = 1 << 16
# Numbers with this many digits in a format are widths or precisions beyond MAX_WIDTH.
_WIDE = re.compile(r"\d{4,}|\*")


class TemplateLimitError(jinja2.TemplateError):
    """A template asked for more time or memory than the conversation can need."""


class _Meter:
    """What one rendering has used. Owned by the thread that renders."""

    def __init__(self, max_chars: int):
        self.max_chars = max_chars
        self._written = self._added = self._steps = 0
        self._end = time.thread_time() + MAX_SECONDS

    def step(self, cost: int = 1) -> None:
        """Count a loop step, call or operator (or work that takes as long as `cost` of them)."""
        self._steps += cost
        if self._steps >= _STEPS_PER_LOOK:
            self._steps = 0
            if time.thread_time() > self._end:
                raise TemplateLimitError(f"it runs longer than {MAX_SECONDS:g} seconds")

    def size(self, chars: int) -> None:
        """Refuse to make a value of so many characters."""
        if chars > self.max_chars:
            raise TemplateLimitError(f"it makes a value of more than {self.max_chars} characters")

    def value(self, value: Any) -> Any:
        """A value that the template made, refused if it is huge when written out.

        Every list and dictionary passes here when it is made. So no value can name another twice, and
        that one another twice, until printing or comparing it never ends.
        """
        if isinstance(value, str):
            self.size(len(value))
        elif isinstance(value, _CONTAINERS):
            weight = _weight(value, self.max_chars)
            self.size(weight)
            self.step(weight >> 10)
        return value

    def added(self, left: Any, right: Any) -> None:
        """Refuse `left + right` of two lists if it is huge; cheap where a list grows item by item."""
        self._added += _weight(right, self.max_chars)
        if self._added > 16 * self.max_chars:
            raise TemplateLimitError("it adds up too many lists")
        if len(left).bit_length() != (len(left) + len(right)).bit_length():
            self.size(_weight(left, self.max_chars) + _weight(right, self.max_chars))

    def written(self, chars: int) -> None:
        """Count characters of the rendered text."""
        self._written += chars
        if self._written > self.max_chars:
            raise TemplateLimitError(f"it writes more than {self.max_chars} characters")


_CONTAINERS = (list, tuple, dict, jinja2.utils.Namespace)


# Without a rendering (constant folding while a template is compiled) the least is allowed.
_meter: contextvars.ContextVar[_Meter] = contextvars.ContextVar("octavo_template_meter")


def _current() -> _Meter:
    meter = _meter.get(None)
    return meter if meter is not None else _Meter(BASE_CHARS)


def _weight(value: Any, limit: float = float("inf")) -> int:
    """About the number of characters in a value of dicts, lists and strings; counting ends at `limit`."""
    total, stack = 0, [value]
    while stack and total <= limit:
        value = stack.pop()
        total += 8
        if isinstance(value, str):
            total += len(value)
        elif isinstance(value, (list, tuple)):
            total += 8 * len(value)
            stack.extend(value)
        elif isinstance(value, Mapping):
            total += 8 * len(value)
            stack.extend(value)
            stack.extend(value.values())
        elif isinstance(value, jinja2.utils.Namespace):
            stack.append(object.__getattribute__(value, "_Namespace__attrs"))
    return total


def _length(value: Any) -> int:
    try:
        return len(value)
    except TypeError:
        return 8


class _Formatter(SandboxedFormatter):
    def format_field(self, value: Any, format_spec: str) -> str:
        _check_width(format_spec)
        return str(super().format_field(value, format_spec))


def _check_width(spec: str) -> None:
    if _WIDE.search(spec):
        raise TemplateLimitError(f"it formats to a width of more than {MAX_WIDTH}: {spec[:40]!r}")


def _check_percent(format: str) -> None:
    for width in re.findall(r"%(?:\([^)]*\))?([-+ #0-9.*]*)", format):
        _check_width(width)


class _Counted(NodeTransformer):
    """Puts every loop's iterable, every `~` and every list that is made through the environment."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = self._through("counted_steps", [node.iter], node)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return self._through("counted_concat", node.nodes, node)

    def visit_List(self, node: nodes.List | nodes.Tuple | nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        if getattr(node, "ctx", "load") != "load" or all(isinstance(i, nodes.Const) for i in node.items):
            return node
        return self._through("counted_value", [node], node)

    visit_Tuple = visit_List
    visit_Dict = visit_List

    @staticmethod
    def _through(name: str, arguments: list[Any], node: nodes.Node) -> nodes.Expr:
        function = nodes.EnvironmentAttribute(name, lineno=node.lineno)
        return nodes.Call(function, arguments, [], None, None, lineno=node.lineno)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox, metered. Immutable after construction; renderings may run in any threads at once."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **options: Any):
        super().__init__(**options)
        self.globals.pop("lipsum", None)
        for name, function in list(self.filters.items()):
            self.filters[name] = _filter(name, function)

    def add_filter(self, name: str, function: Callable[..., Any]) -> None:
        """Add a filter, metered as the others are."""
        self.filters[name] = _filter(name, function)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        _Counted().visit(tree)
        return tree

    def counted_steps(self, iterable: Any) -> Iterable[Any]:
        """A loop's iterable, counted; sized iterables keep their length for `loop`."""
        if isinstance(iterable, jinja2.Undefined):
            return iterable
        return _Steps(iterable, _current())

    def counted_value(self, value: Any) -> Any:
        """A list, tuple or dictionary that an expression made."""
        return _current().value(value)

    def counted_concat(self, *values: Any) -> str:
        """The `~` operator."""
        meter = _current()
        texts = [str(value) for value in values]
        meter.size(sum(map(len, texts)))
        return "".join(texts)

    def concat(self, parts: Iterable[str]) -> str:
        """Joins what blocks, macros and the template itself wrote."""
        meter = _current()
        texts, total = [], 0
        for text in parts:
            total += len(text)
            meter.size(total)
            texts.append(text)
        return "".join(texts)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """`+`, `*`, `**` and `%`, refused before they make something huge."""
        meter = _current()
        meter.step()
        if operator == "*":
            _check_product(meter, left, right)
        elif operator == "+" and isinstance(left, str):
            meter.size(len(left) + _length(right))
        elif operator == "+" and isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
            meter.added(left, right)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            if left.bit_length() * abs(right) > _MAX_BITS:
                raise TemplateLimitError("it raises a number to a power of more than 4,000 digits")
        elif operator == "%" and isinstance(left, str):
            _check_percent(left)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """Every call that a template makes."""
        meter = _current()
        meter.step()
        if isinstance(__obj, jinja2.runtime.LoopContext) and args:
            args = (_Steps(args[0], meter), *args[1:])
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str):
            _check_method(meter, owner, getattr(__obj, "__name__", ""), args)
        elif isinstance(owner, int) and not isinstance(owner, bool):
            for value in (*args, *kwargs.values()):  # int.to_bytes
                _check_number("a number's method", value)
        return meter.value(super().call(__context, __obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """`str.format`, with the sandbox's formatter and bounded widths."""
        function = getattr(value, "__func__", value)
        owner = getattr(value, "__self__", None)
        if not isinstance(owner, str) or getattr(function, "__name__", "") not in ("format", "format_map"):
            return super().wrap_str_format(value)
        formatter: string.Formatter = _Formatter(self)
        mapping = getattr(function, "__name__", "") == "format_map"

        def formatted(*args: Any, **kwargs: Any) -> str:
            if mapping:
                return formatter.vformat(owner, (), args[0])
            return formatter.vformat(owner, args, kwargs)

        return formatted

    def render(self, template: jinja2.Template, variables: Mapping[str, Any]) -> str:
        """Render within bounds that follow from the size of the variables.

        Raises:
            TemplateLimitError: the bounds are met.
            Exception: whatever the template raises.
        """
        meter = _Meter(BASE_CHARS + CHARS_PER_CHAR * _weight(variables))
        token = _meter.set(meter)
        try:
            parts = []
            for part in template.generate(variables):
                meter.written(len(part))
                parts.append(part)
            return "".join(parts)
        finally:
            _meter.reset(token)


class _Steps:
    """An iterable whose steps are counted."""

    def __init__(self, iterable: Any, meter: _Meter):
        self._iterable, self._meter = iterable, meter

    def __iter__(self) -> Iterator[Any]:
        step = self._meter.step
        for item in self._iterable:
            step()
            yield item

    def __len__(self) -> int:
        return len(self._iterable)


def _check_product(meter: _Meter, left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        if left.bit_length() + right.bit_length() > _MAX_BITS:
            raise TemplateLimitError("it makes a number of more than 4,000 digits")
        return
    if isinstance(left, int):
        left, right = right, left
    if isinstance(right, int):
        meter.size((len(left) if isinstance(left, str) else _weight(left, meter.max_chars)) * max(right, 0))


def _check_number(what: str, value: Any) -> None:
    if isinstance(value, int) and abs(value) > MAX_WIDTH:
        raise TemplateLimitError(f"it calls {what} with {value}, more than {MAX_WIDTH}")


def _check_method(meter: _Meter, owner: str, name: str, args: tuple[Any, ...]) -> None:
    """Methods of a string whose result, or work, is out of proportion to it."""
    if name in ("center", "ljust", "rjust", "zfill", "expandtabs"):
        for value in args:
            _check_number(name, value)
        if name == "expandtabs":
            meter.size(len(owner) + owner.count("\t") * MAX_WIDTH)
    elif name == "replace" and len(args) >= 2:
        _replaced(owner, *args)
    elif name == "join" and args:
        _joined(args[0], owner)
    elif name == "translate" and args:
        longest = max((_length(v) for v in args[0].values()), default=0) if hasattr(args[0], "values") else 1
        meter.size(len(owner) * longest)
    elif name in ("rfind", "rindex", "rsplit", "rpartition") and args:
        # Searching backwards takes the product of both lengths, in one step.
        if len(owner) * _length(args[0]) > _MAX_SEARCH:
            raise TemplateLimitError(f"it calls {name} with a text of {_length(args[0])} characters")


def _replaced(value: Any, old: Any, new: Any, *_: Any, **__: Any) -> None:
    text, old, new = str(value), str(old), str(new)
    _current().size(len(text) + text.count(old) * len(new))


def _joined(values: Any, separator: Any = "", *_: Any, **__: Any) -> None:
    meter, width = _current(), _length(separator)
    if isinstance(values, (list, tuple, str, dict, range)):
        meter.size((_weight(values, meter.max_chars) if width else 0) + len(values) * width)
    elif width > MAX_WIDTH:  # a generator, of a length that is not known
        raise TemplateLimitError(f"it joins with a text of {width} characters")


def _indented(value: Any, width: Any = 4, *_: Any, **__: Any) -> None:
    text = str(value)
    columns = width if isinstance(width, int) else _length(width)
    _check_number("the filter indent", columns)
    _current().size(len(text) + (text.count("\n") + 1) * columns)


def _short(value: Any, *_: Any, **__: Any) -> None:
    if _weight(value, _MAX_SLOW) > _MAX_SLOW:
        raise TemplateLimitError(f"it gives a text of more than {_MAX_SLOW} characters to a slow filter")


def _numbers(what: str) -> Callable[..., None]:
    def check(_: Any, *args: Any, **kwargs: Any) -> None:
        for value in (*args, *kwargs.values()):
            _check_number(what, value)

    return check


# Filters whose result, or work, is out of proportion to what they get.
_CHECKS: dict[str, Callable[..., None]] = {
    "replace": _replaced,
    "join": _joined,
    "indent": _indented,
    "format": lambda value, *_, **__: _check_percent(str(value)),
    **{name: _numbers(f"the filter {name}") for name in ("center", "batch", "slice", "round")},
    **dict.fromkeys(("wordwrap", "urlize", "striptags", "pprint", "xmlattr"), _short),
}
# These give back what was there before.
_SELECT = frozenset(("first", "last", "default", "d", "attr", "min", "max", "random"))


def _filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter, metered."""
    check = _CHECKS.get(name)
    # A filter that wants the environment or the context gets it first, and says so in an attribute.
    first = int(getattr(function, "jinja_pass_arg", None) is not None)
    weighed = name not in _SELECT

    @functools.wraps(function)
    def metered(*args: Any, **kwargs: Any) -> Any:
        meter = _current()
        meter.step()
        if check is not None:
            check(*args[first:], **kwargs)
        value = function(*args, **kwargs)
        return meter.value(value) if weighed else value

    return metered


def check_json(value: Any, indent: Any, separators: Any) -> None:
    """Refuse to write JSON whose indentation or separators make it huge.

    Raises:
        TemplateLimitError: it would be.
    """
    _check_number("tojson", indent)
    width = indent if isinstance(indent, int) else _length(indent) if isinstance(indent, str) else 0
    between = sum(map(_length, separators)) if isinstance(separators, (list, tuple)) else 2
    meter = _current()
    total, stack = 0, [(value, 1)]
    while stack and total <= meter.max_chars:
        value, depth = stack.pop()
        total += max(width, 0) * depth + between + (len(value) if isinstance(value, str) else 0)
        if isinstance(value, Mapping):
            stack.extend((item, depth + 1) for item in value.values())
        elif isinstance(value, (list, tuple)):
            stack.extend((item, depth + 1) for item in value)
    meter.size(total)
