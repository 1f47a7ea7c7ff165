"""Commands of noria in a process of their own: a clean device, and a failure that takes nothing else down."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from noria.cli.output import ERROR


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A process that has ended.

    Attributes:
        code: its exit code, negative if a signal ended it; None if it was killed because it took too long.
        seconds: how long it ran.
    """

    code: int | None
    stdout: str
    stderr: str
    seconds: float

    @property
    def error(self) -> str:
        """Why it failed, in its own words where it had any; empty if it did not."""
        if self.code == 0:
            return ""
        if self.code is None:
            return f"it took longer than {self.seconds:.3g} s and was stopped"
        how = f"it was ended by {signal.Signals(-self.code).name}" if self.code < 0 else f"exit code {self.code}"
        said = self.stderr.partition(ERROR)[2] or self.stderr
        return said.strip().replace(ERROR, "") or how


def run_noria(argv: Sequence[str], timeout_s: float) -> Finished:
    """Run `noria ARGV` to its end, with this interpreter and in this folder; it does not outlive an interrupt."""
    begin = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "noria", *argv],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    try:
        stdout, stderr = process.communicate(timeout=timeout_s)
        code: int | None = process.returncode
    except subprocess.TimeoutExpired:
        process.kill()
        stdout, stderr = process.communicate()
        code = None
    except BaseException:
        process.kill()
        process.wait()
        raise
    return Finished(code=code, stdout=stdout, stderr=stderr, seconds=time.perf_counter() - begin)
