"""Whether a CPU driver works: a kernel compiled and run by a process of its own, as a broken driver ends its process.

Drivers for CPUs compile with parts that may not be there (PoCL calls the linker `ld`), and abort when they are not.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import time
from contextlib import suppress

import numpy as np
from platformdirs import user_cache_path

from noria_sycl.runtime import Found, Runtime

TIMEOUT_S = 60
_SOURCE = "__kernel void answer(__global uint *out) {{ out[get_global_id(0)] = {answer}u; }}"


def failure(runtime: str, found: Found) -> str:
    """Why a device does not work, empty if it does; which is tried once, and kept on disk.

    Args:
        runtime: the one that found it, "opencl" or "sycl".
    """
    key = hashlib.sha256(repr((runtime, found.name, found.driver, shutil.which("ld"))).encode()).hexdigest()
    passed = user_cache_path("noria") / "sycl" / f"works-{key[:32]}"
    with suppress(OSError):
        if passed.exists():
            return ""
    argv = [sys.executable, "-m", "noria_sycl.trial", runtime, found.name, found.driver]
    try:
        run = subprocess.run(argv, capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return f"it does not compile and run a kernel of a line within {TIMEOUT_S} s"
    except OSError as error:
        return f"the process to try it in does not start: {error}"
    if run.returncode:
        said = "; ".join(line.strip(" .") for line in run.stderr.splitlines()[-3:] if line.strip())
        return f"it fails to compile and run a kernel of a line: {said or f'its process ends with {run.returncode}'}"
    with suppress(OSError):  # the next start tries again
        passed.parent.mkdir(parents=True, exist_ok=True)
        passed.touch()
    return ""


def answers(runtime: Runtime) -> bool:
    """Whether a kernel that no cache can know writes what it should."""
    answer = time.time_ns() & 0x7FFFFFFF
    program, _ = runtime.build(_SOURCE.format(answer=answer), ())
    out, queue = runtime.alloc(256), runtime.queue(copies=False)
    read = np.zeros(256, np.uint8)
    queue.launch(runtime.kernel(program, "answer").bind([out], keep=False), (64,), (1,), ())
    queue.copy_d2h(read, out, 0, ())
    queue.finish()
    return bool((read.view(np.uint32) == answer).all())


def main(runtime: str, name: str, driver: str) -> str:
    """What is wrong, empty if nothing is."""
    from noria_sycl.backend import find

    for found in find(runtime):
        if (found.name, found.driver) == (name, driver):
            return "" if answers(found.open()) else "its kernel writes something else"
    return "it is not found a second time"


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]) or 0)
