"""Rows of measurements, printed as they come in: Markdown, CSV, JSON or JSON lines."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

FORMS = ("md", "csv", "json", "jsonl")


@dataclass(frozen=True, slots=True)
class Column:
    """One column of the Markdown form: how a row's record is shown in it."""

    title: str
    text: Callable[[Mapping[str, Any]], str]
    width: int = 0
    left: bool = False

    def cell(self, text: str, width: int) -> str:
        return text.ljust(width) if self.left else text.rjust(width)


class RowPrinter:
    """Prints records to stdout. A context manager: `json` is a list that must be closed, even an empty one.

    Args:
        form: one of `FORMS`.
        columns: of the Markdown form.
    """

    def __init__(self, form: str, columns: list[Column]) -> None:
        self.form, self.columns = form, columns
        self._widths: list[int] = []
        self._n_rows = 0

    def __call__(self, record: Mapping[str, Any]) -> None:
        match self.form:
            case "md":
                self._markdown(record)
            case "csv":
                flat = flatten(record)
                writer = csv.DictWriter(sys.stdout, list(flat), lineterminator="\n")
                if not self._n_rows:
                    writer.writeheader()
                writer.writerow(flat)
            case "json":
                print(",\n" if self._n_rows else "[\n", json.dumps(record, indent=2), sep="", end="")
            case _:
                print(json.dumps(record))
        sys.stdout.flush()
        self._n_rows += 1

    def _markdown(self, record: Mapping[str, Any]) -> None:
        texts = [column.text(record) for column in self.columns]
        if not self._n_rows:
            self._widths = [
                max(column.width, len(column.title), len(text))
                for column, text in zip(self.columns, texts, strict=True)
            ]
            self._line([column.title for column in self.columns])
            rules = [
                "-" * width if column.left else "-" * (width - 1) + ":"
                for column, width in zip(self.columns, self._widths, strict=True)
            ]
            self._line(rules)
        self._line(texts)

    def _line(self, texts: list[str]) -> None:
        cells = [
            column.cell(text, width) for column, text, width in zip(self.columns, texts, self._widths, strict=True)
        ]
        print(f"| {' | '.join(cells)} |")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.form == "json":
            print("\n]" if self._n_rows else "[]")


def flatten(record: Mapping[str, Any]) -> dict[str, Any]:
    """The single values of a record and of the records in it; no lists, and nothing that is keyed by layer."""
    flat: dict[str, Any] = {}
    for key, value in record.items():
        if key == "counters":
            flat |= flatten(value)
        elif not isinstance(value, Mapping | list):
            flat[key] = value
    return flat
