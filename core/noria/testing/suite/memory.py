"""Memory of a device, and copies to, from and inside it."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from noria.api import Buffer, BufferUsage, CopyRegion, Device, DeviceBuffer, HostBuffer, QueueKind
from noria.api.errors import DeviceError, FeatureUnsupported, OutOfDeviceMemory, TransferError
from noria.testing.bench import MARGIN, Bench, delay
from noria.testing.fixtures import ConformanceSuite

MIB = 1 << 20
SIZES = (1, 3, 7, 129, 1000, 65_537, 1_000_003)  # bytes, before they are rounded up to the alignment of copies


class MemoryCases(ConformanceSuite):
    """Buffers are allocated, counted and freed."""

    def test_allocations_are_counted(self, device: Device) -> None:
        """Bytes are counted by usage until they are freed, and the peak stays."""
        before = dict(device.allocated)
        a = device.alloc(3 * MIB, usage=BufferUsage.KV, label="a")
        b = device.alloc(MIB + 256, usage=BufferUsage.SLOT, label="b")
        assert isinstance(a, DeviceBuffer)
        assert (a.nbytes, a.usage, a.label, a.device, a.freed) == (3 * MIB, BufferUsage.KV, "a", device, False)
        assert device.allocated[BufferUsage.KV] == before[BufferUsage.KV] + 3 * MIB
        assert device.allocated[BufferUsage.SLOT] == before[BufferUsage.SLOT] + MIB + 256
        assert device.allocated_peak >= sum(before.values()) + 4 * MIB + 256
        a.free()
        a.free()
        b.free()
        assert a.freed
        assert device.allocated == before

    def test_memory_free_is_sane(self, device: Device) -> None:
        assert 0 < device.memory_free() <= device.info.memory_nbytes

    def test_freed_memory_can_be_had_again(self, device: Device) -> None:
        """Allocating and freeing a fifth of what is free, twenty times, never runs out."""
        nbytes = min(device.memory_free() // 5, device.caps.max_buffer_nbytes, 256 * MIB)
        for _ in range(20):
            device.alloc(nbytes, usage=BufferUsage.COMPUTE, label="again").free()

    @pytest.mark.parametrize("nbytes", [0, -1])
    def test_empty_allocation_is_refused(self, device: Device, nbytes: int) -> None:
        with pytest.raises(DeviceError, match="nothing"):
            device.alloc(nbytes, usage=BufferUsage.COMPUTE, label="nothing")

    def test_too_large_an_allocation(self, device: Device) -> None:
        """What cannot fit is refused with the figures, and counted nowhere."""
        before = dict(device.allocated)
        nbytes = 4 * device.info.memory_nbytes + (1 << 50)
        with pytest.raises(OutOfDeviceMemory, match="mountain") as caught:
            device.alloc(nbytes, usage=BufferUsage.COMPUTE, label="mountain")
        error = caught.value
        assert (error.device, error.label, error.needed) == (device.info.id, "mountain", nbytes)
        assert error.total == device.info.memory_nbytes
        assert 0 <= error.free <= error.total
        assert device.allocated == before

    def test_device_survives_running_out(self, bench: Bench, rng: np.random.Generator) -> None:
        """After a refused allocation the device works as before."""
        with pytest.raises(OutOfDeviceMemory):
            bench.device.alloc(1 << 60, usage=BufferUsage.COMPUTE, label="mountain")
        data = rng.integers(0, 256, 4096, dtype=np.uint8)
        assert np.array_equal(bench.get(bench.put(data)), data)

    def test_host_memory(self, device: Device) -> None:
        """Host memory is bytes that can be written, and page-locked exactly where the device says so."""
        host = device.alloc_host(10_007, label="host")
        array = host.array()
        assert isinstance(host, HostBuffer)
        assert array.shape == (10_007,)
        assert array.dtype == np.dtype(np.uint8)
        assert host.pinned == device.caps.pinned_host
        array[:] = np.arange(10_007) % 251
        assert np.array_equal(host.array(), np.arange(10_007) % 251)
        assert np.array_equal(host.span(8, 16).host_view(np.uint32), array[8:24].view(np.uint32))
        host.free()
        host.free()

    def test_registering_needs_the_capability(self, device: Device) -> None:
        if device.caps.host_register:
            pytest.skip("the device can register memory: see test_copy_from_a_registered_file")
        with pytest.raises(FeatureUnsupported, match=device.info.id):
            device.register_host(memoryview(bytearray(4096)), label="refused")

    def test_wrapped_memory_is_not_pinned(self, device: Device) -> None:
        memory = bytearray(range(200))
        host = device.wrap_host(memoryview(memory), label="wrapped")
        assert not host.pinned
        assert host.array().tobytes() == memory
        memory[7] = 99  # no copy has been made
        assert host.array()[7] == 99
        host.free()


class CopyCases(ConformanceSuite):
    """Bytes arrive where they should, nowhere else, and wrong copies are refused."""

    @pytest.mark.parametrize("kind", list(QueueKind))
    @pytest.mark.parametrize("nbytes", SIZES)
    def test_round_trip(self, bench: Bench, rng: np.random.Generator, kind: QueueKind, nbytes: int) -> None:
        """Host to device, inside the device, and back."""
        queue = bench.device.queue(kind)
        a, b = bench.alloc(nbytes), bench.alloc(nbytes)
        data = rng.integers(0, 256, a.nbytes, dtype=np.uint8)
        back = bench.host(np.zeros_like(data))
        queue.copy_h2d(a.span(), bench.host(data).span())
        queue.copy_d2d(b.span(), a.span())
        queue.copy_d2h(back.span(), b.span())
        queue.record("round trip").wait()
        assert np.array_equal(back.array(), data)

    def test_copies_inside_host_memory(self, bench: Bench, rng: np.random.Generator) -> None:
        """From pageable memory to page-locked: pieces of any size arrive where they should, and nowhere else."""
        device = bench.device
        data = rng.integers(0, 256, 3_000_001, dtype=np.uint8)
        source = device.wrap_host(memoryview(data.tobytes()), label="source")
        target = device.alloc_host(data.size, label="target")
        target.array()[:] = 7
        want = target.array().copy()
        regions = []
        for to, at, nbytes in ((0, 2_000_000, 5), (64, 1, 2_500_001), (2_999_999, 3, 2)):
            regions.append(CopyRegion(target.span(to, nbytes), source.span(at, nbytes)))
            want[to : to + nbytes] = data[at : at + nbytes]
        event = device.copy_host(regions)
        event.wait(60)
        assert event.done()
        assert np.array_equal(target.array(), want)

    @pytest.mark.parametrize("direction", ["h2d", "d2h", "d2d"])
    def test_a_part_of_a_buffer(self, bench: Bench, rng: np.random.Generator, direction: str) -> None:
        """Copies of any aligned offset and size write their bytes and no others."""
        if not bench.caps.region_copy:
            pytest.skip("caps.region_copy is False: only whole buffers are copied")
        unit = bench.caps.copy_alignment
        total = 4096 * unit
        for _ in range(8):
            n = int(rng.integers(1, 300))
            to, at = (int(i) * unit for i in rng.integers(0, 4096 - n, 2))
            data = rng.integers(0, 256, total, dtype=np.uint8)
            untouched = np.full(total, MARGIN, np.uint8)
            src, dst = bench.host(data), bench.host(untouched)
            on_device = bench.alloc(total)
            bench.write(on_device, data if direction == "d2h" else untouched)
            if direction == "h2d":
                bench.queue.copy_h2d(on_device.span(to, n * unit), src.span(at, n * unit))
                got = bench.content(on_device)
            elif direction == "d2h":
                bench.queue.copy_d2h(dst.span(to, n * unit), on_device.span(at, n * unit))
                bench.queue.synchronize()
                got = dst.array()
            else:
                other = bench.alloc(total)
                bench.write(other, data)
                bench.queue.copy_d2d(on_device.span(to, n * unit), other.span(at, n * unit))
                got = bench.content(on_device)
            want = untouched.copy()
            want[to : to + n * unit] = data[at : at + n * unit]
            assert np.array_equal(got, want), f"{n * unit} bytes from offset {at} to {to}"

    def test_many_regions_at_once(self, bench: Bench, rng: np.random.Generator) -> None:
        """A batch of regions from several sources, in any order."""
        if not bench.caps.region_copy:
            pytest.skip("caps.region_copy is False: only whole buffers are copied")
        n, unit = 40, 3 * bench.caps.copy_alignment
        data = rng.integers(0, 256, (2, n * unit), dtype=np.uint8)
        sources = [bench.host(d) for d in data]
        dst = bench.alloc(n * unit)
        picks = rng.permutation(n)
        bench.copy_queue.copy_regions(
            [
                CopyRegion(dst.span(i * unit, unit), sources[i % 2].span(int(p) * unit, unit))
                for i, p in enumerate(picks)
            ]
        )
        bench.copy_queue.synchronize()
        want = np.concatenate([data[i % 2].reshape(n, unit)[p] for i, p in enumerate(picks)])
        assert np.array_equal(bench.content(dst)[: want.size], want)

    def test_copy_from_wrapped_memory(self, bench: Bench, rng: np.random.Generator) -> None:
        """The source may be read-only, and nobody else may hold it."""
        dst = bench.alloc(100_000)
        data = rng.integers(0, 256, dst.nbytes, dtype=np.uint8)
        delay(bench.queue, 20)
        bench.queue.copy_h2d(dst.span(), bench.device.wrap_host(memoryview(data.tobytes()), label="bytes").span())
        bench.queue.record().wait()
        assert np.array_equal(bench.content(dst), data)

    def test_copy_from_a_registered_file(self, bench: Bench, rng: np.random.Generator, tmp_path: Path) -> None:
        """A file mapped read-only is page-locked in place; its array is read-only and shows the file."""
        if not bench.caps.host_register:
            pytest.skip("caps.host_register is False")
        data = rng.integers(0, 256, 3 * mmap.PAGESIZE + 20, dtype=np.uint8)
        path = tmp_path / "weights"
        path.write_bytes(data.tobytes())
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            host = bench.device.register_host(memoryview(mapped), label="mapped")
            assert host.pinned
            array = host.array()
            assert np.array_equal(array, data)
            assert not array.flags.writeable
            n = data.size // bench.caps.copy_alignment * bench.caps.copy_alignment
            dst = bench.alloc(n)
            bench.copy_queue.copy_h2d(dst.span(0, n), host.span(0, n))
            bench.copy_queue.synchronize()
            assert np.array_equal(bench.content(dst)[:n], data[:n])
            del array
            host.free()

    def test_source_may_change_after_the_event(self, bench: Bench, rng: np.random.Generator) -> None:
        """Staging memory is reused as soon as the event of its copy is done."""
        staging = bench.host(np.zeros(64 * 1024, np.uint8))
        payloads = rng.integers(0, 256, (12, staging.nbytes), dtype=np.uint8)
        buffers = [bench.alloc(staging.nbytes) for _ in payloads]
        for buffer, payload in zip(buffers, payloads, strict=True):
            staging.array()[:] = payload
            bench.copy_queue.copy_h2d(buffer.span(), staging.span())
            bench.copy_queue.record().wait()
        staging.array()[:] = 0
        for buffer, payload in zip(buffers, payloads, strict=True):
            assert np.array_equal(bench.content(buffer), payload)

    def test_wrong_copies_are_refused(self, device: Device) -> None:
        """Sizes that differ, the wrong direction, freed memory and another device's memory are errors at once."""
        queue = device.queue(QueueKind.COPY)
        dst = device.alloc(1024, usage=BufferUsage.COMPUTE, label="dst")
        src = device.alloc_host(1024, label="src")
        half = device.alloc_host(512, label="half")
        gone, gone_host = (
            device.alloc(1024, usage=BufferUsage.COMPUTE, label="gone"),
            device.alloc_host(1024, label="gone"),
        )
        gone.free()
        gone_host.free()
        backend, options = self.find_backend()
        with backend.open(self.device_index, options) as other:
            foreign = other.alloc(1024, usage=BufferUsage.COMPUTE, label="foreign")
            foreign_host = other.alloc_host(1024, label="foreign")
            wrong: list[tuple[str, Buffer, Buffer]] = [
                ("copy_h2d", dst, half),
                ("copy_h2d", src, dst),
                ("copy_h2d", dst, dst),
                ("copy_d2h", dst, src),
                ("copy_d2d", dst, src),
                ("copy_h2d", gone, src),
                ("copy_h2d", dst, gone_host),
                ("copy_d2h", src, gone),
                ("copy_d2d", gone, dst),
                ("copy_h2d", foreign, src),
                ("copy_h2d", dst, foreign_host),
                ("copy_d2d", dst, foreign),
            ]
            for copy, to, what in wrong:
                with pytest.raises(TransferError, match=device.info.id):
                    getattr(queue, copy)(to.span(), what.span())
        with pytest.raises(TransferError):
            dst.span(1000, 100)
        queue.synchronize()
        for buffer in (dst, src, half):
            buffer.free()

    def test_only_whole_buffers(self, device: Device) -> None:
        """Without `caps.region_copy` a part of a buffer is refused."""
        if device.caps.region_copy:
            pytest.skip("the device copies parts of buffers: see test_a_part_of_a_buffer")
        dst = device.alloc(1024, usage=BufferUsage.COMPUTE, label="dst")
        src = device.alloc_host(512, label="src")
        with pytest.raises(TransferError, match="whole buffers"):
            device.queue(QueueKind.COPY).copy_h2d(dst.span(0, 512), src.span())
        dst.free()
        src.free()

    def test_a_refused_copy_leaves_no_trace(self, bench: Bench) -> None:
        """The queue goes on working after a refused copy, and nothing of it was done."""
        content: NDArray[np.uint8] = np.full(4096, MARGIN, np.uint8)
        dst = bench.alloc(4096)
        bench.write(dst, content)
        with pytest.raises(TransferError):
            bench.queue.copy_h2d(dst.span(), bench.host(np.zeros(2048, np.uint8)).span())
        assert np.array_equal(bench.content(dst), content)
