"""Writes cu/iq_tables.cuh: the grids, signs and levels of the IQ and MXFP4 types, from the `gguf` package's own tables.

To be run again when a type is added: `python -m noria_cuda.iq_tables`.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import quants

PATH = Path(__file__).parent / "cu" / "iq_tables.cuh"
_LINE = 118


def source() -> str:
    """The text of the header. Bytes lie in words, lowest first; levels are stored with 128 added to make bytes."""
    parts = ["// Written by noria_cuda.iq_tables from the tables of gguf-py (gguf/quants.py).\n#pragma once"]
    signs = np.frombuffer(quants.IQ2_XXS.ksigns, np.uint8)
    parts.append(_array("u8", "IQ_SIGNS", (f"0x{sign:02x}" for sign in signs)))
    kind: Any
    for kind in (quants.IQ2_XXS, quants.IQ2_XS, quants.IQ2_S):
        parts.append(_array("uint2", f"{kind.__name__}_GRID", (f"{{{a}, {b}}}" for a, b in _grid(kind))))
    for kind in (quants.IQ3_XXS, quants.IQ3_S):
        parts.append(_array("u32", f"{kind.__name__}_GRID", (a for (a,) in _grid(kind))))
    for name, kind in (("IQ4", quants.IQ4_NL), ("MXFP4", quants.MXFP4)):
        levels = (np.array(kind.kvalues) + 128).astype(np.uint8)
        parts.append(f"#define {name}_LEVELS_PLUS_128 {{{', '.join(_words(levels))}}}")
    return "\n\n".join(parts) + "\n"


def _grid(kind: Any) -> Iterable[list[str]]:
    """Each entry of a grid as words of four bytes."""
    kind.init_grid()
    return (_words(entry.astype(np.uint8)) for entry in kind.grid.reshape(kind.grid_shape))


def _words(data: npt.NDArray[np.uint8]) -> list[str]:
    return [f"0x{word:08x}u" for word in data.view("<u4")]


def _array(type: str, name: str, entries: Iterable[str]) -> str:
    entries = list(entries)
    lines = [""]
    for entry in entries:
        if len(lines[-1]) + len(entry) + 6 > _LINE:
            lines.append("")
        lines[-1] += f"{' ' if lines[-1] else ''}{entry},"
    body = "\n".join(f"    {line}" for line in lines)
    return f"static __device__ const {type} {name}[{len(entries)}] = {{\n{body}\n}};"


if __name__ == "__main__":
    PATH.write_text(source(), encoding="utf-8")
