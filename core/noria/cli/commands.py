"""All commands, one a module. Only this package prints, and only here errors become exit codes."""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections.abc import Sequence

import noria
from noria.api.errors import NoriaError
from noria.cli import bench, compare, devices, logits, ops, plan, run, synth
from noria.cli.arguments import CommandParser, Parser, file_path
from noria.cli.arms import join_arms
from noria.cli.output import print_error

COMMANDS = {
    module.__name__.rpartition(".")[2]: module for module in (run, bench, compare, logits, plan, devices, ops, synth)
}

DESCRIPTION = """\
Run mixture-of-experts GGUF models that do not fit in VRAM: experts stay in RAM and stream to the GPU while it computes.

First steps:
  noria run -p "In the beginning" -cmoe     text from the built-in demo model, its experts streamed
  noria devices                             what this machine can run on
  noria plan -m model.gguf                  what a model would need, before loading it
  noria run -m model.gguf -p "Hello"        your own model
"""


def make_parser() -> Parser:
    """The whole command line, as the docs and tests see it."""
    parser = Parser(prog="noria", description=DESCRIPTION)
    parser.add_argument("--version", action="version", version=f"noria {noria.__version__}")
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND", parser_class=CommandParser)
    for name, module in COMMANDS.items():
        command = commands.add_parser(name, help=module.HELP, description=module.DESCRIPTION)
        module.add_arguments(command)
        general = command.add_argument_group("general")
        general.add_argument(
            "--plugins", type=file_path, metavar="FILE", help="plugins.toml to use instead of the one found"
        )
        general.add_argument("-v", "--verbose", action="store_true", help="log what happens; show tracebacks")
        command.set_defaults(main=module.main)
    return parser


def execute(argv: Sequence[str]) -> int:
    """Run a command line; returns the exit code.

    Raises:
        SystemExit: the command line is wrong, or asked for help.
    """
    _open_missing_streams()
    parser = make_parser()
    args = parser.parse_args(join_arms(argv))
    if args.command is None:
        parser.error(f"no command was given; there are {', '.join(COMMANDS)}")
    level = logging.INFO if args.verbose else logging.WARNING
    logging.basicConfig(level=level, format="%(levelname)s: %(message)s", stream=sys.stderr)
    try:
        code: int = args.main(args)
        sys.stdout.flush()
        return code
    except NoriaError as error:
        if args.verbose:
            traceback.print_exc()
        print_error(str(error))
        return error.exit_code
    except BrokenPipeError:  # the reader of our output has gone: nothing is left to say
        _drop_stdout()
        return 141
    except OSError as error:
        if error.errno is None or error.filename is not None:  # not of a standard stream
            raise
        _drop_stdout()
        print_error(f"cannot write the output: {error.strerror}.")
        return 1


def _open_missing_streams() -> None:
    """Stand in for standard streams that the caller has closed; in this order each gets its number back."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115


def _drop_stdout() -> None:
    """Let go of what could not be written, or Python would try again at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
