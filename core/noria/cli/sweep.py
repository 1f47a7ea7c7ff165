"""Comma lists of engine flags: every combination of their values is one configuration."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, cast

from noria.cli.flags import add_engine_arguments

WHOLE = ("override_tensor", "timeline")  # flags whose values may have commas of their own


@dataclass(frozen=True, slots=True)
class Sweep:
    """The values of one flag, each with its text; the default, unless they were `given`."""

    flag: str
    values: tuple[tuple[str, Any], ...]
    given: bool = True


@dataclass(frozen=True, slots=True)
class Configuration:
    """One value for each flag; `label` are those that were given, as one would write them."""

    args: argparse.Namespace
    label: str


def add_sweep_arguments(parser: argparse.ArgumentParser) -> None:
    """The engine flags, each of which takes a comma list here; the devices of one configuration are joined by `/`."""
    n_before = len(parser._actions)  # argparse has no public way to the flags that a function has added
    add_engine_arguments(parser, fallback=False)
    for action in parser._actions[n_before:]:
        if action.dest == "device":
            action.metavar = "ID[/ID]"
            action.help = "devices by id, several of one configuration joined by /, e.g. cuda0 or cuda0/vulkan0"
            action.type = _device_list
        if action.nargs is None and action.dest not in WHOLE:
            _take_list(action)


def _device_list(text: str) -> str:
    return text.replace("/", ",")


def _take_list(action: argparse.Action) -> None:
    flag, choices = action.option_strings[0], action.choices
    convert = cast(Callable[[str], Any], action.type or str)

    def parse(text: str) -> Sweep:
        values = tuple((part, convert(part)) for part in text.split(","))
        for part, value in values:
            if choices is not None and value not in choices:
                raise argparse.ArgumentTypeError(f"'{part}' is none of {', '.join(choices)}")
        return Sweep(flag, values)

    action.type, action.choices = parse, None
    action.default = Sweep(flag, ((str(action.default), action.default),), given=False)
    if choices is not None:
        action.metavar = "|".join(choices)


def configurations(args: argparse.Namespace) -> Iterator[Configuration]:
    """Every combination; values of the flag that was defined last change fastest."""
    sweeps = {dest: value for dest, value in vars(args).items() if isinstance(value, Sweep)}
    for combination in product(*(sweep.values for sweep in sweeps.values())):
        chosen = {dest: value for dest, (_, value) in zip(sweeps, combination, strict=True)}
        texts = zip(sweeps.values(), (text for text, _ in combination), strict=True)
        label = " ".join(f"{sweep.flag} {text}" for sweep, text in texts if sweep.given)
        yield Configuration(argparse.Namespace(**vars(args) | chosen), label)
