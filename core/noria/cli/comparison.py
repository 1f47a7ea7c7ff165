"""The runs of a comparison: arms in turn, each run a process of its own, and what comes of them.

Processes keep arms from sharing anything; turns keep what drifts (clocks, caches, neighbours) from favouring one.
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

import noria
from noria.cli.arms import Arm
from noria.cli.bench import Test
from noria.cli.child import Finished, run_noria
from noria.cli.output import ProgressBar, print_error
from noria.cli.routing import Ids
from noria.testing.accuracy import nmse

logger = logging.getLogger(__name__)

Row = dict[str, Any]  # a record of `noria bench`


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One process of one arm; `rows` has one record a test."""

    arm: str
    round: int  # from 1; 0 and below are warm-up
    seconds: float
    rows: list[Row]


@dataclass
class Comparison:
    """Runs the arms and keeps what came of it.

    Attributes:
        args: of `noria compare`.
        runs: in the order in which they ran.
        errors: why an arm is out, by its name.
        logits: how each arm's logits differ from the first arm's, by its name.
    """

    arms: list[Arm]
    tests: list[Test]
    args: argparse.Namespace
    runs: list[Run] = field(default_factory=list)
    errors: dict[str, str] = field(default_factory=dict)
    logits: dict[str, dict[str, Any]] = field(default_factory=dict)
    started: datetime = field(default_factory=lambda: datetime.now(UTC))

    @property
    def exit_code(self) -> int:
        return 1 if self.errors else 0

    def run(self, tokens: Ids | None) -> None:
        """Logits first, since whoever cannot compute them need not be measured; then the rounds."""
        args, progress = self.args, ProgressBar()
        rounds = range(1 - args.warmup_rounds, args.rounds + 1)
        n_all = len(self.arms) * (len(rounds) + (tokens is not None))
        n_done = 0
        try:
            if tokens is not None:
                for _ in self._compare_logits(tokens):
                    progress("runs", n_done := n_done + 1, n_all, "run")
            for i, number in enumerate(rounds):
                for arm in rotated(self.arms, i):
                    if arm.name not in self.errors:
                        self._measure(arm, number)
                    progress("runs", n_done := n_done + 1, n_all, "run")
        finally:
            progress.close()

    def _noria(self, arm: Arm, argv: list[str]) -> Finished | None:
        """Run a command; None if it failed, which puts the arm out."""
        plugins = ["--plugins", str(self.args.plugins)] if self.args.plugins else []
        finished = run_noria([*argv, *plugins], self.args.timeout)
        logger.info("arm '%s': noria %s: %.1f s", arm.name, argv[0], finished.seconds)
        if not finished.error:
            return finished
        self.errors[arm.name] = finished.error
        print_error(f"arm '{arm.name}' ({arm.text or 'no flags of its own'}) is out: {argv[0]}: {finished.error}")
        return None

    def _measure(self, arm: Arm, number: int) -> None:
        prompts, gens = (",".join(map(str, ns)) for ns in (self.args.n_prompt, self.args.n_gen))
        argv = ["bench", *arm.bench(), "-p", prompts, "-n", gens, "-r", str(self.args.repetitions), "-o", "json"]
        if not self.args.warmup:
            argv.append("--no-warmup")
        if (finished := self._noria(arm, argv)) is not None:
            rows = json.loads(finished.stdout)
            self.runs.append(Run(arm=arm.name, round=number, seconds=finished.seconds, rows=rows))

    def _compare_logits(self, tokens: Ids) -> Iterator[None]:
        """Each arm's logits of the same tokens against the first arm's; yields after each arm."""
        with TemporaryDirectory(prefix="noria-compare-") as name:
            folder = Path(name)
            np.save(folder / "tokens.npy", tokens)
            first: dict[str, Any] | None = None
            for i, arm in enumerate(self.arms):
                argv = ["logits", *arm.logits(), "--tokens", str(folder / "tokens.npy"), "-o", str(folder / "out.npz")]
                argv += ["--greedy", str(self.args.greedy)]
                if self.args.force_routing:
                    argv += ["--routing" if i else "--routing-out", str(folder / "routing.npz")]
                if (i == 0 or first is not None) and self._noria(arm, argv) is not None:
                    with np.load(folder / "out.npz") as archive:
                        mine = dict(archive)
                    first = first or mine
                    self.logits[arm.name] = difference(mine, first)
                yield

    # --- results -----------------------------------------------------------------------------------------------------

    def record(self) -> dict[str, Any]:
        """Everything, for JSON: what was asked, what it came to, and every run as it was."""
        return {
            "noria": noria.__version__,
            "started": self.started.strftime("%Y-%m-%dT%H:%M:%SZ"),
            "rounds": self.args.rounds,
            "warmup_rounds": self.args.warmup_rounds,
            "repetitions": self.args.repetitions,
            "force_routing": self.args.force_routing,
            "arms": [
                {
                    "name": arm.name,
                    "flags": arm.text,
                    "command": ["noria", "bench", *arm.bench()],
                    "error": self.errors.get(arm.name),
                    "notes": sorted({note for run in self._counted(arm) for row in run.rows for note in row["notes"]}),
                    "logits": self.logits.get(arm.name),
                    "tests": self._summaries(arm),
                }
                for arm in self.arms
            ],
            "runs": [
                {"arm": run.arm, "round": run.round, "seconds": round(run.seconds, 2), "rows": run.rows}
                for run in self.runs
            ],
        }

    def _counted(self, arm: Arm) -> list[Run]:
        return [run for run in self.runs if run.arm == arm.name and run.round > 0]

    def _summaries(self, arm: Arm) -> list[dict[str, Any]]:
        """What each test came to, of an arm that was never out."""
        if arm.name in self.errors:
            return []
        first = self.arms[0]
        summaries = []
        for i, test in enumerate(self.tests):
            rows = [run.rows[i] for run in self._counted(arm)]
            base = [] if first.name in self.errors else [run.rows[i] for run in self._counted(first)]
            summaries.append(summary(test, rows, base))
        return summaries


def rotated(arms: Sequence[Arm], n: int) -> list[Arm]:
    """The order of round `n`: whoever was first is last in the next."""
    n %= len(arms)
    return [*arms[n:], *arms[:n]]


def speed(row: Row) -> float:
    """Tokens per second of one run."""
    return float(median(row["samples_ts"]))


def summary(test: Test, rows: list[Row], base: list[Row]) -> dict[str, Any]:
    """One test of one arm: `rows` and `base`, those of the first arm, in the order of rounds; `base` may be empty.

    The counters are those of the round with the median speed.
    """
    ts = [speed(row) for row in rows]
    ratios = [mine / other for mine, other in zip(ts, map(speed, base), strict=False)]
    return {
        "test": test.name,
        "n_prompt": test.n_prompt,
        "n_gen": test.n_gen,
        "ts": ts,
        "median_ts": median(ts),
        "ratios": ratios,
        "ratio": median(ratios) if ratios else None,
        "ratio_min": min(ratios, default=None),
        "ratio_max": max(ratios, default=None),
        "counters": sorted(rows, key=speed)[len(rows) // 2]["counters"],
    }


def difference(mine: dict[str, Any], first: dict[str, Any]) -> dict[str, Any]:
    """How one arm's `noria logits` differ from the first's; no NMSE between different vocabularies."""
    a, b = mine["logits"], first["logits"]
    comparable = a.shape == b.shape
    n_same = int(np.cumprod(mine["greedy"] == first["greedy"]).sum())
    return {
        "nmse": nmse(a.astype(np.float64), b.astype(np.float64)) if comparable else None,
        "same_bits": comparable and a.tobytes() == b.tobytes(),
        "n_greedy": len(mine["greedy"]),
        "n_greedy_same": n_same,
    }
