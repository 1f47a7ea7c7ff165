"""What templates find, what stops them, and what their authors and users read when they fail."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from datetime import datetime
from typing import Any

import pytest

from noria.api.errors import ChatTemplateError, ConfigError
from noria.text import ChatTemplate, Tokenizer

HI = [{"role": "user", "content": "Hi"}]


def render(source: str, messages: list[dict[str, Any]] = HI, **variables: Any) -> str:
    return ChatTemplate(source, "<s>", "</s>").render(messages, **variables)


def failure(source: str, messages: list[dict[str, Any]] = HI, **limits: Any) -> str:
    with pytest.raises(ChatTemplateError) as error:
        ChatTemplate(source, name="a.jinja", **limits).render(messages)
    return str(error.value)


# --- what a template finds -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}", "<s>Hi</s>"),
        ("{{ add_generation_prompt }} {{ tools }} {{ documents }}", "True None None"),
        ("{{ enable_thinking is defined }} {{ effort }}", "False low"),
        ("  {% if true %}\n a\n  {% endif %}\nb", " a\nb"),  # lines that hold only a block leave nothing behind
        ("{{ {'a': '<é> & \\'', 'b': [1, none]} | tojson }}", '{"a": "<é> & \'", "b": [1, null]}'),
        ("{{ {'a': 1} | tojson(indent=2) }}", '{\n  "a": 1\n}'),
        ("{{ {'b': 'é', 'a': 1} | tojson(true, separators=(',', ':'), sort_keys=true) }}", '{"a":1,"b":"\\u00e9"}'),
        ("{% for k, v in {'a': 1}.items() %}{{ k }}={{ v }}{% endfor %} {{ {'x': 1}.keys() | list }}", "a=1 ['x']"),
        ("{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}{% if i == 4 %}{% break %}{% endif %}{{ i }}"
         "{% endfor %}", "023"),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "1"),
        ("{% generation %}{% set x = 1 %}{{ x }}{% endgeneration %}{{ x is defined }}", "1False"),
        ("{% set x = [] %}{% set _ = x.append(1) %}{{ x }}{{ x.pop() }}{{ x }}", "[1]1[]"),
        ("{{ strftime_now('%Y') }}", f"{datetime.now():%Y}"),
        ("{{ '\\ud800' }}", "\ud800"),
    ],
)  # fmt: skip
def test_helpers(source: str, text: str) -> None:
    assert render(source, effort="low") == text


def test_empty_values_of_a_message_are_absent() -> None:
    assert render("{{ messages[0] }}", [{"role": "assistant", "content": None}]) == "{'role': 'assistant'}"


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_is_found_by_each_of_its_names(name: str) -> None:
    message = {"role": "assistant", "content": "4", name: "2 + 2"}
    assert render("{{ messages[0].reasoning_content }}, {{ messages[0].thinking }}", [message]) == "2 + 2, 2 + 2"


def test_messages_of_the_caller_stay_as_they_are() -> None:
    messages = [{"role": "user", "content": None, "parts": [1]}]
    assert render("{% set _ = messages[0].parts.append(2) %}{{ messages[0].parts }}", messages) == "[1, 2]"
    assert messages == [{"role": "user", "content": None, "parts": [1]}]


def test_what_is_not_json_is_refused() -> None:
    with pytest.raises(ConfigError, match="must be JSON: Object of type set"):
        render("", [{"role": "user", "content": {1}}])


# --- what goes wrong is named, with its line -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{% if x %}\n\n{% endfor %}", "a.jinja, line 3: Encountered unknown tag 'endfor'. "),
        ("\n{{ x | shout }}", "a.jinja, line 2: No filter named 'shout'."),
        ("\n{{ x.y.z }}", "a.jinja, line 2: 'x' is undefined."),
        ("\n{{ messages[0].tool.name }}", "a.jinja, line 2: 'dict object' has no attribute 'tool'."),
        ("{% macro f() %}\n{{ 1 + '' }}{% endmacro %}\n\n{{ f() }}", "a.jinja, line 2: TypeError: unsupported operand"),
        ("\n\n{{ raise_exception('No system.') }}", "a.jinja, line 3: it refuses these messages: No system."),
        ("{{ raise_exception(1) }}", "a.jinja, line 1: it refuses these messages: 1."),
        ("{{ messages.__class__.__mro__ }}", "a.jinja, line 1: access to attribute '__class__' of 'list' object is un"),
        ("{{ messages.clear() }}", "a.jinja, line 1: access to attribute 'clear' of 'list' object is unsafe."),
        ("{{ messages[0].update(a=1) }}", "a.jinja, line 1: access to attribute 'update' of 'dict' object is unsafe."),
        ("{{ namespace(__class__=1) }}", "a.jinja, line 1: a namespace cannot hold the name '__class__': it starts"),
        ("{% set n = namespace() %}\n{% set n._x = 1 %}", "a.jinja, line 2: a namespace cannot hold the name '_x'"),
        ("{% include 'passwd' %}", "a.jinja, line 1: TypeError: no loader"),
    ],
)
def test_errors_name_template_and_line(source: str, text: str) -> None:
    assert failure(source).startswith(text)


# --- nothing runs for ever or fills the memory -----------------------------------------------------------------------

DOUBLE = "{% set n = namespace(x='0123456789') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}"
NEST = "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}"
TIME, MEMORY, TOO_DEEP = "it takes more than 0.2 s", "it needs more than 512 MiB of memory", "too deeply"


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{% for i in range(10 ** 9) %}{% endfor %}", "line 1: OverflowError: Range too big"),
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", f"line 1: {TIME}"),
        ("\n{{ range(99999) | map('string') | join | wordwrap(1) }}", f"line 2: {TIME}"),
        ("{{ 10 ** (10 ** 9) }}", TIME),
        (NEST + "\n{{ n.x | tojson }}", f"line 2: {TIME}"),
        (NEST + "\n{{ n.x | string | length }}", ""),  # too much of both
        ("{{ 'a' * 10 ** 9 }}", f"line 1: {MEMORY}"),
        ("{{ [0] * 10 ** 9 }}", f"line 1: {MEMORY}"),
        ("{{ 'a' | center(10 ** 9) }}", f"line 1: {MEMORY}"),
        ("{{ 'a' | indent(10 ** 9) }}", f"line 1: {MEMORY}"),
        ("{{ '%1000000000d' % 1 }}", f"line 1: {MEMORY}"),
        ("{{ '{:1000000000}'.format(1) }}", f"line 1: {MEMORY}"),
        (DOUBLE, "line 1: it "),
        ("\n{% for i in range(99999) %}{{ 'a' * 999 }}{% endfor %}", "line 2: the text is longer than 99999 char"),
        ("{% macro f() %}{{ f() }}{% endmacro %}\n{{ f() }}", f"line 1: it nests or calls itself {TOO_DEEP}"),
        ("{{ " + "(" * 9999 + ")" * 9999 + " }}", TOO_DEEP),
        ("{{ " + "-" * 9999 + "1 }}", TOO_DEEP),
        ("{% if 1 %}" * 999 + "{% endif %}" * 999, ""),
    ],
)
def test_hostile_templates_are_stopped(source: str, text: str) -> None:
    start = time.monotonic()
    assert text in failure(source, time_limit_s=0.2, max_chars=99999)
    assert time.monotonic() - start < 30


def test_one_step_that_never_ends_is_stopped_by_the_system() -> None:
    # Comparing these never comes back to where Python looks for signals.
    compare = f"{NEST}{{% set x = n.x %}}{NEST}{{{{ messages or n.x == x }}}}"
    template = ChatTemplate(compare, time_limit_s=0.2)
    with pytest.raises(ChatTemplateError, match=TIME):
        template.render([])
    assert "Hi" in template.render(HI)


def test_a_process_that_ended_is_replaced() -> None:
    template = ChatTemplate("{{ messages[0].content }}")
    assert template.render(HI) == "Hi"
    process = template._worker._process
    assert process is not None
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert template.render(HI) == "Hi"


def test_after_an_error_the_next_text_is_right() -> None:
    template = ChatTemplate("{{ 'a' * messages[0].n }}", max_chars=99, time_limit_s=0.2)
    for _ in range(2):
        for n, what in ((10**10, "memory"), (100, "longer than 99")):
            with pytest.raises(ChatTemplateError, match=what):
                template.render([{"n": n}])
        assert template.render([{"n": 3}]) == "aaa"


def test_threads_get_their_own_texts() -> None:
    template = ChatTemplate("{{ messages[0].content }}")
    texts: dict[int, list[str]] = {}

    def ask(n: int) -> None:
        texts[n] = [template.render([{"role": "user", "content": str(n)}]) for _ in range(20)]

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == {n: [str(n)] * 20 for n in range(4)}


def test_the_process_ends_with_the_template() -> None:
    template = ChatTemplate("")
    template.render(HI)
    process = template._worker._process
    assert process is not None
    assert process.poll() is None
    del template
    gc.collect()
    assert process.poll() is not None


# --- in a model file -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    tokens = ["<s>", "</s>", *(chr(code) for code in range(0x21, 0x7F))]
    keys = {"model": "gpt2", "pre": "gpt-2", "tokens": tokens, "merges": [], "bos_token_id": 0, "eos_token_id": 1}
    return Tokenizer.from_metadata({f"tokenizer.ggml.{key}": value for key, value in keys.items()})


def test_a_file_with_one_template(tokenizer: Tokenizer) -> None:
    metadata = {"tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"}
    template = ChatTemplate.from_metadata(metadata, tokenizer, tools=True)
    assert (template.name, template.render(HI)) == ("tokenizer.chat_template", "<s>Hi</s>")


def test_a_file_with_several_templates(tokenizer: Tokenizer) -> None:
    metadata = {"tokenizer.chat_template": "a", "tokenizer.chat_template.tool_use": "b"}
    metadata |= {"tokenizer.chat_template.rag": "c", "tokenizer.chat_templates": ["tool_use", "rag"]}
    sources = [
        ChatTemplate.from_metadata(metadata, tokenizer, name, tools=tools).source
        for name, tools in ((None, False), (None, True), ("default", True), ("rag", False))
    ]
    assert sources == ["a", "b", "a", "c"]
    with pytest.raises(ChatTemplateError, match=r"no chat template 'raag'; it has: default, rag, tool_use\.$"):
        ChatTemplate.from_metadata(metadata, tokenizer, "raag")


def test_a_file_without_a_template(tokenizer: Tokenizer) -> None:
    with pytest.raises(ChatTemplateError, match=r"this model has no chat template 'default'; it has none\.$"):
        ChatTemplate.from_metadata({}, tokenizer)
    with pytest.raises(ChatTemplateError, match=r"tokenizer\.chat_template: is not a text but 7\.$"):
        ChatTemplate.from_metadata({"tokenizer.chat_template": 7}, tokenizer)
