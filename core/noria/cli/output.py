"""What commands print: errors and figures to stderr, results to stdout, tables as Markdown or JSON."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from tabulate import tabulate
from tqdm import tqdm

ERROR = "noria: error: "


def print_error(text: str) -> None:
    print(f"{ERROR}{sentence(text)}", file=sys.stderr)


def sentence(text: str) -> str:
    """With a full stop, unless it ends with a mark of its own."""
    return f"{text}." if text[-1:].isalnum() or text[-1:] in ("'", ")") else text


def plural(n: int, noun: str) -> str:
    """`1 layer`, `2 layers`."""
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def print_note(text: str) -> None:
    """Something the user should know that is not the result."""
    print(f"noria: {text}", file=sys.stderr)


def add_format_argument(parser: argparse.ArgumentParser, forms: Sequence[str] = ("md", "json")) -> None:
    parser.add_argument(
        "-o",
        "--output",
        choices=forms,
        default=forms[0],
        metavar="FORMAT",
        help=f"{', '.join(forms)} (default: {forms[0]})",
    )


def print_table(rows: Sequence[Mapping[str, str]], right: Sequence[str] = ()) -> None:
    """Rows with the same keys as a GitHub table, the columns in `right` right-aligned."""
    if rows:
        align = ["right" if key in right else "left" for key in rows[0]]
        cells = [list(row.values()) for row in rows]
        print(tabulate(cells, list(rows[0]), tablefmt="github", colalign=align, disable_numparse=True))


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2))


def size_text(nbytes: int) -> str:
    """Bytes in the largest binary unit of which there is at least one."""
    amount, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if amount < 1024:
            break
        amount, unit = amount / 1024, larger
    return f"{nbytes} B" if unit == "B" else f"{amount:.2f} {unit}"


class ProgressBar:
    """A bar on stderr for each thing that takes a while; nothing where stderr is no terminal."""

    def __init__(self) -> None:
        self._bar: tqdm[Any] | None = None
        self._what = ""

    def __call__(self, what: str, done: int, total: int, unit: str = "B") -> None:
        if what != self._what:
            self.close()
            self._what = what
            self._bar = tqdm(total=total, desc=what, unit=unit, unit_scale=total > 1000, leave=False, disable=None)
        if self._bar is not None:
            self._bar.update(done - self._bar.n)
            if done >= total:
                self.close()

    def of(self, what: str, unit: str = "tok") -> Callable[[int, int], None]:
        """For callbacks that know only (done, total)."""
        return lambda done, total: self(what, done, total, unit)

    def close(self) -> None:
        if self._bar is not None:
            with suppress(OSError):
                self._bar.close()
            self._bar, self._what = None, ""
