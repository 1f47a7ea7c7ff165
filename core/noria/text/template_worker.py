"""The process in which chat templates run.

A template comes with a model from anywhere, and it is a program. Most ways of making it run forever or fill the memory
end inside of one C function (`10 ** 10 ** 9`, a doubled string, a list that holds itself ten times over), where Python
has no say any more. So it runs here, where the system itself holds the limits: memory by RLIMIT_AS, processor time by
a timer that raises between two steps of Python and, if a single step never ends, by RLIMIT_CPU, which ends the process.

A script of its own that imports nothing of noria, so that it starts in a tenth of a second. One JSON object a line
comes in (`source`, `variables`, `time_limit_s`, `max_chars`), one goes out: `text`, or `error` and `line`.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
import traceback
from collections.abc import Generator, Mapping
from datetime import datetime
from functools import cache
from math import ceil
from types import FrameType
from typing import Any, cast

from jinja2 import Environment, Template, TemplateSyntaxError, UndefinedError, nodes
from jinja2.exceptions import SecurityError, TemplateError, TemplateRuntimeError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MEMORY_LIMIT = 512 << 20
"""Bytes of address space, those of the interpreter included (about 30 MiB)."""


class _Refused(TemplateError):
    """The template called `raise_exception`."""


class _TooLong(TemplateError):
    """The text passed `max_chars`."""


class _TimeUp(BaseException):
    """The time is up. Not an Exception: filters that try one thing and then another must not catch it."""


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's, in which lists may grow and shrink: llama.cpp's template for Kimi K2 queues tool calls in one.

    What a template changes are its own lists and its copy of the messages, which end with it.
    """

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return (isinstance(obj, list) and attr in ("append", "pop")) or super().is_safe_attribute(obj, attr, value)


class _Generation(Extension):
    """`{% generation %}` marks what a trainer learns from; to us it is only a scope."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Namespace(Namespace):
    """Jinja's, without names that Python or Jinja would take for part of the object itself."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # `self` may be a name of the template's
        self, *others = args
        values = dict(*others, **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if str(name).startswith("_"):
        raise SecurityError(f"a namespace cannot hold the name {name!r}: it starts with an underscore")


def _raise_exception(message: str) -> None:
    raise _Refused(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own escapes `<`, `>`, `&` and `'` for HTML; models were trained on plain JSON."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def build_environment() -> Environment:
    """What templates find when they run: the same as in `transformers`, for which they are written."""
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = _tojson
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "namespace": _Namespace,
    }
    return environment


@cache
def _compile(source: str) -> Template:
    return build_environment().from_string(source)


def render(source: str, variables: Mapping[str, Any], max_chars: int) -> str:
    """The text of a template, as pieces come.

    Raises:
        TemplateError: the template is wrong, refused the messages or gives more than `max_chars` characters.
        Exception: whatever the template did.
    """
    template = _compile(source)
    running = cast(Generator[str], template.root_render_func(template.new_context(dict(variables))))
    pieces, n_chars = [], 0
    for piece in running:
        n_chars += len(piece)
        if n_chars > max_chars:  # raised inside of it, where the line is known
            running.throw(_TooLong(f"the text is longer than {max_chars} characters"))
        pieces.append(piece)
    return "".join(pieces)


def _explain(error: BaseException, time_limit_s: float) -> str:
    match error:
        case _TimeUp():
            return f"it takes more than {time_limit_s:g} s"
        case MemoryError():
            return f"it needs more than {MEMORY_LIMIT >> 20} MiB of memory"
        case RecursionError():
            return "it nests or calls itself too deeply"
        case _Refused():
            return f"it refuses these messages: {error}"
        case TemplateSyntaxError() | _TooLong():
            return str(error.message)
        case UndefinedError() | SecurityError() | TemplateRuntimeError():
            return str(error)
        case _:
            return f"{type(error).__name__}: {error}"


def _find_line(error: BaseException) -> int | None:
    if isinstance(error, TemplateSyntaxError):
        return error.lineno
    line = None
    for frame, lineno in traceback.walk_tb(error.__traceback__):
        template = frame.f_globals.get("__jinja_template__")
        if template is not None:  # the innermost one is where it happened
            line = template.get_corresponding_lineno(lineno)
    return line


def _limit(kind: int, amount: int) -> None:
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (amount if hard == resource.RLIM_INFINITY else min(amount, hard), hard))


def _on_time_up(signum: int, frame: FrameType | None) -> None:
    raise _TimeUp


def _answer(request: bytes) -> str:
    time_limit_s = 0.0
    try:
        asked = json.loads(request)
        time_limit_s = asked["time_limit_s"]
        used = resource.getrusage(resource.RUSAGE_SELF)
        _limit(resource.RLIMIT_CPU, ceil(used.ru_utime + used.ru_stime + time_limit_s + 1))
        # Again and again, because an exception inside of a destructor is lost.
        signal.setitimer(signal.ITIMER_PROF, time_limit_s, 0.1)
        return json.dumps({"text": render(asked["source"], asked["variables"], asked["max_chars"])})
    except (Exception, _TimeUp) as error:
        signal.setitimer(signal.ITIMER_PROF, 0)
        return json.dumps({"error": _explain(error, time_limit_s), "line": _find_line(error)})
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def main() -> None:
    """Answer requests until the other side closes its end."""
    signal.signal(signal.SIGPROF, _on_time_up)
    _limit(resource.RLIMIT_AS, MEMORY_LIMIT)
    _limit(resource.RLIMIT_CORE, 0)
    for request in sys.stdin.buffer:
        sys.stdout.write(_answer(request) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
