"""`noria bench`: llama-bench's keys, one session a configuration, figures that agree with each other."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import pytest

from noria.api import Op, OpQuery, Support
from noria.builtin.sim.kernels import SimKernels
from noria.cli.engine import demo_model
from noria.gguf import open_model
from noria.gguf.synth import synthesize
from noria.runtime import Session
from noria.text import Tokenizer

KEYS = [
    *("model_filename", "model_type", "model_size", "model_n_params", "backend", "device", "gpu_info"),
    *("n_ctx", "n_batch", "n_ubatch", "n_gpu_layers", "n_cpu_moe", "cpu_moe_size", "type_k", "type_v"),
    *("policy", "prefetch_slots", "load_mode", "memory", "chaos", "n_prompt", "n_gen", "n_depth", "test_time"),
    *("avg_ns", "stddev_ns", "avg_ts", "stddev_ts", "samples_ns", "samples_ts", "counters", "notes"),
]
COUNTERS = {
    *("h2d_bytes", "h2d_gbps", "link_peak_gbps", "link_peak_pct", "gather_bytes"),
    *("compute_idle_pct", "copy_busy_pct", "stall_ms", "copy_stall_ms"),
    *("expert_coverage_pct", "vram_peak_bytes"),
}

Noria = Callable[..., Any]


@pytest.fixture
def bench(noria: Noria) -> Noria:
    """`noria bench` of the demo model on a simulated device, unless told otherwise."""
    return lambda *argv: noria("bench", *(() if {"--backend", "-dev"} & set(argv) else ("--backend", "sim")), *argv)


@pytest.fixture
def rows(bench: Noria) -> Callable[..., list[dict[str, Any]]]:
    def run(*argv: object) -> list[dict[str, Any]]:
        result = bench(*argv, "-o", "json")
        assert result.code == 0, result.err
        records: list[dict[str, Any]] = result.json()
        return records

    return run


def demo_expert_nbytes() -> int:
    with open_model(demo_model()) as file:
        return sum(info.nbytes for info in file.tensors.values() if "_exps" in info.name)


# --- records ----------------------------------------------------------------------------------------------------------


def test_a_record_has_the_keys_of_llama_bench_and_ours(rows: Noria) -> None:
    prompt, gen = rows("-p", 32, "-n", 4, "-r", 3, "-cmoe")
    assert list(prompt) == KEYS
    assert set(prompt["counters"]) >= COUNTERS
    assert (prompt["n_prompt"], prompt["n_gen"]) == (32, 0)
    assert (gen["n_prompt"], gen["n_gen"]) == (0, 4)
    assert prompt["model_type"] == "qwen3moe 14.4M.A5.0M Q4_K_M"
    assert (prompt["backend"], prompt["device"], prompt["type_k"], prompt["n_cpu_moe"]) == ("sim", "sim0", "f16", 4)
    assert (prompt["n_ctx"], prompt["n_batch"], prompt["n_gpu_layers"]) == (32, 32, 5)
    assert prompt["cpu_moe_size"] == demo_expert_nbytes()


def test_the_figures_of_a_record_agree(rows: Noria) -> None:
    (row,) = rows("-p", 48, "-n", 0, "-r", 3, "-cmoe", "--prefetch", "off")
    assert len(row["samples_ns"]) == len(row["samples_ts"]) == 3
    assert row["samples_ts"] == [48e9 / ns for ns in row["samples_ns"]]
    assert row["avg_ts"] == mean(row["samples_ts"])
    assert row["avg_ns"] == round(mean(row["samples_ns"]))
    counters = row["counters"]
    assert counters["wall_ms"] == pytest.approx(row["avg_ns"] / 1e6, rel=0.05)
    assert counters["stall_ms"] / counters["wall_ms"] * 100 == pytest.approx(counters["compute_idle_pct"], rel=0.01)
    assert counters["h2d_gbps"] / counters["link_peak_gbps"] * 100 == pytest.approx(counters["link_peak_pct"], rel=0.01)


def test_simulated_figures_do_not_depend_on_the_machine(rows: Noria) -> None:
    first, second = (rows("-p", 16, "-n", 4, "-r", 1, "-cmoe") for _ in range(2))
    assert [row["samples_ns"] for row in first] == [row["samples_ns"] for row in second]


@pytest.mark.parametrize(("flags", "times"), [((), 1), (("-ub", 8), 1), (("-b", 16), 2)])
def test_counters_are_of_one_repetition(rows: Noria, flags: tuple[object, ...], times: int) -> None:
    """Whatever the number of repetitions and tiles, experts cross the bus once a batch."""
    (row,) = rows("-p", 32, "-n", 0, "-r", 2, "-cmoe", "--prefetch", "whole", *flags)
    assert row["counters"]["h2d_bytes"] == times * demo_expert_nbytes()
    assert row["counters"]["n_tokens"] == 32


def test_the_ring_hides_copies(rows: Noria) -> None:
    off, ring = rows("-p", 64, "-n", 0, "-r", 1, "-cmoe", "--prefetch", "off,whole")
    assert (off["policy"], ring["policy"]) == ("off", "whole")
    assert ring["avg_ts"] > off["avg_ts"]
    assert ring["counters"]["compute_idle_pct"] < off["counters"]["compute_idle_pct"]


# --- configurations ---------------------------------------------------------------------------------------------------


def test_lists_make_every_combination_and_tests_share_a_session(rows: Noria, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Session] = []
    init = Session.__init__

    def counted(self: Session, *args: Any, **kwargs: Any) -> None:
        opened.append(self)
        init(self, *args, **kwargs)

    monkeypatch.setattr(Session, "__init__", counted)
    records = rows("-p", "16,32", "-n", 0, "-r", 1, "-ub", "8,16", "--prefetch", "off,whole", "-ctk", "q8_0")
    assert [(r["n_ubatch"], r["policy"], r["n_prompt"]) for r in records] == [
        (ub, policy, n) for ub in (8, 16) for policy in ("off", "whole") for n in (16, 32)
    ]
    assert {(r["type_k"], r["type_v"]) for r in records} == {("q8_0", "f16")}
    assert len(opened) == 4


def test_a_comma_separates_devices_and_a_slash_joins_them(rows: Noria) -> None:
    flags = ("-p", 8, "-n", 0, "-r", 1, "-dev")
    assert [row["device"] for row in rows(*flags, "sim0,sim1")] == ["sim0", "sim1"]
    assert [row["device"] for row in rows(*flags, "sim0/sim1")] == ["sim0/sim1"]


def test_an_error_of_one_configuration_does_not_stop_the_others(bench: Noria) -> None:
    result = bench("-p", 8, "-n", 0, "-r", 1, "-cmoe", "--memory", "1,64", "--prefetch-slots", "3", "-o", "jsonl")
    assert result.code == 1
    assert [json.loads(line)["n_prompt"] for line in result.out.splitlines()] == [8]
    assert "--memory 1 --prefetch-slots 3: memory plan" in result.err
    assert "MiB over" in result.err


def test_virtual_and_real_time_are_not_mixed(bench: Noria) -> None:
    result = bench("-p", 8, "-n", 0, "-r", 1, "-ngl", 3)
    assert result.code == 2
    assert "reference0 and sim0 cannot be measured together" in result.err
    result = bench("-p", 8, "-n", 0, "-r", 1, "-ngl", 0)  # what was asked for is not what would be measured
    assert (result.code, result.out) == (2, "")


def test_a_timeline_is_of_one_configuration(bench: Noria, tmp_path: Path) -> None:
    assert bench("-p", 8, "-n", 0, "-ub", "4,8", "--timeline", "t.json").code == 2
    assert bench("-p", 8, "-n", 0, "-r", 1, "-cmoe", "--timeline", "t.json").code == 0
    assert "traceEvents" in (tmp_path / "t.json").read_text()


# --- tests and tokens -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "sizes"),
    [((), [6] * 3 + [1] * (1 + 2 * 4)), (("--no-warmup",), [6] * 2 + [1] * (2 * 4))],
)
def test_passes(bench: Noria, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], sizes: list[int]) -> None:
    """A prompt is one pass, generated tokens are a pass each; one pass more a test to warm up."""
    seen: list[int] = []
    forward = Session.forward

    def counted(self: Session, tokens: Any, **kwargs: Any) -> Any:
        seen.append(len(tokens))
        return forward(self, tokens, **kwargs)

    monkeypatch.setattr(Session, "forward", counted)
    assert bench("-p", 6, "-n", 4, "-r", 2, *flags).code == 0
    assert seen == sizes


def test_tokens_of_a_text(bench: Noria, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = "In the beginning God created the heaven and the earth."
    (tmp_path / "prompt.txt").write_text(text)
    seen: list[list[int]] = []
    forward = Session.forward

    def kept(self: Session, tokens: Any, **kwargs: Any) -> Any:
        seen.append(list(tokens))
        return forward(self, tokens, **kwargs)

    monkeypatch.setattr(Session, "forward", kept)
    assert bench("-p", 5, "-n", 0, "-r", 1, "--no-warmup", "--prompt-file", "prompt.txt").code == 0
    with open_model(demo_model()) as file:
        assert seen == [Tokenizer.from_metadata(file.metadata).encode(text)[:5]]
    result = bench("-p", 500, "-n", 0, "--prompt-file", "prompt.txt")
    assert result.code == 2
    assert "the tests need 500" in result.err


def test_forced_routing(rows: Noria, bench: Noria, tmp_path: Path) -> None:
    """All tokens sent to the same 4 of 16 experts use no other; the file must cover the longest test."""
    synthesize("tiny", tmp_path / "tiny.gguf", n_layer=1)
    np.savez(tmp_path / "routing.npz", ids=np.broadcast_to(np.arange(4, dtype=np.int32), (1, 12, 4)))
    flags = ("-m", "tiny.gguf", "--backend", "reference", "-r", 1, "--no-warmup", "--routing", "routing.npz")
    coverage = [row["counters"]["expert_coverage_pct"] for row in rows(*flags, "-p", 12, "-n", 2)]
    assert coverage == [25.0, 25.0]
    result = bench(*flags, "-p", 13, "-n", 0)
    assert result.code == 2
    assert "the experts of 12 tokens; this run may compute 13" in result.err


def test_missing_ops_are_an_error_unless_asked_for(bench: Noria, monkeypatch: pytest.MonkeyPatch) -> None:
    def supports(self: SimKernels, query: OpQuery) -> Support:
        return Support.MISSING if query.op in (Op.ROPE, Op.ROPE_STORE) else Support.NATIVE

    monkeypatch.setattr(SimKernels, "supports", supports)
    flags = ("-p", 4, "-n", 0, "-r", 1, "-o", "json")
    result = bench(*flags)
    assert (result.code, result.json()) == (1, [])
    assert "no kernel for rope" in result.err
    assert bench(*flags, "--fallback").code == 0


# --- forms ------------------------------------------------------------------------------------------------------------


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_markdown_shows_what_matters_and_what_was_given(bench: Noria) -> None:
    result = bench("-p", 16, "-n", 2, "-r", 1, "-cmoe", "--prefetch", "off,whole", "-ctk", "q8_0")
    head, rule, *lines = result.out.splitlines()
    assert cells(head) == [
        *("model", "size", "params", "backend", "ncmoe", "b", "ub", "ctk", "prefetch", "test", "t/s"),
        *("h2d GB/s", "idle %", "experts %"),
    ]
    assert set(rule) <= set("|-: ")
    assert {len(line) for line in (head, rule, *lines)} == {len(head)}
    assert [cells(line)[8:10] for line in lines] == [[p, t] for p in ("off", "whole") for t in ("pp16", "tg2")]
    assert all(" ± 0.00" in line for line in lines)


def test_rows_of_a_sweep_can_be_told_apart(bench: Noria) -> None:
    flags = ("--memory", "64,128", "--chaos", "1,2", "-b", "4,16")
    result = bench("-p", 8, "-n", 0, "-r", 1, *flags)
    head, _, *lines = map(cells, result.out.splitlines())
    shown = [tuple(dict(zip(head, line, strict=True))[title] for title in ("memory", "chaos", "b")) for line in lines]
    memories = ("64.00 MiB", "128.00 MiB")
    assert sorted(shown) == sorted((m, chaos, b) for m in memories for chaos in "12" for b in "48")
    assert result.err.count("noria: -b 16 means 8 here: the context has no more tokens\n") == 4


def test_csv_and_json_lines_say_the_same(bench: Noria) -> None:
    flags = ("-p", "8,16", "-n", 0, "-r", 1, "-cmoe")
    table = list(csv.DictReader(io.StringIO(bench(*flags, "-o", "csv").out)))
    lines = [json.loads(line) for line in bench(*flags, "-o", "jsonl").out.splitlines()]
    assert [row["n_prompt"] for row in table] == ["8", "16"]
    for row, record in zip(table, lines, strict=True):
        assert float(row["avg_ts"]) == record["avg_ts"]
        assert int(row["h2d_bytes"]) == record["counters"]["h2d_bytes"]
        assert "samples_ns" not in row


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (("-p", 0, "-n", 0), "nothing to measure"),
        (("-p", -1), "must not be negative"),
        (("-r", 0), "-r is 0"),
        (("-p", "8,x"), "'x' is not a whole number"),
        (("-ctk", "f16,q9"), "'q9' is no KV type"),
        (("--load-mode", "mmap,disk"), "'disk' is none of auto, mmap, none"),
    ],
)
def test_wrong_flags(bench: Noria, flags: tuple[object, ...], text: str) -> None:
    result = bench(*flags)
    assert result.code == 2
    assert text in result.err


def test_a_context_that_is_too_short_is_found_before_loading(bench: Noria, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Session, "__init__", lambda *args, **kwargs: pytest.fail("loaded"))
    result = bench("-p", 64, "-n", 0, "-c", 32)
    assert result.code == 2
    assert "the context of 32 tokens is too short for a test of 64 tokens" in result.err
