"""The base of all suites: which backend is under test, and the fixtures its cases ask for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
import pytest

from noria.api import Backend, Device, DeviceKind
from noria.api.errors import DeviceError
from noria.plugins import BackendRegistry, PluginManager
from noria.testing.bench import Bench, all_queues
from noria.testing.guard import dropped_cases

NO_NUMBERS = "this device is simulated and computes no numbers"


@cache
def _registry() -> BackendRegistry:
    return BackendRegistry(PluginManager())


def find_backend(name: str, options: Mapping[str, Any] = MappingProxyType({})) -> tuple[Backend, Mapping[str, Any]]:
    """An installed backend, and its options: the defaults, over them `options`."""
    return _registry().backend(name), _registry().options(name) | dict(options)


class OpenDevice:
    """A device that stays open from case to case, until work on it fails: one failure must not look like many."""

    def __init__(self, open: Callable[[], Device]) -> None:
        self._open = open
        self._device: Device | None = None

    def device(self) -> Device:
        """The device, opened now if it is not."""
        if self._device is None:
            self._device = self._open()
        return self._device

    def close_if_broken(self) -> None:
        """Close the device if a queue of it does not work any more."""
        try:
            for queue in all_queues(self.device()):
                queue.synchronize()
        except DeviceError:
            self.close()

    def close(self) -> None:
        if self._device is not None:
            self._device.close()
            self._device = None


class ConformanceSuite:
    """A subclass names a backend and inherits its cases.

    Attributes:
        backend: name of an installed backend.
        make_backend: makes the backend instead, for one that is not installed; `options` are then complete.
        options: options of the backend, over its defaults.
        device_index: the device to open.
    """

    backend: ClassVar[str] = ""
    make_backend: ClassVar[Callable[[], Backend] | None] = None
    options: ClassVar[Mapping[str, Any]] = {}
    device_index: ClassVar[int] = 0

    @classmethod
    def find_backend(cls) -> tuple[Backend, Mapping[str, Any]]:
        """The backend under test and the options to open it with."""
        if cls.make_backend is not None:
            return cls.make_backend(), cls.options
        return find_backend(cls.backend, cls.options)

    @pytest.fixture(scope="class")
    @classmethod
    def opened(cls) -> Iterator[OpenDevice]:
        """The device under test, open for all cases of the class."""
        backend, options = cls.find_backend()
        probe = backend.probe(options)
        if not probe.available:
            pytest.skip(f"{backend.name}: {probe.reason}. {probe.hint}")
        opened = OpenDevice(lambda: backend.open(cls.device_index, options))
        yield opened
        opened.close()

    @pytest.fixture
    def device(self, opened: OpenDevice) -> Iterator[Device]:
        """The device under test."""
        yield opened.device()
        opened.close_if_broken()

    @pytest.fixture
    def bench(self, device: Device) -> Iterator[Bench]:
        """The device under test, for cases that look at numbers."""
        if device.info.kind is DeviceKind.SIMULATED:
            pytest.skip(f"{device.info.id}: {NO_NUMBERS}")
        bench = Bench(device)
        yield bench
        bench.close()

    @pytest.fixture
    def rng(self, request: pytest.FixtureRequest) -> np.random.Generator:
        """Random numbers that are the same for a case on every run and every backend."""
        return np.random.default_rng(list(request.node.name.encode()))

    def test_no_case_is_dropped(self) -> None:
        """Every case of the kit is inherited, or overridden with a reason."""
        dropped = dropped_cases(type(self))
        assert not dropped, "; ".join(dropped)
