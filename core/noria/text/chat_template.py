"""Messages to the text a model was trained to see them as, by the Jinja template in its file.

Source: variables and helpers are those of `transformers` (utils/chat_template_utils.py), which templates are written
for; the metadata keys are those of ggml's docs/gguf.md.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from noria.api.errors import ChatTemplateError, ConfigError
from noria.text.tokenizer import Tokenizer

_WORKER = Path(__file__).with_name("template_worker.py")
_KEY = "tokenizer.chat_template"
_REASONING = ("reasoning_content", "thinking", "reasoning")


class ChatTemplate:
    """A template that renders messages.

    It runs in a process of its own with a limit on memory, time and size (see `template_worker`), which starts with the
    first `render` (a tenth of a second), serves all further ones (a millisecond each), from any thread, and ends with
    this object.

    Attributes:
        source: the Jinja text.
        name: what errors call it: the metadata key or the file it came from.
        bos_token: the text of the BOS token, which many templates write themselves.
        eos_token: the text of the EOS token.
    """

    def __init__(
        self,
        source: str,
        bos_token: str = "",
        eos_token: str = "",
        name: str = "chat template",
        *,
        time_limit_s: float = 2.0,
        max_chars: int = 16 << 20,
    ) -> None:
        """Nothing runs yet: a wrong template is reported by the first `render`.

        Args:
            source: the Jinja text.
            bos_token: the text of the BOS token, or "".
            eos_token: the text of the EOS token, or "".
            name: what errors call the template.
            time_limit_s: seconds of processor time one `render` may take; nearly all take milliseconds.
            max_chars: characters one `render` may give.
        """
        self.source, self.name = source, name
        self.bos_token, self.eos_token = bos_token, eos_token
        self._limits = {"time_limit_s": time_limit_s, "max_chars": max_chars}
        self._worker = _Worker()

    @classmethod
    def from_metadata(
        cls, metadata: Mapping[str, Any], tokenizer: Tokenizer, name: str | None = None, *, tools: bool = False
    ) -> ChatTemplate:
        """The template of a GGUF file. A file may hold several: `default`, and others by name.

        Args:
            metadata: the file's key-value pairs.
            tokenizer: knows the texts of BOS and EOS.
            name: which one; None chooses.
            tools: whether tools will be given: then `tool_use` is chosen if there is one.

        Raises:
            ChatTemplateError: the file has no template, or none of this name.
        """
        keys = {key.removeprefix(f"{_KEY}."): key for key in metadata if key.startswith(f"{_KEY}.")}
        if _KEY in metadata:
            keys["default"] = _KEY
        if name is None:
            name = "tool_use" if tools and "tool_use" in keys else "default"
        if name not in keys:
            have = f"it has: {', '.join(sorted(keys))}" if keys else "it has none"
            raise ChatTemplateError(_KEY, None, f"this model has no chat template '{name}'; {have}")
        source = metadata[keys[name]]
        if not isinstance(source, str):
            raise ChatTemplateError(keys[name], None, f"is not a text but {source!r:.40}")
        bos, eos = ("" if id is None else tokenizer.token_text(id) for id in (tokenizer.bos_id, tokenizer.eos_id))
        return cls(source, bos, eos, keys[name])

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The text of a conversation.

        Args:
            messages: each with `role` and `content`, perhaps `tool_calls` (`arguments` best as an object: not every
                template takes JSON text), `tool_call_id`, `reasoning_content`; values of None count as absent. All
                keys reach the template.
            add_generation_prompt: end with the header of the assistant's turn, for the model to go on from.
            tools: what the model may call, as JSON schemas (`{"type": "function", "function": {...}}`).
            variables: further ones this template knows (`enable_thinking=False`).

        Raises:
            ChatTemplateError: the template is wrong, refuses the messages or passes a limit.
            ConfigError: messages, tools or variables are not JSON.
        """
        known = {
            "messages": [_prepare(message) for message in messages],
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            "bos_token": self.bos_token,
            "eos_token": self.eos_token,
        }
        try:
            request = json.dumps({"source": self.source, "variables": known | variables, **self._limits})
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(f"messages, tools and template variables must be JSON: {error}.") from None
        try:
            answer = self._worker.ask(request)
        except _Died as death:
            what = f"it takes more than {self._limits['time_limit_s']:g} s" if death.by_time else "it broke the process"
            raise ChatTemplateError(self.name, None, what) from None
        if "error" in answer:
            raise ChatTemplateError(self.name, answer["line"], answer["error"])
        return str(answer["text"])


def _prepare(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message without its empty values, and with its reasoning under the names that templates read."""
    given = {key: value for key, value in message.items() if value is not None}
    reasoning = next((given[key] for key in _REASONING if key in given), None)
    return given if reasoning is None else {"thinking": reasoning} | given | {"reasoning_content": reasoning}


class _Died(Exception):
    """The process ended without an answer."""

    def __init__(self, returncode: int) -> None:
        self.by_time = returncode == -signal.SIGXCPU
        super().__init__(returncode)


class _Worker:
    """The process that runs a template, started when it is first needed and again after it had to be ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def ask(self, request: str) -> dict[str, Any]:
        """Send one line, get one.

        Raises:
            _Died: it had to be ended.
        """
        with self._lock:
            process = self._start()
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                process.stdin.write(request + "\n")
                process.stdin.flush()
                line = process.stdout.readline()
            except BrokenPipeError:
                line = ""
            except BaseException:  # Ctrl-C: the answer will come, but nobody waits for it any more
                _stop(process)
                raise
            if not line.endswith("\n"):
                returncode = process.wait()
                _stop(process)
                raise _Died(returncode)
            answer: dict[str, Any] = json.loads(line)
            return answer

    def _start(self) -> subprocess.Popen[str]:
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(_WORKER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                encoding="utf-8",
                start_new_session=True,  # Ctrl-C in the terminal is not meant for it
            )
            weakref.finalize(self, _stop, self._process)
        return self._process


def _stop(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
