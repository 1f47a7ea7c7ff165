"""Make the tables of README.md from the raw files beside it; with the path of other raw files, print them instead."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import NO_DATA, Row, link_gbps, load, markdown, measured_on, timeline_line, tok_s, update, vram_gib

HEAD = ("test", "tok/s", "h2d GB/s", "link GB/s", "idle %", "stall ms", "moved as", "VRAM GiB")
COPY_HEAD = ("memory", "copied by", "0.84 MiB", "16 MiB", "256 MiB", "host kept")
BESIDE_HEAD = ("memory, copied by", "kernel", "copies", "copies first", "kernel first", "copies in a thread")
SIZES = (0.84, 16.0, 256.0)


def run_line(name: str, row: Row) -> list[str]:
    c = row["counters"]
    moved = ", ".join(movement for movement in c["movements"] if movement != "resident")
    return [
        *(name, f"{tok_s(row):,.1f}", f"{c['h2d_gbps']:.1f}", f"{link_gbps(row):.1f}", f"{c['compute_idle_pct']:.1f}"),
        *(f"{c['stall_ms']:.1f}", moved, vram_gib(row)),
    ]


def copy_line(row: Row) -> list[str]:
    """GB/s by the size of a copy, and in how much of the time the host was kept in the calls."""
    if "rates" not in row:
        return [row["kind"], row.get("way", ""), *[""] * len(SIZES), row["error"]]
    rates = {rate["mib"]: rate for rate in row["rates"]}
    way = row["way"] + ("" if row["profiling"] else ", no profiling")
    gbps = [f"{rates[mib]['gbps']:.1f}" if mib in rates else "" for mib in SIZES]
    return [row["kind"], way, *gbps, f"{100 * row['rates'][-1]['host_kept']:.0f} %"]


def copy_tables(record: Row) -> list[str]:
    beside = [[name, *(f"{ms:.1f}" for ms in times.values())] for name, times in record["overlap"].items()]
    lanes = ", ".join(f"{n}: {gbps:.1f}" for n, gbps in record["lanes_gbps"].items())
    latencies = [[name, f"{us:.1f}"] for name, us in record["latencies_us"].items()]
    gathers = [
        [kind, ", ".join(f"{gbps:.1f}" for gbps in rates) if isinstance(rates, list) else rates]
        for kind, rates in record["gather"].items()
    ]
    return [
        "Copies to the device, GB/s:",
        markdown(COPY_HEAD, [copy_line(row) for row in record["copies"]]),
        f"Expert-sized copies by so many threads, from mapped memory, GB/s: {lanes}.",
        "A kernel and copies, each alone and both, ms:",
        markdown(BESIDE_HEAD, beside),
        "A kernel that reads 8 of 128 experts in host memory, other ones each time, GB/s:",
        markdown(("memory", "calls"), gathers),
        markdown(("what", "us"), latencies),
    ]


def make_table(raw: Path) -> str:
    rows = load(raw)
    copies, timeline = rows.pop("copies", None), rows.pop("timeline", None)
    if not rows and not copies:
        return NO_DATA
    parts = []
    if rows:
        parts += [measured_on(rows.values()), markdown(HEAD, [run_line(name, row) for name, row in rows.items()])]
    if timeline:
        parts.append(timeline_line(timeline))
    if copies:
        parts += copy_tables(copies)
    return "\n\n".join(parts)


if __name__ == "__main__":
    folder = Path(__file__).parent
    if len(sys.argv) > 1:
        print(make_table(Path(sys.argv[1])))
    else:
        update(folder / "README.md", make_table(folder / "raw"))
