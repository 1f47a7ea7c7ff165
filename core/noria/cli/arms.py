"""The arms of a comparison: flags kept as they were written, and the command lines that are made of them."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, cast

from noria.api.errors import ConfigError
from noria.cli.arguments import CommandParser
from noria.cli.engine import demo_model
from noria.cli.flags import add_engine_arguments, add_model_argument

NAMED = re.compile(r"\s*([^-:\s][^:]*?)\s*:(.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag as it was written; `text` is None where it takes no value. It replaces earlier flags of its `kind`."""

    name: str
    text: str | None = None
    kind: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One side of a comparison.

    Attributes:
        text: its own flags, as they were written.
        flags: those of all arms, less those that its own replace, then its own.
    """

    name: str
    text: str
    flags: tuple[Flag, ...]

    @property
    def model(self) -> Path:
        texts = [flag.text for flag in self.flags if flag.name == "-m" and flag.text]
        return Path(texts[-1]) if texts else demo_model()

    def bench(self) -> list[str]:
        """Its flags for `noria bench`, where a comma separates configurations."""
        return [word for flag in self.flags for word in _words(flag, "/" if flag.name == "-dev" else ",")]

    def logits(self) -> list[str]:
        """Its flags for `noria logits`, where missing ops are an error only if we say so."""
        strict = [] if any(flag.name.endswith("fallback") for flag in self.flags) else ["--no-fallback"]
        return strict + [word for flag in self.flags for word in _words(flag, ",")]


def _words(flag: Flag, comma: str) -> list[str]:
    return [flag.name] if flag.text is None else [flag.name, flag.text.replace(",", comma)]


# --- reading ----------------------------------------------------------------------------------------------------------


def add_arm_arguments(parser: argparse.ArgumentParser) -> None:
    """Everything that can differ between arms; outside of --arm it counts for all of them."""
    n_before = len(parser._actions)  # argparse has no public way to the flags that a function has added
    add_model_argument(parser)
    add_engine_arguments(parser, fallback=False)
    rivals = {id(action): group for group in parser._mutually_exclusive_groups for action in group._group_actions}
    for action in parser._actions[n_before:]:
        first = rivals[id(action)]._group_actions[0] if id(action) in rivals else action
        repeats = isinstance(action, argparse._AppendAction)
        _keep_text(action, "" if repeats else first.option_strings[0])


def _keep_text(action: argparse.Action, kind: str) -> None:
    """Check a flag's value as ever, but keep how it was written."""
    name, choices = action.option_strings[0], action.choices
    convert = cast(Callable[[str], Any], action.type or str)
    action.default = None
    if action.nargs == 0:
        action.const = Flag(name, kind=kind)
        return

    def keep(text: str) -> Flag:
        if choices is not None and text not in choices:
            raise argparse.ArgumentTypeError(f"'{text}' is none of {', '.join(choices)}")
        if action.dest in ("backend", "prefetch") and "," in text:
            raise argparse.ArgumentTypeError(f"'{text}' is a list; give each of its values an arm of its own")
        if action.dest == "timeline":
            raise argparse.ArgumentTypeError("a timeline shows one run; write it with noria bench")
        convert(text)
        return Flag(name, text, kind)

    if choices is not None:
        action.metavar = "|".join(choices)
    if action.dest == "timeline":
        action.help = argparse.SUPPRESS
    action.type, action.choices = keep, None


def flags_of(args: argparse.Namespace) -> Iterator[Flag]:
    """The flags of `add_arm_arguments` that were given."""
    for value in vars(args).values():
        for flag in value if isinstance(value, list) else [value]:
            if isinstance(flag, Flag):
                yield flag


class _ArmParser(CommandParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def parse_arms(texts: list[str], common: tuple[Flag, ...]) -> list[Arm]:
    """Arms from `NAME: FLAGS` or `FLAGS`; without a name the flags are the name.

    Raises:
        ConfigError: there are fewer than two, two have one name, or a flag is wrong.
    """
    if len(texts) < 2:
        raise ConfigError(
            "a comparison needs two arms or more: --arm 'off: --prefetch off' --arm 'ring: --prefetch whole'."
        )
    parser = _ArmParser(add_help=False)
    add_arm_arguments(parser)
    arms: list[Arm] = []
    for text in texts:
        match = NAMED.fullmatch(text)
        own = (match[2] if match else text).strip()
        name = match[1] if match else own or "defaults"
        try:
            flags = tuple(flags_of(parser.parse_args(shlex.split(own))))
        except ValueError as error:  # a ConfigError, too
            why = str(error).rstrip(".")
            raise ConfigError(
                f"--arm '{text}': {why}. An arm is 'NAME: FLAGS' or 'FLAGS', with the flags that choose a model, a "
                "device and a plan; what to measure (-p, -n, -r) is given beside --arm, once for all arms."
            ) from error
        if name in [arm.name for arm in arms]:
            raise ConfigError(f"two arms have the name '{name}'.")
        kinds = {flag.kind for flag in flags} - {""}
        arms.append(Arm(name=name, text=own, flags=(*(flag for flag in common if flag.kind not in kinds), *flags)))
    return arms


def join_arms(argv: Sequence[str]) -> list[str]:
    """`--arm VALUE` as `--arm=VALUE`: argparse would take a value that begins with a flag for that flag."""
    joined: list[str] = []
    for word in argv:
        if joined and joined[-1] == "--arm":
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined
