"""Memory and queues of the reference device: its options, real asynchrony, and errors that reach whoever waits."""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from threadpoolctl import threadpool_info

from noria.api import (
    API_VERSION,
    BufferUsage,
    Device,
    DeviceBuffer,
    DeviceKind,
    OpQuery,
    Queue,
    QueueKind,
    Support,
    Tensor,
)
from noria.api.errors import BackendUnavailable, ConfigError, DeviceError, KernelLaunchError, OutOfDeviceMemory
from noria.api.ops import Op
from noria.builtin.reference import OPTIONS, ReferenceBackend, ReferenceDevice
from noria.builtin.reference.memory import ReferenceDeviceBuffer
from noria.gguf import SUPPORTED_TYPES

MIB = 1 << 20
DELAY_NS = 200_000_000


def options(**changed: object) -> dict[str, Any]:
    return {name: spec.default for name, spec in OPTIONS.items()} | changed


def alloc(device: Device, nbytes: int = 1024) -> DeviceBuffer:
    return device.alloc(nbytes, usage=BufferUsage.COMPUTE, label="test")


def content(buffer: DeviceBuffer) -> NDArray[np.uint8]:
    assert isinstance(buffer, ReferenceDeviceBuffer)
    return buffer.array()


@pytest.fixture
def device() -> Iterator[ReferenceDevice]:
    with ReferenceBackend().open(0, options()) as device:
        yield device


def break_queue(device: Device, queue: Queue) -> None:
    """Enqueue an op that fails when it runs: row 7 of a table of two."""
    buffer = alloc(device)
    ids = device.alloc_host(4, label="ids")
    ids.array().view(np.int32)[:] = 7
    at = Tensor(buffer.span(0, 4), "I32", (1,))
    queue.copy_h2d(at.span, ids.span())
    table, out = Tensor(buffer.span(64, 32), "F32", (2, 4)), Tensor(buffer.span(128, 16), "F32", (1, 4))
    device.kernels.get_rows(queue, out, table, at)


# --- devices and memory --------------------------------------------------------------------------------------------


def test_probe() -> None:
    backend = ReferenceBackend()
    (info,) = backend.probe(options(memory_mib=3)).devices
    assert (info.id, info.kind, info.memory_nbytes) == ("reference0", DeviceKind.CPU, 3 * MIB)
    (whole,) = backend.probe(options()).devices
    assert whole.memory_nbytes > 64 * MIB
    assert backend.api_version == API_VERSION


@pytest.mark.parametrize("name", ["memory_mib", "copy_queues"])
def test_wrong_options(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        ReferenceBackend().open(0, options(**{name: -1}))


def test_other_devices_do_not_exist() -> None:
    with pytest.raises(BackendUnavailable, match="reference1"):
        ReferenceBackend().open(1, options())


def test_memory_is_limited() -> None:
    with ReferenceBackend().open(0, options(memory_mib=2)) as device:
        first = alloc(device, MIB)
        device.alloc_host(4 * MIB, label="host memory is not the device's")
        with pytest.raises(OutOfDeviceMemory) as caught:
            alloc(device, MIB + 1)
        assert (caught.value.needed, caught.value.free, caught.value.total) == (MIB + 1, MIB, 2 * MIB)
        alloc(device, MIB)
        assert device.memory_free() == 0
        first.free()
        assert device.memory_free() == MIB


def test_memory_that_the_system_refuses(device: ReferenceDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(nbytes: int) -> None:
        raise MemoryError

    monkeypatch.setattr("noria.builtin.reference.memory.aligned_empty", refuse)
    with pytest.raises(OutOfDeviceMemory, match="test"):
        alloc(device)


def test_memory_is_aligned(device: ReferenceDevice) -> None:
    for nbytes in (1, 100, 4097):
        buffer = alloc(device, nbytes)
        array = content(buffer)
        assert array.nbytes == nbytes
        assert array.ctypes.data % device.caps.buffer_alignment == 0


def test_freed_memory_cannot_be_used(device: ReferenceDevice) -> None:
    """An op enqueued on freed memory is an error that names the buffer."""
    queue = device.queue(QueueKind.COMPUTE)
    x = Tensor(alloc(device).span(0, 64), "F32", (1, 16))
    x.span.buffer.free()
    device.kernels.scale(queue, x, x, 2.0)
    with pytest.raises(DeviceError, match=r"'test'.*freed"):
        queue.synchronize()


def test_blas_gets_its_threads_back() -> None:
    def n_threads() -> list[int]:
        return [pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"]

    before = n_threads()
    with ReferenceBackend().open(0, options()) as first:
        second = ReferenceBackend().open(0, options())
        first.close()
        assert n_threads() == [1] * len(before)
        second.close()
    assert n_threads() == before


def test_supports_every_type(device: ReferenceDevice) -> None:
    kernels = device.kernels
    for op in (Op.GET_ROWS, Op.MATMUL, Op.MUL_MAT_ID, Op.EXPERT_FFN):
        for type in SUPPORTED_TYPES:
            support = kernels.supports(OpQuery(op=op, type=type, type2=type, dims=(8, 256, 256)))
            assert support is (Support.NATIVE if type == "F32" else Support.CONVERTED)
        assert kernels.supports(OpQuery(op=op, type="Q1_X", dims=(8, 256, 256))) is Support.MISSING
    for type, wanted in (("F32", True), ("F16", True), ("Q8_0", True), ("Q4_0", True), ("Q4_K", False), ("Z", False)):
        query = OpQuery(op=Op.ATTENTION, type=type, type2="F16", dims=(4, 2, 64, 64, 10))
        assert kernels.supports(query).usable is wanted
    odd = OpQuery(op=Op.KV_STORE, type="Q8_0", type2="Q8_0", dims=(2, 2, 24, 24, 10))
    assert kernels.supports(odd) is Support.MISSING


# --- queues --------------------------------------------------------------------------------------------------------


def test_enqueuing_does_not_wait(device: ReferenceDevice) -> None:
    """Not for its own queue, nor, where the device waits, for another."""
    compute, copy = device.queue(QueueKind.COMPUTE), device.queue(QueueKind.COPY)
    dst, src = alloc(device), device.alloc_host(1024, label="src")
    src.array()[:] = 5
    begin = time.perf_counter_ns()
    copy.delay(DELAY_NS)
    copy.copy_h2d(dst.span(), src.span())
    ready = copy.record("ready")
    compute.wait(ready)
    back = device.alloc_host(1024, label="back")
    back.array()[:] = 0
    compute.copy_d2h(back.span(), dst.span())
    done = compute.record("done")
    assert time.perf_counter_ns() - begin < DELAY_NS // 2
    assert not done.done()
    done.wait(10)
    assert np.all(back.array() == 5)
    assert time.perf_counter_ns() - begin >= DELAY_NS
    at = [event.timestamp_ns() for event in (ready, done)]
    assert at == sorted(at, key=lambda t: t or 0)


def test_waits_on_the_host_without_device_wait() -> None:
    with ReferenceBackend().open(0, options(device_wait=False)) as device:
        copy = device.queue(QueueKind.COPY)
        copy.delay(DELAY_NS)
        event = copy.record()
        device.queue(QueueKind.COMPUTE).wait(event)
        assert event.done()


def test_waits_on_the_host_for_another_device(device: ReferenceDevice) -> None:
    with ReferenceBackend().open(0, options()) as other:
        queue = other.queue(QueueKind.COMPUTE)
        queue.delay(DELAY_NS)
        event = queue.record()
        device.queue(QueueKind.COMPUTE).wait(event)
        assert event.done()


def test_ops_of_another_device_are_refused(device: ReferenceDevice) -> None:
    with ReferenceBackend().open(0, options()) as other:
        x = Tensor(alloc(device).span(0, 64), "F32", (1, 16))
        with pytest.raises(KernelLaunchError, match="another device's"):
            device.kernels.scale(other.queue(QueueKind.COMPUTE), x, x, 2.0)


def test_failed_work_is_told_to_all_who_wait(device: ReferenceDevice) -> None:
    """Events before it are fine; its own, later ones, and those of queues that wait for them carry the error."""
    compute, copy = device.queue(QueueKind.COMPUTE), device.queue(QueueKind.COPY)
    dst, src = alloc(device), device.alloc_host(1024, label="src")
    src.array()[:] = 1
    copy.copy_h2d(dst.span(), src.span())
    copy.synchronize()
    compute.delay(DELAY_NS // 4)
    before = compute.record("before")
    break_queue(device, compute)
    failed = compute.record("failed")
    copy.wait(failed)
    other = device.alloc_host(1024, label="other")
    other.array()[:] = 2
    copy.copy_h2d(dst.span(), other.span())  # must not run
    last = copy.record("last")
    before.wait(10)
    for event in (failed, last):
        with pytest.raises(KernelLaunchError, match=r"get_rows failed on reference0/compute: IndexError"):
            event.wait(10)
        with pytest.raises(KernelLaunchError):
            event.done()
    for queue in (compute, copy):
        with pytest.raises(KernelLaunchError):
            queue.synchronize()
    assert np.all(content(dst) == 1)


def test_a_failed_queue_blocks_nobody(device: ReferenceDevice) -> None:
    """Two queues that wait for each other in turn, one of which fails, both come to an end."""
    compute, copy = device.queue(QueueKind.COMPUTE), device.queue(QueueKind.COPY)
    break_queue(device, compute)
    for _ in range(20):
        copy.wait(compute._record("a"))  # `record` may tell the host of the error and stop this
        compute.wait(copy._record("b"))
    with pytest.raises(KernelLaunchError):
        copy._record("end").wait(10)


def test_a_mapped_file_closes_after_a_failure(device: ReferenceDevice, tmp_path: Path) -> None:
    """No view of registered memory survives in the error's traceback."""
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)) * 16)
    queue = device.queue(QueueKind.COMPUTE)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped, ExitStack() as stack:
        host = device.register_host(memoryview(mapped), label="mapped")
        stack.callback(host.free)
        dst = alloc(device, 4096)
        x = Tensor(host.span(0, 4096), "F32", (2, 512))  # an op may read host memory, but not write to this
        device.kernels.scale(queue, x, Tensor(dst.span(), "F32", (2, 512)), 2.0)
        with pytest.raises(KernelLaunchError, match="read-only"):
            queue.synchronize()


def test_threads_end_with_the_device() -> None:
    before = set(threading.enumerate())
    with ReferenceBackend().open(0, options(copy_queues=2)) as device:
        queues = [device.queue(QueueKind.COMPUTE), *(device.queue(QueueKind.COPY, i) for i in range(2))]
        names = {queue.name for queue in queues}
        threads = {thread for thread in threading.enumerate() if thread not in before and thread.name in names}
        assert {thread.name for thread in threads} == names
    assert not any(thread.is_alive() for thread in threads)
