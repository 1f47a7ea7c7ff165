"""What the benchmark folders share: the model, runs of `noria bench`, raw files, and the table of a page.

A folder has a `run.py` that names its tests, the `raw/` files that it writes, a `table.py` that reads them, and a
README with the table between two markers.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import noria
from noria.cli.child import run_noria

PRESET, QUANT = "qwen3-30b-a3b", "Q4_K_M"
TIMEOUT_S = 500.0
BEGIN, END = "<!-- table.py: begin -->", "<!-- table.py: end -->"
NO_DATA = "There is no raw data yet."

Row = dict[str, Any]  # a record of `noria bench`, with `command` and `machine`


@dataclass(frozen=True, slots=True, kw_only=True)
class Test:
    """A test of `noria bench` whose record goes to `raw/NAME.json`."""

    name: str
    n_prompt: int = 0
    n_gen: int = 0
    prefetch: str = "auto"

    def matches(self, row: Row) -> bool:
        return (self.n_prompt, self.n_gen, self.prefetch) == (row["n_prompt"], row["n_gen"], row["policy"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Tests that share engine flags and run in one process, which loads the model once for each `prefetch`."""

    flags: tuple[str, ...]
    tests: tuple[Test, ...]

    def argv(self, repetitions: int) -> list[str]:
        """The flags of `noria bench`."""
        words = list(self.flags)
        for flag, key in (("-p", "n_prompt"), ("-n", "n_gen"), ("--prefetch", "prefetch")):
            words += [flag, ",".join(dict.fromkeys(str(getattr(test, key)) for test in self.tests))]
        return [*words, "-r", str(repetitions)]


# --- measuring --------------------------------------------------------------------------------------------------------


def run(
    description: str, groups: Sequence[Group], folder: Path, argv: Sequence[str] | None = None, device: str = "cuda0"
) -> int:
    """The `run.py` of a folder: measure, write raw files, print what came of it; returns the exit code.

    `device`: what is measured unless the command line names another.
    """
    names = [test.name for group in groups for test in group.tests]
    parser = argparse.ArgumentParser(description=description, epilog=f"tests: {', '.join(names)}", allow_abbrev=False)
    parser.add_argument("--only", type=lambda text: text.split(","), default=names, metavar="NAME[,NAME]")
    model = Path(tempfile.gettempdir()) / f"noria-{PRESET}-{QUANT}.gguf"
    parser.add_argument("-m", "--model", type=Path, default=model, help=f"made if it does not exist ({model})")
    parser.add_argument("-dev", "--device", default=device, help=f"({device})")
    parser.add_argument("-r", "--repetitions", type=int, default=5, help="(5)")
    parser.add_argument("--raw", type=Path, default=folder / "raw", help="where raw files go (the folder's own)")
    args = parser.parse_args(argv)
    if unknown := sorted(set(args.only) - set(names)):
        parser.error(f"no such test: {', '.join(unknown)}; there are {', '.join(names)}")
    args.raw.mkdir(parents=True, exist_ok=True)
    begin = time.perf_counter()
    if not args.model.exists():
        _noria(["synth", PRESET, str(args.model), "--quant", QUANT])
        print(f"{_since(begin)} {args.model} written", flush=True)
    machine = machine_of(args.device)
    n_failed = 0
    for group in groups:
        chosen = tuple(test for test in group.tests if test.name in args.only)
        if chosen:
            try:
                _measure(replace(group, tests=chosen), args, machine, begin)
            except RuntimeError as error:
                n_failed += 1
                print(f"{_since(begin)} FAILED {', '.join(test.name for test in chosen)}: {error}", flush=True)
    return 1 if n_failed else 0


def _measure(group: Group, args: argparse.Namespace, machine: dict[str, Any], begin: float) -> None:
    flags = group.argv(args.repetitions)
    rows = json.loads(_noria(["bench", "-m", str(args.model), "-dev", args.device, *flags, "-o", "json"]))
    command = ["noria", "bench", "-m", args.model.name, "-dev", args.device, *flags]
    for test in group.tests:
        (row,) = [row for row in rows if test.matches(row)]
        row |= {"model_filename": args.model.name, "command": " ".join(command), "machine": machine}
        (args.raw / f"{test.name}.json").write_text(json.dumps(row, indent=1) + "\n")
        print(f"{_since(begin)} {test.name}: {tok_s(row):.1f} tok/s", flush=True)


def _noria(argv: list[str]) -> str:
    """What a command printed.

    Raises:
        RuntimeError: it failed.
    """
    finished = run_noria(argv, TIMEOUT_S)
    if finished.error:
        raise RuntimeError(f"noria {' '.join(argv)}: {finished.error}")
    return finished.stdout


def _since(begin: float) -> str:
    return f"[{time.perf_counter() - begin:6.1f} s]"


def machine_of(device: str) -> dict[str, Any]:
    """What figures depend on beside the program: the device with its driver, the host."""
    backends = json.loads(_noria(["devices", "-o", "json"]))["backends"]
    infos = [info for backend in backends for info in backend["devices"] if info["id"] == device]
    if not infos:
        raise SystemExit(f"there is no device {device}; see noria devices")
    info = infos[0]
    cpuinfo = Path("/proc/cpuinfo")
    cpu = re.search(r"^model name\s*: (.*)$", cpuinfo.read_text() if cpuinfo.exists() else "", re.M)
    return {
        "device": info["name"],
        "arch": info["arch"],
        "driver": info["driver"],
        "memory_nbytes": info["memory_nbytes"],
        "cpu": cpu[1] if cpu else platform.processor(),
        "n_cpu": os.cpu_count(),
        "system": platform.system(),
        "python": platform.python_version(),
        "noria": noria.__version__,
    }


# --- tables -----------------------------------------------------------------------------------------------------------


def load(raw: Path) -> dict[str, Row]:
    """The records of a folder by test name; empty before the first run."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(raw.glob("*.json"))}


def tok_s(row: Row) -> float:
    """Tokens per second: the median of the repetitions."""
    return float(median(row["samples_ts"]))


def link_gbps(row: Row) -> float:
    """What the link can do: its peak as measured before the run, or the rate of the run's copies if that is higher."""
    return float(max(row["counters"]["link_peak_gbps"], row["counters"]["h2d_gbps"]))


def vram_gib(row: Row) -> str:
    return f"{row['counters']['vram_peak_bytes'] / 2**30:.1f}"


def markdown(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table whose first column is left-aligned, the others right-aligned."""
    rules = ["---"] + ["--:"] * (len(head) - 1)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rules, *lines))


def timeline_line(record: Row) -> str:
    """What the host did during a prompt, by the `timeline.py` of `h200-prefill`."""
    return (
        f"Timeline of {record['n_prompt']:,} tokens: the host had enqueued everything after "
        f"{record['enqueued_ms']:.1f} ms, the device was done after {record['computed_ms']:.1f} ms; "
        f"the host waited {len(record['waits'])} times ({', '.join(record['waits'])})."
    )


def measured_on(rows: Iterable[Row]) -> str:
    """One line on machine, model and date, a line each if there are several."""
    lines: dict[str, list[str]] = {}
    for row in rows:
        m = row["machine"]
        driver = ", ".join(part for part in (m["arch"], f"driver {m['driver']}" if m["driver"] else "") if part)
        line = f"{m['device']}{f' ({driver})' if driver else ''}, {m['n_cpu']} cores of {m['cpu']}, {m['system']}, "
        line += f"Python {m['python']}, noria {m['noria']}; {row['model_type']}, {row['model_size'] / 1e9:.2f} GB"
        lines.setdefault(line, []).append(row["test_time"][:10])
    return "\n".join(f"Measured {' to '.join(sorted({min(days), max(days)}))}: {line}." for line, days in lines.items())


def update(page: Path, table: str) -> None:
    """Put the table between the markers of a page."""
    head, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, _, tail = rest.partition(END)
    page.write_text(f"{head}{BEGIN}\n{table}\n{END}{tail}", encoding="utf-8")


def shown(page: Path) -> str:
    """The table between the markers of a page."""
    return page.read_text(encoding="utf-8").partition(f"{BEGIN}\n")[2].partition(f"\n{END}")[0]
