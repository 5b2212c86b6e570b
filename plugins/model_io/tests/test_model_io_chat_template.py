"""Templates are untrusted: sandboxed and bounded (class 10), and otherwise behave as their authors expect."""

from __future__ import annotations

import json
import re
import threading
import time
import tracemalloc
from typing import Any

import pytest

from hardpoint.errors import InvalidRequestError, ModelFormatError
from hardpoint_model_io.chat.template import ChatTemplate

MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]


def render(source: str, **variables: Any) -> str:
    return ChatTemplate(source).render({"messages": MESSAGES, **variables})


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% for m in messages %}[{{ m.role }}:{{ m['content'] }}]{% endfor %}", "[user:hi][assistant:yo]"),
        ("  {% if true %}\nx\n  {% endif %}\ny", "x\ny"),
        ("{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.role }}{% endfor %}", "assistant"),
        ("{% for m in messages %}{{ m.role }}{% break %}{% endfor %}", "user"),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "2"),
        ("{% macro tag(x) %}<{{ x }}>{% endmacro %}{{ tag('a') ~ tag('b') }}", "<a><b>"),
        ("{{ messages[1:] | length }}{{ messages | map(attribute='role') | join(',') }}", "1user,assistant"),
        ("{{ messages | selectattr('role', 'equalto', 'user') | list | length }}", "1"),
        ("{{ 'a<b' }}|{{ 'x' | upper }}|{{ ' y ' | trim }}|{{ none is none }}", "a<b|X|y|True"),
        ("{{ {'a': [1, 'é<']} | tojson }}", '{"a": [1, "é<"]}'),
        ("{{ {'b': 1, 'a': 2} | tojson(indent=2, sort_keys=true) }}", '{\n  "a": 2,\n  "b": 1\n}'),
        ("{% generation %}kept{% endgeneration %}", "kept"),
        ("{{ 'a,b'.split(',')[-1].replace('b', 'cc').rstrip() }}", "cc"),
        ("{{ missing }}{{ missing is defined }}{{ missing or 'd' }}", "Falsed"),
        ("{% set x %}block{% endset %}{{ x }}{% set a, b = 1, 2 %}{{ a + b }}", "block3"),
        (
            "{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{% endfor %}{{ 2 ** 3 }}{{ 'ab' * 2 }}{{ 7 % 4 }}",
            "a18abab3",
        ),
        ("{{ 'x' | indent(2, true) }}{{ 'a' if 'b' in ['b'] else 'c' }}{{ '-'.join(['a', 'b']) }}", "  xaa-b"),
        ("{% call(x) m() %}{{ x }}{% endcall %}{% macro m() %}{{ caller('z') }}{% endmacro %}", None),
    ],
)
def test_what_chat_templates_use(source: str, expected: str | None) -> None:
    if expected is None:
        # A macro is called before it is defined, which is the template's own mistake.
        with pytest.raises(InvalidRequestError):
            render(source)
        return
    assert render(source) == expected


def test_the_time_of_day_is_available() -> None:
    assert re.fullmatch(r"\d{4}-\d\d", render("{{ strftime_now('%Y-%m') }}"))


def test_a_template_may_refuse() -> None:
    with pytest.raises(InvalidRequestError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize(
    "source",
    ["{{ messages[0].nope.nope }}", "{{ 1 / 0 }}", "{{ messages + 1 }}", "{{ messages | tojson(indent='x') }}"],
)
def test_a_template_that_does_not_fit_the_messages_is_a_client_error(source: str) -> None:
    with pytest.raises(InvalidRequestError, match="the chat template failed") as caught:
        render(source)
    assert "Traceback" not in str(caught.value)


@pytest.mark.parametrize(
    "source",
    ["{% for %}", "{{", "{% endif %}", "{{ x | no_such_filter }}", "{% include 'x' %}{{", "(" * 9 + "{{ ((( }}"],
)
def test_a_broken_template_is_one_message(source: str) -> None:
    with pytest.raises(ModelFormatError, match="the chat template cannot be compiled"):
        ChatTemplate(source)


def test_a_deep_or_huge_template_is_refused() -> None:
    for source in ("{{ " + "(" * 5_000 + "1" + ")" * 5_000 + " }}", "x" * (1 << 21)):
        with pytest.raises(ModelFormatError, match="chat template"):
            ChatTemplate(source)


GADGETS = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ ''['__class__'] }}{{ ''['__class__'].mro() }}",
    "{{ (''|attr('__class__')) }}",
    "{{ self.__init__.__globals__ }}",
    "{{ namespace.__init__.__globals__['os'].popen('id').read() }}",
    "{{ raise_exception.__globals__['__builtins__']['open']('/etc/passwd') }}",
    "{{ cycler.__init__.__globals__.os.system('id') }}",
    "{{ lipsum.__globals__['os'] }}{{ lipsum() }}",
    "{{ '{0.__class__}'.format(messages) }}",
    "{{ dict.mro() }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update(role='x') }}",
    "{{ ().__class__.__base__ }}{{ ().__class__.__base__.__subclasses__() }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}",
    "{% extends 'x' %}",
    "{{ environment.from_string('x') }}",
    "{{ (messages | map(attribute='__class__') | list)[0].mro() }}",
]


@pytest.mark.parametrize("source", GADGETS)
def test_gadgets_find_no_way_out(source: str) -> None:
    try:
        text = render(source)
    except (InvalidRequestError, ModelFormatError) as error:
        text = str(error)
    assert not re.search(r"root:|uid=|<class|subclasses|<module|built-in method|<function", text)


BOMBS = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "loop filter": "{% for a in range(99999) if (range(99999) | list | length) < 0 %}{% endfor %}",
    "recursive loop": "{% for a in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "deep macro": "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "branching macro": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "doubling ~": "{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "doubling +": "{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "doubling list": "{% set ns = namespace(x=[1]) %}{% for i in range(99) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}",
    "doubling tuple": "{% set ns = namespace(x=(1,)) %}{% for i in range(99) %}"
    "{% set ns.x = (ns.x, ns.x) %}{% endfor %}",
    "doubling dict": "{% set ns = namespace(x={}) %}{% for i in range(99) %}"
    "{% set ns.x = {'a': ns.x, 'b': ns.x} %}{% endfor %}{{ ns.x }}",
    "squaring": "{% set ns = namespace(x=9) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "repeat text": "{{ 'a' * 10000000000 }}",
    "repeat list": "{{ [1] * 10000000000 }}",
    "repeat nested": "{{ [['a' * 1000000]] * 1000000 }}",
    "power": "{{ 10 ** (10 ** 10) }}",
    "center": "{{ 'a'.center(10000000000) }}",
    "zfill": "{{ 'a'.zfill(10000000000) }}",
    "percent": "{{ '%1000000000d' % 1 }}",
    "format": "{{ '{:1000000000}'.format(1) }}",
    "to_bytes": "{{ (1).to_bytes(1000000000, 'big') }}",
    "expandtabs": "{{ '\t'.expandtabs(1000000000) }}",
    "join method": "{{ ('a' * 1000000).join('b' * 1000000) }}",
    "join filter": "{{ range(99999) | join('a' * 1000000) }}",
    "join by name": "{{ range(99999) | join(d='a' * 1000000) }}",
    "replace method": "{{ ('a' * 1000000).replace('a', 'b' * 1000000) }}",
    "replace filter": "{{ ('a' * 1000000) | replace('a', 'b' * 1000000) }}",
    "indent": "{{ ('\n' * 1000000) | indent(1000000) }}",
    "indent by name": "{{ ('\n' * 1000000) | indent(width=1000000) }}",
    "indent by text": "{{ ('\n' * 1000000) | indent('x' * 1000000) }}",
    "json indent": "{% set ns = namespace(x=[1]) %}{% for i in range(400) %}{% set ns.x = [ns.x] %}{% endfor %}"
    "{{ ([ns.x] * 4000) | tojson(indent=100000) }}",
    "output": "{% for a in range(99999) %}" + "x" * 100_000 + "{% endfor %}",
    "block": "{% set x %}{% for i in range(99999) %}{{ 'a' * 100000 }}{% endfor %}{% endset %}{{ x }}",
    "range": "{{ range(10000000000) | list }}",
}


@pytest.mark.parametrize("source", BOMBS.values(), ids=BOMBS.keys())
def test_bombs_end_in_time_and_memory_without_threads(source: str) -> None:
    template = ChatTemplate(source)
    threads = threading.active_count()
    tracemalloc.start()
    started = time.perf_counter()
    try:
        with pytest.raises(InvalidRequestError, match="the chat template failed"):
            template.render({"messages": MESSAGES})
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # Measuring memory slows the loops down; the deadline itself is two seconds.
    assert time.perf_counter() - started < 4
    assert peak < 300 * 2**20
    assert threading.active_count() == threads


def test_a_failed_rendering_leaves_no_trace_for_the_next() -> None:
    template = ChatTemplate("{% for a in range(n) %}{% for b in range(n) %}{% endfor %}{% endfor %}done")
    with pytest.raises(InvalidRequestError):
        template.render({"n": 99_999})
    assert template.render({"n": 2}) == "done"


def test_long_conversations_have_room() -> None:
    """Limits grow with what the caller sent: 400 messages of 10 kB, with a template whose work is quadratic."""
    messages = [{"role": "user", "content": "x" * 10_000}] * 400
    source = (
        "{% for m in messages %}{% if (messages | selectattr('role', 'equalto', 'user') | list | length) > 0 %}"
        "{{ '<' + m.role + '>' ~ m.content | trim }}{% endif %}{% endfor %}{{ messages | tojson | length }}"
    )
    started = time.perf_counter()
    text = ChatTemplate(source).render({"messages": messages})
    assert text.endswith(str(len(json.dumps(messages))))
    assert time.perf_counter() - started < 2


def test_templates_render_in_several_threads_at_once() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}")
    found: dict[int, str] = {}

    def run(number: int) -> None:
        for _ in range(50):
            found[number] = template.render({"messages": [{"content": str(number)}] * 3})

    threads = [threading.Thread(target=run, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: str(number) * 3 for number in range(8)}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", False),
        ("{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}", True),
        ("{% for m in messages %}{% for part in m['content'] %}{{ part }}{% endfor %}{% endfor %}", True),
        ("{% set c = messages[0].content %}{% for part in c %}{{ part.text }}{% endfor %}", True),
        (
            "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
            "{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}{% endfor %}",
            False,
        ),
    ],
)
def test_the_expected_form_of_content_is_recognized(source: str, expected: bool) -> None:
    assert ChatTemplate(source).is_structured is expected
