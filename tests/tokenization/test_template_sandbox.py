"""Templates from outside: bounded time and memory, no way out, and honest ones unchanged."""
# ruff: noqa: E501  # a template reads best on one line

from __future__ import annotations

import time
import tracemalloc
from typing import Any

import pytest

from octavo.errors import ConfigError, RequestError
from octavo.tokenization import template_sandbox
from octavo.tokenization.chat_template import load_chat_template, render_chat
from octavo.tokenization.template_sandbox import MAX_TEMPLATE_CHARS

USER = {"role": "user", "content": "hello"}

SLOW = {
    "nested loops": "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}",
    "loop of loops": "{% for a in range(9999) %}{% set x = range(9999) | list %}{% endfor %}",
    "recursive loop": "{% for a in [1] recursive %}{{ loop(range(9999)) }}{{ loop(range(9999)) }}{% endfor %}",
    "macro tree": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(200) }}",
    "filters": "{% for a in range(9999) %}{% set x = range(9999) | map('string') | list %}{% endfor %}",
    "sorting": "{% for a in range(9999) %}{% set x = range(9999) | sort(reverse=true) %}{% endfor %}",
}
HUGE = {
    "product": "{{ 'a' * 10**10 }}",
    "product of a list": "{{ [1] * 10**10 }}",
    "product, turned": "{{ 10**10 * 'a' }}",
    "doubling by ~": "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "doubling by +": "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "doubling lists": (
        "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}"
    ),
    "nested lists": (
        "{% set ns = namespace(x=['ha']) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"
        "{{ ns.x }}"
    ),
    "nested dicts": (
        "{% set ns = namespace(x={}) %}{% for i in range(60) %}{% set ns.x = {'a': ns.x, 'b': ns.x} %}{% endfor %}"
        "{{ ns.x | tojson }}"
    ),
    "nested by dict()": (
        "{% set ns = namespace(x={}) %}{% for i in range(60) %}{% set ns.x = dict(a=ns.x, b=ns.x) %}{% endfor %}"
        "{{ ns.x == ns.x }}"
    ),
    "nested namespaces": (
        "{% set ns = namespace(x=1) %}{% for i in range(60) %}{% set ns.x = namespace(a=ns.x, b=ns.x) %}{% endfor %}"
        "{{ ns.x }}"
    ),
    "nested by batch": (
        "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}"
        "{% set ns.x = [0] | batch(1000, ns.x) | list %}{% endfor %}"
    ),
    "many of one long text": "{% set x = 'a' * 50000 %}{% set y = [x] * 50000 %}{{ y | join }}",
    "power": "{{ 10 ** (10 ** 8) }}",
    "growing number": "{% set ns = namespace(x=9) %}{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "width": "{{ 'a'.center(10**10) }}",
    "width of a filter": "{{ 'a' | center(10**10) }}",
    "percent width": "{{ '%10000000000d' % 1 }}",
    "named percent width": "{{ '%(a)10000000000d' % {'a': 1} }}",
    "star width": "{{ '%*d' % (10**10, 1) }}",
    "format filter": "{{ '%10000000000d' | format(1) }}",
    "format": "{{ '{:10000000000}'.format(1) }}",
    "nested format": "{{ '{:{}}'.format(1, 10**10) }}",
    "format_map": "{{ '{a:10000000000}'.format_map({'a': 1}) }}",
    "zfill": "{{ 'a'.zfill(10**10) }}",
    "expandtabs": "{{ ('\\t' * 9999).expandtabs(10**6) }}",
    "bytes": "{{ (1).to_bytes(10**10) }}",
    "indent": "{{ ('\\n' * 9999) | indent(999) }}",
    "indent by text": "{{ ('\\n' * 9999) | indent('a' * 9999) }}",
    "json indent": "{{ messages | tojson(indent=10**9) }}",
    "deep json": (
        "{% set ns = namespace(x=range(2000) | list) %}{% for i in range(40) %}{% set ns.x = [ns.x] %}{% endfor %}"
        "{{ ns.x | tojson(indent=900) }}"
    ),
    "json separators": "{{ range(4000) | list | tojson(separators=('a' * 9999, 'b')) }}",
    "replace": "{{ ('a' * 9999).replace('a', 'b' * 9999) }}",
    "replace filter": "{{ ('a' * 9999) | replace('a', 'b' * 9999) }}",
    "translate": "{{ ('a' * 9999).translate({97: 'b' * 9999}) }}",
    "join": "{{ ('b' * 9999).join('a' * 9999) }}",
    "join filter": "{{ range(9999) | join('b' * 9999) }}",
    "join of a generator": "{{ range(9999) | map('string') | join('b' * 9999) }}",
    "output": "{% set x = 'a' * 9999 %}{% for i in range(9999) %}{{ x }}{% endfor %}",
    "captured output": "{% set x = 'a' * 9999 %}{% set y %}{% for i in range(9999) %}{{ x }}{% endfor %}{% endset %}",
    "macro output": (
        "{% set x = 'a' * 9999 %}{% macro f() %}{% for i in range(9999) %}{{ x }}{% endfor %}{% endmacro %}"
        "{% set y = f() %}"
    ),
    "round": "{{ 1.5 | round(10**8) }}",
    "batch": "{{ [1] | batch(10**8, 'a') | list }}",
    "slice": "{{ [1] | slice(10**8) | list }}",
    "search backwards": "{{ ('a' * 90000).rfind('b' + 'a' * 40000) }}",
    "slow filter": "{{ ('<' * 90000) | striptags }}",
}
ESCAPES = [
    "{{ ''.__class__.__mro__ }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update(role='x') }}",
    "{{ messages.__init__.__globals__ }}",
    "{{ raise_exception.__globals__.os }}",
    "{{ cycler.__init__.__globals__.os }}",
    "{{ '{0.__class__.__mro__}'.format(1).nothing }}",
    "{{ ('{0.__class__}' | format(1)).nothing.at }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}",
    "{{ lipsum(n=10**9) }}",
    "{{ self.__init__.__globals__ }}",
    "{{ range.__self__.nothing.at }}",
    "{{ messages | map(attribute='__class__.__mro__') | list | first | first }}",
    "{{ counted_value }}{{ ''.join.__self__.__class__.x }}",
]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenth of a second in place of ten."""
    monkeypatch.setattr(template_sandbox, "MAX_SECONDS", 0.1)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """An eighth of the room."""
    monkeypatch.setattr(template_sandbox, "BASE_CHARS", 1 << 17)


@pytest.mark.parametrize("name", SLOW)
def test_endless_templates_are_stopped(name: str, quick: None) -> None:
    start = time.thread_time()
    with pytest.raises(RequestError, match="stopped|refused"):
        render_chat(SLOW[name], [USER], {})
    assert time.thread_time() - start < 3


@pytest.mark.parametrize("name", HUGE)
def test_values_that_fill_memory_are_refused(name: str, small: None) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(RequestError) as caught:
            render_chat(HUGE[name], [USER], {})
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert "stopped" in str(caught.value)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 700
    assert peak < 16 << 20


@pytest.mark.parametrize("template", ESCAPES)
def test_the_sandbox_holds(template: str) -> None:
    messages = [dict(USER)]
    with pytest.raises(RequestError):
        render_chat(template, messages, {})
    assert messages == [USER]


@pytest.mark.parametrize(
    "text",
    [
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{{ " + "1 + " * 20_000 + "1 }}",
        "{% if a %}" * 3000 + "{% endif %}" * 3000,
        "{{ " + "[" * 3000 + "]" * 3000 + " }}",
        "x" * (MAX_TEMPLATE_CHARS + 1) + "{{ 1 }}",
    ],
)
def test_templates_that_cannot_be_compiled(text: str) -> None:
    with pytest.raises(ConfigError, match="does not parse") as caught:
        load_chat_template(text)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 700
    with pytest.raises(RequestError, match="does not parse"):
        render_chat(text, [USER], {})


def test_what_a_template_raises_is_told_in_short() -> None:
    with pytest.raises(RequestError) as caught:
        render_chat("{{ raise_exception('no ' * 100000) }}", [USER], {})
    assert len(str(caught.value)) < 700 and "no no" in str(caught.value)


def test_bounds_grow_with_the_conversation() -> None:
    long = "word " * 400_000
    template = "{% for m in messages %}{{ m.content ~ m.content | trim + m.content }}{% endfor %}"
    assert len(render_chat(template, [{"role": "user", "content": long}], {})) > 5_000_000
    many = [{"role": "user", "content": "x"}] * 16_384
    grow = (
        "{% set ns = namespace(all=[]) %}{% for m in messages %}{% set ns.all = ns.all + [m] %}{% endfor %}"
        "{{ ns.all | length }}"
    )
    assert render_chat(grow, many, {}) == "16384"


def _plain(template: str, **variables: Any) -> str:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(template).render(**variables)


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in xs %}{{ loop.index }}/{{ loop.length }}{{ loop.last }}{{ loop.nextitem }} {% else %}none{% endfor %}",
        "{% for a in xs if a != 2 %}{{ loop.length }}{{ loop.revindex }}{{ loop.previtem }}{% endfor %}",
        "{% for a in missing %}x{% else %}none{% endfor %}",
        "{% for k, v in d.items() %}{{ k ~ '=' ~ v ~ none ~ 1.5 ~ [1, k] }}{% endfor %}",
        "{% for a, (b, c) in [(1, (2, 3)), (4, (5, 6))] %}{{ a + b * c ** 2 % 7 }}{% endfor %}",
        "{% for a in tree recursive %}{{ a.n }}[{{ loop(a.sub) }}]{{ loop.depth }}{% endfor %}",
        "{{ 'a' * 3 + 'b' * -1 }}{{ [1] + [2] }}{{ (1, 2) + (3,) }}{{ 7 % 3 }}{{ 2 ** 10 }}{{ -2 * 3.5 }}{{ 2 ** -1 }}",
        "{{ '%s and %05.2f%% %r' % ('x', 1.5, 'y') }}{{ '%s' | format('z') }}{{ '{:>8} {a!r}'.format(1, a='b') }}",
        "{{ xs | join(', ') }}{{ xs | map('string') | join('-') }}{{ d | dictsort }}{{ xs | batch(2, 'f') | list }}",
        "{{ 'a b' | replace('a', 'c') | upper | center(9) }}|{{ 'x\ny' | indent(2, true) }}|{{ 1.255 | round(2) }}",
        "{% macro f(x, y=2) %}{{ x }}{{ y }}{{ caller() if caller else '' }}{% endmacro %}{{ f(1) ~ f(2, y=3) }}"
        "{% call f(5) %}c{% endcall %}",
        "{% set x %}a{{ 1 }}{% endset %}{{ x }}{% filter upper %}b{{ x }}{% endfilter %}{% block q %}{{ xs }}{% endblock %}",
        "{% set ns = namespace(a=[], b='') %}{% for x in xs %}{% set ns.a = ns.a + [x] %}{% set ns.b = ns.b ~ x %}"
        "{% endfor %}{{ ns.a }}{{ ns.b }}{{ ns.a[1:] }}{{ ns.b[::-1] }}",
        "{{ xs | selectattr('n', 'defined') | list }}{{ tree | map(attribute='n') | sum }}{{ xs | sum(start=1) }}",
        "{{ 'a-b-c'.split('-') }}{{ 'abcabc'.rfind('bc') }}{{ 'a'.join(['1', '2']) }}{{ ' x '.strip() }}{{ 'a'.zfill(4) }}",
        "{{ {'a': [1, {'b': (2, 3)}]} }}{{ [] }}{{ () }}{{ {} }}{{ [1, 2] == [1, 2] }}{{ 'a' in ['a', 'b'] }}",
        "{{ xs | first }}{{ xs | last }}{{ xs | length }}{{ missing | default('m') }}{{ xs | reverse | list }}{{ d | items | list }}",
        "{{ 'a' ~ 'b' if true else 'c' }}{{ 'é😀'.encode() }}{{ '<a>' | e }}{{ 'a' | string ~ 1 }}{{ range(3) | list }}",
    ],
)
def test_honest_templates_are_as_jinja_renders_them(template: str) -> None:
    tree = [{"n": 1, "sub": [{"n": 2, "sub": []}]}, {"n": 3, "sub": []}]
    variables: dict[str, Any] = {"xs": [1, 2, 3], "d": {"b": 1, "a": "é"}, "tree": tree}
    assert render_chat(template, [USER], {}, **variables) == _plain(template, **variables)
