"""The conformance kit on a CUDA device; skipped with the reason where there is none."""

import subprocess
import sys
from mmap import PAGESIZE, mmap

import numpy as np
import pytest

from noria.testing.bench import Bench
from noria.testing.suite import BasicSuite, OpsSuite, OverlapSuite, RingSuite

pytestmark = pytest.mark.gpu


class TestBasic(BasicSuite):
    backend = "cuda"

    def test_copies_across_the_ends_of_locked_memory(self, bench: Bench, rng: np.random.Generator) -> None:
        """Memory of which a part is page-locked, as a mapped file with experts in it, is copied whole."""
        n = 10 * PAGESIZE
        data = rng.integers(0, 256, n, dtype=np.uint8)
        memory = mmap(-1, n)
        memory.write(data.tobytes())
        whole = bench.device.wrap_host(memoryview(memory), label="whole")
        part = bench.device.register_host(memoryview(memory)[2 * PAGESIZE + 100 : 5 * PAGESIZE + 200], label="part")
        dst = bench.alloc(n)
        for first, end in ((0, n), (100, 3 * PAGESIZE), (2 * PAGESIZE + 50, 2 * PAGESIZE + 150), (4 * PAGESIZE, n)):
            bench.write(dst, np.zeros(n, np.uint8))
            bench.queue.copy_h2d(dst.span(first, end - first), whole.span(first, end - first))
            bench.queue.synchronize()
            assert np.array_equal(bench.content(dst)[first:end], data[first:end])
        whole.array()[:] = 0
        bench.queue.copy_d2h(whole.span(), dst.span())
        bench.queue.synchronize()
        assert np.array_equal(whole.array()[4 * PAGESIZE :], data[4 * PAGESIZE :])
        part.free()
        whole.free()


class TestOps(OpsSuite):
    backend = "cuda"


class TestRing(RingSuite):
    backend = "cuda"


class TestOverlap(OverlapSuite):
    backend = "cuda"


FAULT = """
from noria.api import BufferUsage, QueueKind
from noria.api.errors import KernelLaunchError, NoriaError
from noria_cuda.backend import CudaBackend

device = CudaBackend().open(0, {})
queue, other = device.queue(QueueKind.COMPUTE), device.queue(QueueKind.COPY)
buffer = device.alloc(4096, usage=BufferUsage.COMPUTE, label="x")
host = device.alloc_host(4096, label="y")
before = queue.record("before")
before.wait()
nowhere = 1 << 45
types = ("X=float", "W=float", "Y=float")
queue.submit("fault", [], [], lambda: device.launch(
    queue, "elementwise", "scale", (1, 1, 1), 256, (nowhere, nowhere, 1.0, 8), types))


def fails(name, call):
    try:
        call()
    except NoriaError as error:
        print(name, type(error).__name__, error)
    else:
        raise AssertionError(f"{name} raised nothing")


event = queue.record("after")
fails("wait", event.wait)
fails("done", event.done)
fails("wait with a limit", lambda: event.wait(1))
fails("synchronize", queue.synchronize)
fails("copy", lambda: queue.copy_h2d(buffer.span(), host.span()))
fails("record", lambda: other.record("later").wait())
fails("alloc", lambda: device.alloc(4096, usage=BufferUsage.COMPUTE, label="z"))
fails("alloc_host", lambda: device.alloc_host(1 << 30, label="z"))
fails("memory_free", device.memory_free)
fails("clock_sync", device.clock_sync)
fails("free", buffer.free)
device.close()
print("closed")
"""


def test_a_fault_of_a_kernel_is_the_error_of_its_event() -> None:
    """After a kernel has failed only noria's errors come out, and the device can be closed. Not in this process."""
    run = subprocess.run([sys.executable, "-c", FAULT], capture_output=True, text=True, timeout=120)
    if "BackendUnavailable" in run.stderr:
        pytest.skip(run.stderr.splitlines()[-1])
    assert run.returncode == 0, run.stdout + run.stderr
    lines = run.stdout.splitlines()
    assert lines[-1] == "closed"
    assert lines[0].startswith("wait KernelLaunchError")
