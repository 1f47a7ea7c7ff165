"""Every real template gives the text that `transformers` gives, for every kind of turn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedEnvironment

from noria.api.errors import ChatTemplateError
from noria.text import ChatTemplate

DATA = Path(__file__).parents[1] / "data" / "chat_templates"
TEMPLATES = sorted((Path(__file__).parents[3] / "shared" / "templates").glob("*.jinja"))
TOKENS = {"bos_token": "<bos>", "eos_token": "<eos>"}

SYSTEM = {"role": "system", "content": "You are terse. <b>\"Quote\" & 'é', 日本</b>"}
HELLO = {"role": "user", "content": "Hello, who are you?\n"}
ANSWER = {"role": "assistant", "content": "I am a wheel of buckets.\n\nAsk."}
AGAIN = {"role": "user", "content": "  And what is 2 + 2 in 東京? 🦙 <|im_end|> "}
THOUGHT = {"role": "assistant", "reasoning_content": "Two and two.\nFour.", "content": "4"}
ASK_WEATHER = {"role": "user", "content": "Weather in Paris and Oslo?"}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Current weather <in> a city's & region's centre, é.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "The city"},
                    "unit": {"type": "string", "enum": ["celsius", "fahrenheit"], "default": "celsius"},
                    "days": {"type": "array", "items": {"type": "integer"}},
                    "options": {"type": "object", "properties": {"wind": {"type": "boolean"}}, "required": ["wind"]},
                },
                "required": ["city"],
            },
        },
    },
    {"type": "function", "function": {"name": "now", "description": "The time", "parameters": {"type": "object"}}},
]


def call(id: str, name: str, **arguments: Any) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


ONE_CALL = {"role": "assistant", "content": "", "tool_calls": [call("abcdefgh1", "get_weather", city="Paris é <x>")]}
TWO_CALLS = {
    "role": "assistant",
    "reasoning_content": "I need both.",
    "content": "Let me look.",
    "tool_calls": [
        call("abcdefgh1", "get_weather", city="Paris", days=[1, 2], options={"wind": True}),
        call("abcdefgh2", "get_weather", city="Oslo", unit="celsius"),
    ],
}
NO_CONTENT = {"role": "assistant", "content": None, "tool_calls": [call("abcdefgh1", "now")]}
RESULT_1 = {"role": "tool", "tool_call_id": "abcdefgh1", "name": "get_weather", "content": '{"sky": "clear <é>"}'}
RESULT_2 = {"role": "tool", "tool_call_id": "abcdefgh2", "name": "get_weather", "content": "snow"}

CONVERSATIONS: dict[str, dict[str, Any]] = {
    "a question": {"messages": [HELLO]},
    "a system prompt": {"messages": [SYSTEM, HELLO]},
    "two turns": {"messages": [SYSTEM, HELLO, ANSWER, AGAIN]},
    "an answer at the end": {"messages": [HELLO, ANSWER], "add_generation_prompt": False},
    "reasoning": {"messages": [HELLO, THOUGHT, AGAIN]},
    "reasoning at the end": {"messages": [SYSTEM, HELLO, THOUGHT], "add_generation_prompt": False},
    "no thinking": {"messages": [HELLO], "enable_thinking": False, "thinking": False, "reasoning_effort": "low"},
    "thinking": {"messages": [HELLO], "enable_thinking": True, "thinking": True, "reasoning_effort": "high"},
    "tools offered": {"messages": [SYSTEM, ASK_WEATHER], "tools": TOOLS},
    "tools offered, no system prompt": {"messages": [ASK_WEATHER], "tools": TOOLS},
    "a call": {"messages": [ASK_WEATHER, ONE_CALL], "tools": TOOLS, "add_generation_prompt": False},
    "a call answered": {"messages": [SYSTEM, ASK_WEATHER, ONE_CALL, RESULT_1], "tools": TOOLS},
    "a call without content": {"messages": [ASK_WEATHER, NO_CONTENT, RESULT_1], "tools": TOOLS},
    "two calls": {"messages": [SYSTEM, ASK_WEATHER, TWO_CALLS, RESULT_1, RESULT_2], "tools": TOOLS},
    "all of it": {
        "messages": [SYSTEM, ASK_WEATHER, TWO_CALLS, RESULT_1, RESULT_2, ANSWER, AGAIN, THOUGHT, HELLO],
        "tools": TOOLS,
    },
    "no tools in the list": {"messages": [HELLO], "tools": []},
    "parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]},
    "nothing": {"messages": []},
    "an unknown role": {"messages": [{"role": "narrator", "content": "Night fell."}, HELLO]},
}


# transformers refuses `append` and `pop` on lists, which this template of llama.cpp's needs to number its tool calls.
# Here they work (nothing of the caller's can change), and so the comparison is with a sandbox that allows them too.
CHANGES_LISTS = {"Kimi-K2-Instruct"}


def render_as_transformers(source: str, messages: list[dict[str, Any]], **others: Any) -> str | Exception:
    """The text, or why there is none."""
    hf = pytest.importorskip("transformers.utils.chat_template_utils")
    # apply_chat_template, which needs a tokenizer, does these two steps.
    messages = hf._normalize_chat_messages(messages)
    try:
        (text,), _ = hf.render_jinja_template([messages], chat_template=source, **others, **TOKENS)
    except Exception as refusal:
        return refusal
    return str(text)


@pytest.mark.skipif(not TEMPLATES, reason="needs the real templates of ../shared/templates")
@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_every_turn_equals_transformers(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = path.read_text()
    template = ChatTemplate(source, **TOKENS, name=path.name)
    if path.stem in CHANGES_LISTS:
        assert "attribute 'append' of 'list' object is unsafe" in str(
            render_as_transformers(source, **CONVERSATIONS["a call"])
        )
        allowed = SandboxedEnvironment.is_safe_attribute
        monkeypatch.setattr(ImmutableSandboxedEnvironment, "is_safe_attribute", allowed)
    n_equal = 0
    for name, conversation in CONVERSATIONS.items():
        arguments = {"add_generation_prompt": True} | conversation
        expected = render_as_transformers(source, **arguments)
        if isinstance(expected, str):
            assert template.render(**arguments) == expected, name
            n_equal += 1
        else:  # Mistral wants turns to alternate, Llama one call at a time, ...
            with pytest.raises(ChatTemplateError, match=r"\.jinja, line \d+: ") as error:
                template.render(**arguments)
            assert str(expected).rstrip(".") in str(error.value), name
    assert n_equal >= 15


@pytest.mark.parametrize("path", sorted(DATA.glob("*.jinja")), ids=lambda path: path.stem)
def test_every_turn_equals_what_transformers_gave(path: Path) -> None:
    template = ChatTemplate(path.read_text(), **TOKENS, name=path.name)
    texts = json.loads(path.with_suffix(".json").read_text())
    assert len(texts) >= 16
    for name, text in texts.items():
        assert template.render(**CONVERSATIONS[name]) == text, name
