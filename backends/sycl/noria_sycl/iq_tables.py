"""Writes cl/iq_tables.h: the grids, signs and levels of the IQ and MXFP4 types, from the `gguf` package's own tables.

To be run again when a type is added: `python -m noria_sycl.iq_tables`.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import quants

PATH = Path(__file__).parent / "cl" / "iq_tables.h"
_LINE = 118


def source() -> str:
    """The text of the header. Bytes lie in words, lowest first."""
    parts = ["// Written by noria_sycl.iq_tables from the tables of gguf-py (gguf/quants.py)."]
    signs = np.frombuffer(quants.IQ2_XXS.ksigns, np.uint8)
    parts.append(_array("u8", "IQ_SIGNS", (f"0x{sign:02x}" for sign in signs)))
    kind: Any
    for kind in (quants.IQ2_XXS, quants.IQ2_XS, quants.IQ2_S):
        words = (f"0x{word:016x}ul" for word in _grid(kind).view("<u8").reshape(-1))
        parts.append(_array("u64", f"{kind.__name__}_GRID", words))
    for kind in (quants.IQ3_XXS, quants.IQ3_S):
        words = (f"0x{word:08x}u" for word in _grid(kind).view("<u4").reshape(-1))
        parts.append(_array("u32", f"{kind.__name__}_GRID", words))
    for name, kind in (("IQ4", quants.IQ4_NL), ("MXFP4", quants.MXFP4)):
        levels = np.array(kind.kvalues, np.int8)
        parts.append(_array("char", f"{name}_LEVELS", (str(level) for level in levels)))
    return "\n\n".join(parts) + "\n"


def _grid(kind: Any) -> npt.NDArray[np.uint8]:
    """The numbers of each entry of a grid, one entry a row."""
    kind.init_grid()
    return np.ascontiguousarray(kind.grid.reshape(kind.grid_shape).astype(np.uint8))


def _array(type: str, name: str, entries: Iterable[str]) -> str:
    entries = list(entries)
    lines = [""]
    for entry in entries:
        if len(lines[-1]) + len(entry) + 6 > _LINE:
            lines.append("")
        lines[-1] += f"{' ' if lines[-1] else ''}{entry},"
    body = "\n".join(f"    {line}" for line in lines)
    return f"__constant {type} {name}[{len(entries)}] = {{\n{body}\n}};"


if __name__ == "__main__":
    PATH.write_text(source(), encoding="utf-8")
