"""`noria`: one subcommand a file. Only this package prints, and only here errors become exit codes."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

import noria
from noria.api.errors import NoriaError
from noria.cli import bench, compare, devices, logits, ops, plan, run, synth
from noria.cli.arms import join_arms
from noria.cli.output import print_error

COMMANDS = (run, bench, compare, logits, plan, devices, ops, synth)

DESCRIPTION = """\
Run mixture-of-experts GGUF models that do not fit in VRAM: experts stay in RAM and stream to the GPU while it computes.

First steps:
  noria run -p "In the beginning" -cmoe     text from the built-in demo model, its experts streamed
  noria devices                             what this machine can run on
  noria plan -m model.gguf                  what a model would need, before loading it
  noria run -m model.gguf -p "Hello"        your own model
"""


class _Formatter(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34, width=110)


def make_parser() -> argparse.ArgumentParser:
    """The whole command line, as the docs and tests see it."""
    parser = argparse.ArgumentParser(
        prog="noria", description=DESCRIPTION, formatter_class=_Formatter, allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"noria {noria.__version__}")
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND", required=True)
    for module in COMMANDS:
        name = module.__name__.rpartition(".")[2]
        command = commands.add_parser(
            name, help=module.HELP, description=module.DESCRIPTION, formatter_class=_Formatter, allow_abbrev=False
        )
        module.add_arguments(command)
        general = command.add_argument_group("general")
        general.add_argument(
            "--plugins", type=Path, metavar="FILE", help="plugins.toml to use instead of the one found"
        )
        general.add_argument("-v", "--verbose", action="store_true", help="log what happens; show tracebacks")
        command.set_defaults(main=module.main)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the `noria` command; returns the exit code."""
    args = make_parser().parse_args(join_arms(sys.argv[1:] if argv is None else argv))
    level = logging.INFO if args.verbose else logging.WARNING
    logging.basicConfig(level=level, format="%(levelname)s: %(message)s", stream=sys.stderr)
    try:
        code = args.main(args)
        sys.stdout.flush()
        return int(code or 0)
    except NoriaError as error:
        if args.verbose:
            traceback.print_exc()
        print_error(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output has gone: nothing is left to say
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


if __name__ == "__main__":
    sys.exit(main())
