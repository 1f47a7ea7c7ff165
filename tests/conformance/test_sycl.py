"""The conformance kit on CPU drivers of OpenCL, through both runtimes; each is skipped where it is not installed.

By hand, on the first GPU: `pytest -m gpu tests/conformance/test_sycl.py`.
"""

from types import MappingProxyType
from typing import Any

import pytest

from noria.api import Device, DeviceKind
from noria.testing.fixtures import find_backend
from noria.testing.suite import BasicSuite, OpsSuite, OverlapSuite, RingSuite

POCL, INTEL = "Portable Computing Language", "Intel"
COPY_THREAD = MappingProxyType({"copy_thread": "on"})
SYCL = MappingProxyType({"runtime": "sycl"})


class DriverIndex:
    """As `device_index` of a suite: the number of the device of a driver, looked up when it is first used."""

    def __init__(self, driver: str) -> None:
        self.driver = driver

    def __get__(self, suite: object, owner: Any) -> int:
        backend, options = find_backend("sycl", owner.options)
        probe = backend.probe(options)
        for info in probe.devices:
            if info.driver.startswith(self.driver):
                return info.index
        pytest.skip(f"{owner.options}: no driver of {self.driver} here: {probe.reason or probe.devices}")


class TestBasicOnPocl(BasicSuite):
    backend = "sycl"
    device_index = DriverIndex(POCL)


class TestRingOnPocl(RingSuite):
    backend = "sycl"
    device_index = DriverIndex(POCL)


class TestOverlapOnPocl(OverlapSuite):
    backend = "sycl"
    device_index = DriverIndex(POCL)


class TestBasicWithCopyThread(BasicSuite):
    backend = "sycl"
    options = COPY_THREAD
    device_index = DriverIndex(POCL)


class TestRingWithCopyThread(RingSuite):
    backend = "sycl"
    options = COPY_THREAD
    device_index = DriverIndex(POCL)


class TestOverlapWithCopyThread(OverlapSuite):
    backend = "sycl"
    options = COPY_THREAD
    device_index = DriverIndex(POCL)


class TestBasicOnIntel(BasicSuite):
    backend = "sycl"
    device_index = DriverIndex(INTEL)


class TestRingOnIntel(RingSuite):
    backend = "sycl"
    device_index = DriverIndex(INTEL)


class EnoughWorkers(OverlapSuite):
    """Intel's runtime has one worker less than there are cores; the last core is the waiting host's."""

    @pytest.fixture
    def overlapping(self, device: Device) -> Device:
        if device.limits.n_compute_unit < 4:  # type: ignore[attr-defined]
            pytest.skip("Intel's CPU runtime may run one thing at a time on so few cores")
        return device


class TestOverlapOnIntel(EnoughWorkers):
    backend = "sycl"
    device_index = DriverIndex(INTEL)


class TestBasicOnSycl(BasicSuite):
    backend = "sycl"
    options = SYCL
    device_index = DriverIndex(INTEL)


class TestRingOnSycl(RingSuite):
    backend = "sycl"
    options = SYCL
    device_index = DriverIndex(INTEL)


class TestOverlapOnSycl(EnoughWorkers):
    backend = "sycl"
    options = SYCL
    device_index = DriverIndex(INTEL)


class FirstGpu:
    """As `device_index` of a suite: GPUs come first."""

    def __get__(self, suite: object, owner: Any) -> int:
        backend, options = find_backend("sycl", owner.options)
        probe = backend.probe(options)
        if not probe.devices or probe.devices[0].kind is DeviceKind.CPU:
            pytest.skip(f"no GPU here: {probe.reason or probe.devices}")
        return 0


@pytest.mark.gpu
class TestBasicOnGpu(BasicSuite):
    backend = "sycl"
    device_index = FirstGpu()


@pytest.mark.gpu
class TestOpsOnGpu(OpsSuite):
    backend = "sycl"
    device_index = FirstGpu()


@pytest.mark.gpu
class TestRingOnGpu(RingSuite):
    backend = "sycl"
    device_index = FirstGpu()


@pytest.mark.gpu
class TestOverlapOnGpu(OverlapSuite):
    backend = "sycl"
    device_index = FirstGpu()
