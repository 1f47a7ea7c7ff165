"""The benchmark folders: pages that show what the raw files say, scripts that run, shares that are what they claim."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from noria.cli.commands import make_parser
from noria.gguf.synth import synthesize

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
FOLDERS = sorted(path.parent.name for path in BENCHMARKS.glob("*/run.py"))


def script(folder: str, name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"{folder}.{name}", BENCHMARKS / folder / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def _paths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])


@pytest.fixture
def harness(_paths: None) -> ModuleType:
    import harness

    module: ModuleType = harness
    return module


# --- what is committed ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_page_shows_what_the_raw_files_say(folder: str, harness: ModuleType) -> None:
    table = script(folder, "table").make_table(BENCHMARKS / folder / "raw")
    page = BENCHMARKS / folder / "README.md"
    assert harness.shown(page) == table, f"run: python benchmarks/{folder}/table.py"


@pytest.mark.parametrize("folder", FOLDERS)
def test_raw_files_are_measurements_of_the_tests(folder: str, harness: ModuleType) -> None:
    """Also that nothing is simulated, and that a file was not left behind by a test that has gone."""
    tests = {test.name: test for group in script(folder, "run").GROUPS for test in group.tests}
    for name, row in harness.load(BENCHMARKS / folder / "raw").items():
        assert row["machine"]["driver"], name
        if name == "gather":
            assert len(row["samples_ns"]) == 20
        if name in ("copies", "gather", "load", "timeline"):
            continue
        assert tests[name].matches(row), name
        assert row["backend"] != "sim", name
        assert len(row["samples_ts"]) == 5, name


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_page_names_every_test(folder: str) -> None:
    page = (BENCHMARKS / folder / "README.md").read_text()
    patterns = [re.sub("[NU]", r"\\d+", name) for name in re.findall(r"`([\w-]+)`", page)]
    for group in script(folder, "run").GROUPS:
        for test in group.tests:
            names = {test.name, test.name.replace("-auto", "-off")}
            assert any(re.fullmatch(pattern, name) for pattern in patterns for name in names), test.name


@pytest.mark.parametrize("folder", FOLDERS)
def test_commands_shown_are_understood(folder: str) -> None:
    page = (BENCHMARKS / folder / "README.md").read_text()
    lines = "".join(re.findall(r"^```sh\n(.*?)^```$", page, re.M | re.S)).splitlines()
    assert lines
    for program, *words in map(shlex.split, lines):
        if program == "noria":
            make_parser().parse_args(words)
        else:
            assert (BENCHMARKS.parent / words[0]).is_file(), words


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_run_is_understood_and_strict(folder: str) -> None:
    for group in script(folder, "run").GROUPS:
        args = make_parser().parse_args(["bench", *group.argv(5)])
        assert not args.fallback
        assert args.timeline is None


# --- scripts and tables -----------------------------------------------------------------------------------------------


def row(n_prompt: int = 0, n_gen: int = 0, ts: float = 100.0, **counters: Any) -> dict[str, Any]:
    machine = {
        "device": "G",
        "arch": "",
        "driver": "1",
        "n_cpu": 2,
        "cpu": "C",
        "system": "S",
        "python": "3",
        "noria": "0",
    }
    defaults = {"expert_coverage_pct": 100.0, "link_peak_gbps": 50.0, "h2d_gbps": 40.0, "vram_peak_bytes": 2**30}
    rest = {"compute_idle_pct": 0.0, "stall_ms": 0.0, "movements": {"whole": 1}}
    return {
        "n_prompt": n_prompt,
        "n_gen": n_gen,
        "samples_ts": [ts - 1, ts, 9 * ts],
        "counters": defaults | rest | counters,
        "cpu_moe_size": 10 * 10**9,
        "model_type": "M",
        "model_size": 10**9,
        "test_time": "2026-01-01T00:00:00Z",
        "machine": machine,
    }


def test_bound_of_a_prompt() -> None:
    """10 GB at 50 GB/s take 0.2 s, at 80 GB/s 0.125 s; 16 tokens use a fifth of the experts."""
    bound = script("h200-prefill", "table").bound
    assert bound(row(2048), row(2048, ts=20480.0)) == (pytest.approx(10240), "link")
    assert bound(row(2048), row(2048, ts=4096.0)) == (pytest.approx(4096), "GPU")
    assert bound(row(2048, h2d_gbps=80.0), row(2048, ts=20480.0)) == (pytest.approx(16384), "link")
    assert bound(row(2048, expert_coverage_pct=20.0), row(2048, ts=20480.0)) == (pytest.approx(10240), "link")
    assert bound(row(16, expert_coverage_pct=20.0), row(16, ts=1600.0)) == (pytest.approx(400), "link")


def test_bound_of_a_token(tmp_path: Path) -> None:
    """0.5 GB a token at 50 GB/s take 10 ms; a token of 10 + 2.5 ms is the bound, and one of 12.8 ms 98 % of it."""
    rows = {
        "tg128": row(n_gen=128, ts=1e3 / 12.8, expert_coverage_pct=5.0),
        "resident-tg128": row(n_gen=128, ts=400.0),
        "gather": {"gbps": 50.0},
    }
    for name, record in rows.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(record))
    table = script("h200-decode", "table").make_table(tmp_path)
    assert "Bound: 10.00 ms to gather + 2.50 ms of a resident token = 80.0 tok/s. Share of bound: **97.7 %**." in table
    assert "| tg128 | 78.1 | 12.80 | 0.500 | 50.0 | 50.0 | whole | 1.0 |" in table


def test_scripts_run(tmp_path: Path, harness: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """Two groups of prefill on a simulated device: every raw file, a line each, and a table of them."""
    synthesize("tiny", tmp_path / "tiny.gguf")
    only = "pp512,resident-pp512,ub512-pp512-off,ub512-pp512-auto"
    argv = [
        "-m",
        str(tmp_path / "tiny.gguf"),
        "-dev",
        "sim1",
        "-r",
        "3",
        "--raw",
        str(tmp_path / "raw"),
        "--only",
        only,
    ]
    assert harness.run("", script("h200-prefill", "run").GROUPS, tmp_path, argv) == 0
    rows = harness.load(tmp_path / "raw")
    assert set(rows) == set(only.split(","))
    assert re.findall(r"\] ([\w-]+): [\d.]+ tok/s", capsys.readouterr().out) == only.split(",")
    assert rows["pp512"]["command"] == "noria bench -m tiny.gguf -dev sim1 -ncmoe 99 -p 512 -n 0 --prefetch auto -r 3"
    assert rows["resident-pp512"]["cpu_moe_size"] == 0
    table = script("h200-prefill", "table").make_table(tmp_path / "raw")
    off, ring = (harness.tok_s(rows[f"ub512-pp512-{prefetch}"]) for prefetch in ("off", "auto"))
    assert f"| 512 | 512 | {off:,.0f} | {ring:,.0f} | {ring / off:.2f}x |" in table
    assert re.search(rf"^\| pp512 \| {harness.tok_s(rows['pp512']):,.0f} \| \d+\.\d % \|", table, re.M)


def test_a_timeline_is_summed_up(tmp_path: Path) -> None:
    """Of the second of two passes: 5 ms to enqueue, 40 ms to compute, one wait."""
    names = {1: "scheduler", 2: "compute", 3: "copy"}
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "thread_name", "tid": tid, "args": {"name": name}} for tid, name in names.items()
    ]
    for start in (0, 100_000):
        for tid, name, at, dur in [
            (1, "enqueue layer 0", 0, 2000),
            (1, "enqueue layer 1", 2000, 3000),
            (1, "wait for logits", 5000, 36_000),
            (2, "layer 0", 1000, 19_000),
            (2, "layer 1", 20_000, 20_000),
            (3, "layer 1 experts", 0, 50_000),
        ]:
            events.append({"ph": "X", "name": name, "tid": tid, "ts": start + at, "dur": dur})
    record = script("h200-prefill", "timeline").summary(events)
    assert record == {"waits": ["wait for logits"], "enqueued_ms": 5.0, "computed_ms": 40.0}
    line = script("h200-prefill", "table").timeline_line(record | {"n_prompt": 8192})
    assert "after 5.0 ms" in line
    assert "waited 1 times (wait for logits)" in line


def test_a_group_that_fails_does_not_stop_the_others(
    tmp_path: Path, harness: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    synthesize("tiny", tmp_path / "tiny.gguf")
    monkeypatch.setattr(harness, "machine_of", lambda device: {})
    bad = harness.Group(flags=("-c", "1"), tests=(harness.Test(name="bad", n_prompt=4),))
    good = harness.Group(flags=(), tests=(harness.Test(name="good", n_prompt=4),))
    argv = ["-m", str(tmp_path / "tiny.gguf"), "-dev", "sim1", "-r", "1"]
    assert harness.run("", (bad, good), tmp_path, argv) == 1
    out = capsys.readouterr().out
    assert "FAILED bad: noria bench" in out
    assert "the context of 1 tokens is too short" in out
    assert list(harness.load(tmp_path / "raw")) == ["good"]


def test_update_changes_nothing_but_the_table(tmp_path: Path, harness: ModuleType) -> None:
    page = tmp_path / "README.md"
    page.write_text(f"# Title\n\n{harness.BEGIN}\nold\n{harness.END}\n\nText.\n")
    harness.update(page, "| new |")
    assert harness.shown(page) == "| new |"
    assert page.read_text() == f"# Title\n\n{harness.BEGIN}\n| new |\n{harness.END}\n\nText.\n"
