"""Basic cases: finding and opening a device, and everything that moves and orders bytes."""

from __future__ import annotations

import time

import pytest

from noria.api import Backend, BufferUsage, Device, QueueKind
from noria.api.errors import BackendUnavailable, DeviceError
from noria.api.version import compatible
from noria.testing.suite.memory import CopyCases, MemoryCases
from noria.testing.suite.programs import ProgramCases
from noria.testing.suite.queues import QueueCases

PROBE_LIMIT_S = 20.0


class LifeCases(MemoryCases):
    """Backends are probed, devices opened and closed."""

    def test_probe_is_quick_and_explains(self) -> None:
        """A probe answers soon, with devices or with a reason; it may be repeated."""
        backend, options = self.find_backend()
        start = time.monotonic()
        first = backend.probe(options)
        assert time.monotonic() - start < PROBE_LIMIT_S
        assert first.available or first.reason
        assert backend.probe(options) == first

    def test_devices_are_named(self) -> None:
        """Every device found carries its backend's name, a name and a number of its own, and has memory."""
        backend, options = self.find_backend()
        assert backend.name
        devices = backend.probe(options).devices
        assert len({info.index for info in devices}) == len(devices)
        for info in devices:
            assert info.backend == backend.name
            assert info.name
            assert info.memory_nbytes > 0

    def test_backend_speaks_this_api(self) -> None:
        backend, _ = self.find_backend()
        assert isinstance(backend, Backend)
        assert compatible(backend.api_version)

    def test_device_is_the_one_probed(self, device: Device) -> None:
        backend, options = self.find_backend()
        assert device.info in backend.probe(options).devices
        assert device.info.index == self.device_index

    def test_no_such_device(self, device: Device) -> None:
        """Opening a device that does not exist is an error that names the backend."""
        backend, options = self.find_backend()
        too_high = 1 + max(info.index for info in backend.probe(options).devices)
        with pytest.raises(BackendUnavailable) as caught:
            backend.open(too_high, options)
        assert caught.value.name == backend.name

    def test_close_twice_and_use_after(self, device: Device) -> None:
        """Closing frees buffers and may be repeated; a closed device refuses everything; another one is not harmed."""
        backend, options = self.find_backend()
        other = backend.open(self.device_index, options)
        buffer = other.alloc(4096, usage=BufferUsage.COMPUTE, label="left open")
        other.close()
        other.close()
        assert buffer.freed
        with pytest.raises(DeviceError, match=other.info.id):
            other.alloc(4096, usage=BufferUsage.COMPUTE, label="too late")
        with pytest.raises(DeviceError, match=other.info.id):
            other.alloc_host(4096, label="too late")
        with pytest.raises(DeviceError, match=other.info.id):
            other.queue(QueueKind.COMPUTE)
        device.alloc(4096, usage=BufferUsage.COMPUTE, label="still open").free()

    def test_close_waits_for_work(self, device: Device) -> None:
        """Closing a device that has work enqueued completes the work."""
        backend, options = self.find_backend()
        other = backend.open(self.device_index, options)
        queue = other.queue(QueueKind.COMPUTE)
        dst = other.alloc(1 << 20, usage=BufferUsage.COMPUTE, label="dst")
        src = other.alloc_host(1 << 20, label="src")
        for _ in range(20):
            queue.copy_h2d(dst.span(), src.span())
        event = queue.record("last")
        other.close()
        assert event.done()


class BasicSuite(LifeCases, CopyCases, QueueCases, ProgramCases):
    """What every backend must pass before anything else is worth a look."""
