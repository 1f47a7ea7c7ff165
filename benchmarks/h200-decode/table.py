"""Make the table of README.md from the raw files beside it; with the path of other raw files, print it instead."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import NO_DATA, Row, link_gbps, load, markdown, measured_on, tok_s, update, vram_gib

HEAD = ("test", "tok/s", "ms a token", "expert GB a token", "gather GB/s", "link GB/s", "moved as", "VRAM GiB")


def token_nbytes(row: Row) -> float:
    """Expert bytes in RAM that a token uses."""
    return float(row["cpu_moe_size"] * row["counters"]["expert_coverage_pct"] / 100)


def make_table(raw: Path) -> str:
    rows = load(raw)
    gather = rows.pop("gather", None)
    if not rows:
        return NO_DATA
    streamed, resident = rows.get("tg128"), rows.get("resident-tg128")
    rate = gather["gbps"] if gather else None
    lines = []
    for name, row in (("tg128", streamed), ("resident-tg128", resident)):
        if row is not None:
            ram = row is streamed
            lines.append(
                [
                    *(name, f"{tok_s(row):.1f}", f"{1e3 / tok_s(row):.2f}"),
                    f"{token_nbytes(row) / 1e9:.3f}" if ram else "",
                    f"{rate:.1f}" if ram and rate else "",
                    f"{link_gbps(row):.1f}" if ram else "",
                    *(", ".join(row["counters"]["movements"]), vram_gib(row)),
                ]
            )
    parts = [measured_on(rows.values()), markdown(HEAD, lines)]
    if streamed and resident and rate:
        gather_ms, own_ms = token_nbytes(streamed) / rate / 1e6, 1e3 / tok_s(resident)
        most = 1e3 / (gather_ms + own_ms)
        parts.append(
            f"Bound: {gather_ms:.2f} ms to gather + {own_ms:.2f} ms of a resident token = {most:.1f} tok/s. "
            f"Share of bound: **{100 * tok_s(streamed) / most:.1f} %**."
        )
    return "\n\n".join(parts)


if __name__ == "__main__":
    folder = Path(__file__).parent
    if len(sys.argv) > 1:
        print(make_table(Path(sys.argv[1])))
    else:
        update(folder / "README.md", make_table(folder / "raw"))
