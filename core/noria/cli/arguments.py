"""Parsers that answer a mistake in one line, and the values that flags take."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any, NoReturn

from noria.cli.output import ERROR, sentence
from noria.plugins.config import did_you_mean

LARGEST = 2**32 - 1  # of seeds; nothing else comes near
UNITS = {"": 2**20, "mib": 2**20, "gib": 2**30, "mb": 10**6, "gb": 10**9, "m": 2**20, "g": 2**30}


class _Formatter(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34, width=110)


class Parser(argparse.ArgumentParser):
    """A parser that takes no abbreviations and says where help is instead of printing it."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(formatter_class=_Formatter, allow_abbrev=False, **kwargs)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{ERROR}{sentence(message)} See `{self.prog} --help`.\n")


class CommandParser(Parser):
    """The parser of one command: a word that looks like a flag is one, or an error of this command."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        known, rest = super().parse_known_args(args, namespace)
        if rest:
            self.error(f"unrecognized arguments: {' '.join(rest)}")
        return known, rest

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        """Called for a word like a flag that is none, which argparse would take for `-f a` if it is `-fa`."""
        if not self._negative_number_matcher.match(option_string) and " " not in option_string:
            flag = option_string.partition("=")[0]
            hint = did_you_mean(flag, self._option_string_actions) if len(flag) > 2 else ""
            self.error(f"there is no flag {flag}. {hint}".strip())
        return []


# --- values -----------------------------------------------------------------------------------------------------------


def count(text: str) -> int:
    """A whole number."""
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number") from None
    if abs(number) > LARGEST:
        raise argparse.ArgumentTypeError(f"{text} is too large")
    return number


def count_or_auto(text: str) -> int | str:
    try:
        return text if text == "auto" else count(text)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"'{text}' is neither a whole number nor 'auto'") from None


def number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number") from None


def file_path(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("the name of the file is empty")
    return Path(text)


def size(text: str) -> int:
    """Bytes: a number of MiB, or with a unit (`12GiB`, `8000MB`)."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)", text.strip())
    nbytes = int(float(match[1]) * UNITS.get(match[2].lower(), 0)) if match else 0
    if not nbytes:
        raise argparse.ArgumentTypeError(f"'{text}' is no size; write for example 8192 (MiB) or 12GiB")
    return nbytes
