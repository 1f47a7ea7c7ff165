"""The entry point of `noria`. It imports nothing before `main` runs, so that an interrupt is answered from then on."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit code."""
    try:
        from noria.cli.commands import execute

        return execute(sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
