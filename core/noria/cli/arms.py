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
from noria.cli.engine import add_engine_arguments, add_model_argument, demo_model

NAMED = re.compile(r"\s*([^-:\s][^:]*?)\s*:(.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag as it was written; `text` is None where it takes no value."""

    name: str
    text: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One side of a comparison.

    Attributes:
        text: its own flags, as they were written.
        flags: those of all arms, then its own, which win.
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
        asked = [flag.name for flag in self.flags if flag.name.endswith("fallback")]
        strict = [] if asked[-1:] == ["--fallback"] else ["--no-fallback"]
        return strict + [word for flag in self.flags if flag.name not in asked for word in _words(flag, ",")]


def _words(flag: Flag, comma: str) -> list[str]:
    return [flag.name] if flag.text is None else [flag.name, flag.text.replace(",", comma)]


# --- reading ----------------------------------------------------------------------------------------------------------


def add_arm_arguments(parser: argparse.ArgumentParser) -> None:
    """Everything that can differ between arms; outside of --arm it counts for all of them."""
    n_before = len(parser._actions)  # argparse has no public way to the flags that a function has added
    add_model_argument(parser)
    parser.add_argument("--fallback", action="store_true", help="ops that a device lacks run on the reference, slowly")
    add_engine_arguments(parser)
    for action in parser._actions[n_before:]:
        _keep_text(action)


def _keep_text(action: argparse.Action) -> None:
    """Check a flag's value as ever, but keep how it was written."""
    name, choices = action.option_strings[0], action.choices
    convert = cast(Callable[[str], Any], action.type or str)
    action.default = None
    if action.nargs == 0:
        action.const = Flag(name)
        return

    def keep(text: str) -> Flag:
        if choices is not None and text not in choices:
            raise argparse.ArgumentTypeError(f"'{text}' is none of {', '.join(choices)}")
        if action.dest in ("backend", "prefetch") and "," in text:
            raise argparse.ArgumentTypeError(f"'{text}' is a list; give each of its values an arm of its own")
        if action.dest == "timeline":
            raise argparse.ArgumentTypeError("a timeline shows one run; write it with noria bench")
        convert(text)
        return Flag(name, text)

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


class _ArmParser(argparse.ArgumentParser):
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
    parser = _ArmParser(add_help=False, allow_abbrev=False)
    add_arm_arguments(parser)
    arms: list[Arm] = []
    for text in texts:
        match = NAMED.fullmatch(text)
        own = (match[2] if match else text).strip()
        name = match[1] if match else own or "defaults"
        try:
            flags = tuple(flags_of(parser.parse_args(shlex.split(own))))
        except ValueError as error:  # a ConfigError, too
            raise ConfigError(f"--arm '{text}': {error}; an arm is 'NAME: FLAGS' or 'FLAGS'.") from error
        if name in [arm.name for arm in arms]:
            raise ConfigError(f"two arms have the name '{name}'.")
        arms.append(Arm(name=name, text=own, flags=(*common, *flags)))
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
