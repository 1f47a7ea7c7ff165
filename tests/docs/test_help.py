"""The help texts: there for every command and flag, and their examples are accepted."""

from __future__ import annotations

import argparse
import re
import shlex

import pytest

from noria.cli.commands import COMMANDS, DESCRIPTION, make_parser
from noria.cli.flags import add_engine_arguments
from noria.cli.main import main
from noria.runtime import EngineConfig

EXAMPLES = [
    line.strip()
    for text in (DESCRIPTION, *(module.DESCRIPTION for module in COMMANDS.values()))
    for line in text.splitlines()
    if line.startswith("  noria ")
]


def parser_of(name: str) -> argparse.ArgumentParser:
    (commands,) = (a for a in make_parser()._actions if isinstance(a, argparse._SubParsersAction))
    parser: argparse.ArgumentParser = commands.choices[name]
    return parser


def test_the_first_page_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    lines = capsys.readouterr().out.splitlines()
    for name, module in COMMANDS.items():
        assert module.HELP
        assert any(line.split() == [name, *module.HELP.split()] for line in lines), name


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main([name, "--help"])
    text = capsys.readouterr().out
    assert f"  noria {name} " in text, "it has no example"
    assert max(map(len, text.splitlines())) <= 120


@pytest.mark.parametrize("name", COMMANDS)
def test_every_argument_has_help(name: str) -> None:
    for action in parser_of(name)._actions:
        assert action.help, f"{name} {action.option_strings or action.dest}"


@pytest.mark.parametrize("example", EXAMPLES)
def test_examples_are_accepted(example: str) -> None:
    command = re.split(r"\s{2,}| > ", example)[0]
    make_parser().parse_args(shlex.split(command)[1:])


def test_engine_flags_are_those_of_the_configuration() -> None:
    """Every flag that `EngineConfig` names exists, and commands that compute have all of them."""
    named = set(re.findall(r"--?[a-z][a-z-]*", " ".join(re.findall(r"\[(-[^\]]+)\]", EngineConfig.__doc__ or ""))))
    assert len(named) > 10
    engine = argparse.ArgumentParser(add_help=False)
    add_engine_arguments(engine)
    flags = {flag for action in engine._actions for flag in action.option_strings}
    assert named <= flags
    for name in ("run", "logits", "bench", "plan"):
        assert flags <= set(parser_of(name)._option_string_actions), name
