"""`noria compare`: arms in turn, ratios that follow from the samples, and an honest word on whether results agree.

Most tests run the arms' commands in this process, which is faster; the rest need real ones.
"""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest

from noria.api.errors import ConfigError
from noria.cli.arms import Flag, parse_arms
from noria.cli.bench import Test as BenchTest
from noria.cli.child import Finished, run_noria
from noria.cli.commands import make_parser
from noria.cli.comparison import difference, rotated, summary
from noria.cli.main import main

Noria = Callable[..., Any]
Calls = list[list[str]]

QUICK = ("--backend", "reference", "-cmoe", "-p", 8, "-n", 2, "-r", 1, "--rounds", 1, "--warmup-rounds", 0)
OFF, WHOLE = ("--arm", "off: --prefetch off"), ("--arm", "whole: --prefetch whole")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Run the arms' commands in this process; the commands, in the order in which they ran."""
    seen: Calls = []

    def run(argv: list[str], timeout_s: float) -> Finished:
        seen.append(list(argv))
        with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
            code = main(argv)
        return Finished(code=code, stdout=out.getvalue(), stderr=err.getvalue(), seconds=0.0)

    monkeypatch.setattr("noria.cli.comparison.run_noria", run)
    return seen


# --- rounds and figures -----------------------------------------------------------------------------------------------


def test_arms_take_turns_and_warm_up_does_not_count(noria: Noria, calls: Calls) -> None:
    flags = ("--backend", "reference", "-cmoe", "-p", "4,8", "-n", 0, "-r", 2, "--rounds", 2, "--no-logits")
    result = noria("compare", *flags, "--arm", "a: -ub 2", "--arm", "b: -ub 4", "--arm", "c:", "-o", "json")
    assert result.code == 0, result.err
    record = result.json()
    assert [(run["arm"], run["round"]) for run in record["runs"]] == [
        *(("a", 0), ("b", 0), ("c", 0)),
        *(("b", 1), ("c", 1), ("a", 1)),
        *(("c", 2), ("a", 2), ("b", 2)),
    ]
    assert [words[words.index("-ub") + 1] if "-ub" in words else None for words in calls[:3]] == ["2", "4", None]
    assert {len(row["samples_ts"]) for run in record["runs"] for row in run["rows"]} == {2}
    base = {run["round"]: run["rows"] for run in record["runs"] if run["arm"] == "a"}
    for arm in record["arms"]:
        runs = {run["round"]: run["rows"] for run in record["runs"] if run["arm"] == arm["name"]}
        for i, test in enumerate(arm["tests"]):
            speeds = [median(runs[n][i]["samples_ts"]) for n in (1, 2)]
            assert test["test"] == ("pp4", "pp8")[i]
            assert test["ts"] == speeds
            assert test["median_ts"] == median(speeds)
            assert test["ratios"] == [s / median(base[n][i]["samples_ts"]) for s, n in zip(speeds, (1, 2), strict=True)]
            assert test["ratio_min"] <= test["ratio"] <= test["ratio_max"]
            assert test["counters"] in [runs[n][i]["counters"] for n in (1, 2)]


def test_order_gives_everyone_every_place() -> None:
    arms = parse_arms(["a:", "b:", "c:"], ())
    orders = [[arm.name for arm in rotated(arms, n)] for n in range(6)]
    assert [order[0] for order in orders] == ["a", "b", "c", "a", "b", "c"]
    assert all(sorted(order) == ["a", "b", "c"] for order in orders)


def test_ratios_are_taken_within_a_round() -> None:
    """A machine that slows down by half from round to round: the arms' speeds overlap, their ratio is the same."""
    base = [{"samples_ts": [n], "counters": {}} for n in (100.0, 50.0, 25.0)]
    rows = [{"samples_ts": [2 * n - 1, 2 * n, 8 * n], "counters": {"h2d_gbps": n}} for n in (100.0, 50.0, 25.0)]
    figures = summary(BenchTest(n_prompt=4), rows, base)
    assert (figures["ratio_min"], figures["ratio"], figures["ratio_max"]) == (2.0, 2.0, 2.0)
    assert (figures["median_ts"], figures["counters"]) == (100.0, {"h2d_gbps": 50.0})
    assert summary(BenchTest(n_prompt=4), rows, [])["ratio"] is None


# --- results ----------------------------------------------------------------------------------------------------------


def test_moving_experts_another_way_changes_no_bit(noria: Noria, calls: Calls) -> None:
    result = noria("compare", *QUICK, *OFF, *WHOLE, "--greedy", 4)
    assert result.code == 0, result.err
    assert [words[0] for words in calls] == ["logits"] * 2 + ["bench"] * 2
    speeds, arms = (table.splitlines() for table in result.out.split("\n\n"))
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in speeds + arms]
    assert cells[0] == [
        *("test", "arm", "t/s", "ratio", "min to max"),
        *("h2d GB/s", "idle %", "stall ms", "experts %", "VRAM"),
    ]
    assert [row[:2] for row in cells[2:6]] == [[t, a] for t in ("pp8", "tg2") for a in ("off", "whole")]
    assert (cells[2][3], cells[2][4]) == ("1.000", "1.000 to 1.000")
    assert cells[-2:] == [
        ["off", "--prefetch off", "same bits", "4 of 4 the same"],
        ["whole", "--prefetch whole", "same bits", "4 of 4 the same"],
    ]


KV_TYPES = ("--arm", "f32: -ctk f32 -ctv f32", "--arm", "q4: -ctk q4_0 -ctv q4_0")
LOGITS = (*QUICK, *KV_TYPES, "--tokens", "40,878,398,11,603,375", "--greedy", 2, "-o", "json")


def test_another_kv_type_is_seen(noria: Noria, calls: Calls) -> None:
    f32, q4 = (arm["logits"] for arm in noria("compare", *LOGITS).json()["arms"])
    assert f32 == {"nmse": 0.0, "same_bits": True, "n_greedy": 2, "n_greedy_same": 2}
    assert 1e-5 < q4["nmse"] < 1e-1
    assert not q4["same_bits"]


def test_the_first_arms_routing_is_forced_on_the_others(noria: Noria, calls: Calls) -> None:
    free = noria("compare", *LOGITS).json()["arms"][1]["logits"]
    forced = noria("compare", *LOGITS, "--force-routing").json()["arms"][1]["logits"]
    assert 0 < forced["nmse"] < free["nmse"]
    first, second = [words for words in calls if words[0] == "logits"][2:]
    assert [flag for flag in first if "routing" in flag and flag[0] == "-"] == ["--routing-out"]
    assert [flag for flag in second if "routing" in flag and flag[0] == "-"] == ["--routing"]


def test_difference_of_logits() -> None:
    first = {"logits": np.float32([[3, 4]]), "greedy": np.int32([5, 6, 7, 8])}
    other = {"logits": np.float32([[3, 3]]), "greedy": np.int32([5, 6, 9, 8])}
    assert difference(other, first) == {"nmse": 1 / 25, "same_bits": False, "n_greedy": 4, "n_greedy_same": 2}
    assert difference({**other, "logits": np.float32([[3, 4, 5]])}, first)["nmse"] is None


def test_a_file_gets_every_sample_and_the_terminal_the_tables(noria: Noria, calls: Calls, tmp_path: Path) -> None:
    result = noria("compare", *QUICK, *OFF, *WHOLE, "--no-logits", "--output", "result.json")
    assert result.code == 0
    assert "| pp8" in result.out
    assert "not compared" in result.out
    record, off = json.loads((tmp_path / "result.json").read_text()), ["--prefetch", "off"]
    assert set(record) == {
        *("noria", "started", "rounds", "warmup_rounds", "repetitions", "force_routing", "arms", "runs")
    }
    assert set(record["arms"][0]) == {"name", "flags", "command", "error", "notes", "logits", "tests"}
    assert record["arms"][0]["command"] == ["noria", "bench", "--backend", "reference", "-cmoe", *off]
    assert [run["rows"][0]["policy"] for run in record["runs"]] == ["off", "whole"]


# --- arms -------------------------------------------------------------------------------------------------------------


def test_an_arm_has_a_name_and_flags() -> None:
    named, bare, empty = parse_arms(
        ["two GPUs: -dev a0,a1 --fallback", "-ot 'exps=CPU' -cmoe", ""], (Flag("-ub", "4"),)
    )
    assert (named.name, named.text) == ("two GPUs", "-dev a0,a1 --fallback")
    assert named.bench() == ["-ub", "4", "-dev", "a0/a1", "--fallback"]
    assert named.logits() == ["-ub", "4", "-dev", "a0,a1", "--fallback"]
    assert (bare.name, empty.name) == ("-ot 'exps=CPU' -cmoe", "defaults")
    assert sorted(bare.bench()) == sorted(["-ub", "4", "-ot", "exps=CPU", "-cmoe"])
    assert empty.logits() == ["--no-fallback", "-ub", "4"]


def test_flags_of_an_arm_replace_their_rivals() -> None:
    """`noria bench` takes only one of them; overrides add up instead."""
    common, _ = parse_arms(["-cmoe --backend reference -ot a=CPU --fallback", "b:"], ())
    arm, _ = parse_arms(["a: -ncmoe 2 -dev sim0 -ot b=GPU --no-fallback", "b:"], common.flags)
    assert sorted(arm.bench()) == sorted(
        ["-ot", "a=CPU", "-ncmoe", "2", "-dev", "sim0", "-ot", "b=GPU", "--no-fallback"]
    )
    make_parser().parse_args(["bench", *arm.bench()])


@pytest.mark.parametrize(
    ("texts", "error"),
    [
        (["a: -cmoe"], "needs two arms"),
        (["a: -cmoe", "a: -ub 2"], "two arms have the name 'a'"),
        (["ring", "-cmoe"], "unrecognized arguments: ring"),
        (["-p 5", "-cmoe"], "there is no flag -p"),
        (["-ub 512,2048", "-cmoe"], "'512,2048' is neither a whole number nor 'auto'"),
        (["--prefetch off,whole", "-cmoe"], "give each of its values an arm"),
        (["--load-mode disk", "-cmoe"], "'disk' is none of auto, mmap, none"),
        (["--timeline t.json", "-cmoe"], "write it with noria bench"),
        (["-ot 'exps=CPU", "-cmoe"], "No closing quotation"),
    ],
)
def test_wrong_arms(texts: list[str], error: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_arms(texts, ())
    assert error in str(caught.value)


@pytest.mark.parametrize("text", ["-cmoe", "-ncmoe 4", "-c 64", "--prefetch=off"])
def test_an_arm_may_begin_with_a_flag(text: str, noria: Noria, calls: Calls) -> None:
    assert noria("compare", *QUICK, "--no-logits", "--arm", text, "--arm", "other:").code == 0


def test_wrong_flags_are_found_before_anything_runs(noria: Noria, calls: Calls) -> None:
    arms = ("compare", "--arm", "a:", "--arm", "b:")
    for flags in (("--rounds", 0), ("-p", 0, "-n", 0), ("--output", "table.txt"), ("--tokens", "x"), ("--fall",)):
        assert noria(*arms, *flags).code == 2, flags
    assert calls == []


# --- failures, in real processes --------------------------------------------------------------------------------------


def test_an_arm_that_fails_does_not_stop_the_others(noria: Noria) -> None:
    result = noria(
        "compare", *QUICK, "--greedy", 1, "--arm", "ok:", "--arm", "tiny: --memory 1", "--arm", "off: --prefetch off"
    )
    assert result.code == 1
    assert "arm 'tiny' (--memory 1) is out: logits: memory plan" in result.err
    assert "MiB over" in result.err
    assert [line.split("|")[2].strip() for line in result.out.splitlines() if line[:4] == "| pp"] == ["ok", "off"]
    assert [line.split("|")[3].strip() for line in result.out.splitlines()[-3:]] == ["same bits", "failed", "same bits"]


def test_without_the_first_arm_there_are_no_ratios(noria: Noria, calls: Calls) -> None:
    arms = ("--arm", "tiny: --memory 1", "--arm", "ok:")
    record = noria("compare", *QUICK, *arms, "-o", "json").json()
    assert "MiB over" in record["arms"][0]["error"]
    assert record["arms"][0]["tests"] == []
    assert [(test["ratio"], test["ratios"]) for test in record["arms"][1]["tests"]] == [(None, [])] * 2
    assert record["arms"][1]["logits"] is None


def test_a_run_that_takes_too_long_is_stopped() -> None:
    finished = run_noria(["bench", "-p", "4096", "-c", "8192", "-r", "1000"], timeout_s=0.2)
    assert finished.code is None
    assert 0.2 <= finished.seconds < 5
    assert "longer than" in finished.error


def test_errors_of_a_process() -> None:
    def error(code: int | None, stderr: str = "") -> str:
        return Finished(code=code, stdout="", stderr=stderr, seconds=3.0).error

    assert error(0, "noria: a note") == ""
    assert error(1, "noria: a note\nnoria: error: first\nmore\nnoria: error: second\n") == "first\nmore\nsecond"
    assert error(1, "Traceback: x\n") == "Traceback: x"
    assert error(3) == "exit code 3"
    assert error(-9) == "it was ended by SIGKILL"
    assert error(None) == "it took longer than 3 s and was stopped"


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux's list of child processes")
def test_ctrl_c_ends_the_running_arm(tmp_path: Path) -> None:
    argv = ["compare", "--backend", "reference", *OFF, *WHOLE, "-p", "8", "-r", "100000", "--no-logits"]
    process = subprocess.Popen([sys.executable, "-m", "noria", *argv], cwd=tmp_path)
    try:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        deadline = time.monotonic() + 20
        while not (found := children.read_text().split()) and time.monotonic() < deadline:
            time.sleep(0.02)
        (child,) = map(int, found)
        while b"bench" not in Path(f"/proc/{child}/cmdline").read_bytes():  # still a copy of its parent
            time.sleep(0.02)
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 130
        with pytest.raises(ProcessLookupError):
            os.kill(child, 0)
    finally:
        process.kill()
        process.wait()
