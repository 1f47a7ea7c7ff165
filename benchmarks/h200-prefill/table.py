"""Make the tables of README.md from the raw files beside it; with the path of other raw files, print them instead."""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import NO_DATA, Row, link_gbps, load, markdown, measured_on, timeline_line, tok_s, update, vram_gib

STREAMED = ("pp16", "pp64", "pp512", "pp2048", "pp8192", "pp32768", "ncmoe24-pp2048")
HEAD = ("test", "tok/s", "share of bound", "bound, tok/s", "set by", "all resident, tok/s")
COUNTERS = ("h2d GB/s", "link GB/s", "idle %", "stall ms", "moved as", "VRAM GiB")
AB_HEAD = ("`-ub`", "prompt", "`off`, tok/s", "default, tok/s", "gain", "idle %, `off`", "idle %, default")
FEW = 512  # tokens below which a prompt leaves experts unused


def link_s(row: Row) -> float:
    """How long the link needs for the experts that the prompt uses: all that are in RAM, unless it is short."""
    share = row["counters"]["expert_coverage_pct"] / 100 if row["n_prompt"] < FEW else 1.0
    return float(share * row["cpu_moe_size"] / (link_gbps(row) * 1e9))


def bound(row: Row, resident: Row) -> tuple[float, str]:
    """The most tokens per second that link and GPU allow, and which of them says so."""
    n, link, gpu = row["n_prompt"], link_s(row), row["n_prompt"] / tok_s(resident)
    return n / max(link, gpu), "link" if link > gpu else "GPU"


def streamed_line(name: str, rows: dict[str, Row]) -> list[str]:
    row = rows[name]
    resident, c = rows.get(f"resident-pp{row['n_prompt']}"), row["counters"]
    share, most, by, own = "", "", "", ""
    if resident is not None:
        ts, by = bound(row, resident)
        share, most, own = f"{100 * tok_s(row) / ts:.1f} %", f"{ts:,.0f}", f"{tok_s(resident):,.0f}"
    moved = [movement for movement in c["movements"] if movement != "resident"]
    return [
        *(name, f"{tok_s(row):,.0f}", share, most, by, own),
        *(f"{c['h2d_gbps']:.1f}", f"{link_gbps(row):.1f}", f"{c['compute_idle_pct']:.1f}", f"{c['stall_ms']:.1f}"),
        *(", ".join(moved), vram_gib(row)),
    ]


def ab_line(off: Row, ring: Row) -> list[str]:
    gain = tok_s(ring) / tok_s(off)
    idle = [f"{row['counters']['compute_idle_pct']:.1f}" for row in (off, ring)]
    n_ubatch, n_prompt = off["n_ubatch"], off["n_prompt"]
    return [f"{n_ubatch:,}", f"{n_prompt:,}", f"{tok_s(off):,.0f}", f"{tok_s(ring):,.0f}", f"{gain:.2f}x", *idle]


def load_lines(record: Row) -> str:
    lines = [[f"`{mode}`", f"{median(times):.2f}"] for mode, times in record["samples_s"].items()]
    return markdown(("`--load-mode`", "s from the start of the process to the first logits"), lines)


def make_table(raw: Path) -> str:
    rows = load(raw)
    loading, timeline = rows.pop("load", None), rows.pop("timeline", None)
    if not rows:
        return NO_DATA
    parts = [measured_on(rows.values())]
    if streamed := [name for name in STREAMED if name in rows]:
        parts.append(markdown([*HEAD, *COUNTERS], [streamed_line(name, rows) for name in streamed]))
    resident = sorted((row for name, row in rows.items() if "resident" in name), key=lambda row: row["n_prompt"])
    if resident:
        lines = [[f"resident-pp{row['n_prompt']}", f"{tok_s(row):,.0f}", vram_gib(row)] for row in resident]
        parts.append(markdown(("test, all experts in VRAM", "tok/s", "VRAM GiB"), lines))
    pairs = [(rows[name], rows.get(f"{name.removesuffix('-off')}-auto")) for name in rows if name.endswith("-off")]
    both = sorted(((a, b) for a, b in pairs if b), key=lambda pair: (pair[0]["n_ubatch"], pair[0]["n_prompt"]))
    if both:
        parts.append(markdown(AB_HEAD, [ab_line(off, ring) for off, ring in both]))
    if loading:
        parts.append(load_lines(loading))
    if timeline:
        parts.append(timeline_line(timeline))
    return "\n\n".join(parts)


if __name__ == "__main__":
    folder = Path(__file__).parent
    if len(sys.argv) > 1:
        print(make_table(Path(sys.argv[1])))
    else:
        update(folder / "README.md", make_table(folder / "raw"))
