"""Finding and opening devices. Importing this imports no GPU library; `probe` and `open` do."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from noria.api import API_VERSION, Backend, DeviceInfo, DeviceKind, ProbeResult
from noria.api.errors import BackendUnavailable, DeviceError
from noria_sycl.icd import all_drivers
from noria_sycl.runtime import Found, RuntimeUnavailable
from noria_sycl.trial import failure

if TYPE_CHECKING:
    from noria_sycl.device import SyclDevice

_ORDER = (DeviceKind.GPU, DeviceKind.INTEGRATED, DeviceKind.CPU)
_OPENCL, _SYCL = "opencl", "sycl"
_HINTS = {
    _OPENCL: "Install what it needs with: pip install 'noria[sycl]', and the OpenCL driver of your GPU.",
    _SYCL: "Install what it needs with: pip install dpctl; or set runtime to opencl.",
}


log = logging.getLogger(__name__)


class SyclBackend(Backend):
    """Devices of any vendor: GPUs first, then the CPU."""

    name = "sycl"
    api_version = API_VERSION

    def probe(self, options: Mapping[str, Any]) -> ProbeResult:
        try:
            found = _find(options)
        except RuntimeUnavailable as error:
            return ProbeResult(reason=str(error), hint=_HINTS[error.runtime])
        return ProbeResult(
            devices=tuple(
                DeviceInfo(
                    backend=self.name,
                    index=index,
                    name=one.name,
                    kind=one.kind,
                    arch=one.arch,
                    driver=one.driver,
                    memory_nbytes=one.memory_nbytes,
                )
                for index, one in enumerate(found)
            )
        )

    def open(self, index: int, options: Mapping[str, Any]) -> SyclDevice:
        probe = self.probe(options)
        if not probe.available:
            raise BackendUnavailable(self.name, probe.reason, probe.hint)
        if not 0 <= index < len(probe.devices):
            there_are = ", ".join(info.id for info in probe.devices)
            raise BackendUnavailable(self.name, f"there is no device {self.name}{index}", f"There are: {there_are}.")
        from noria_sycl.device import SyclDevice

        try:
            runtime = _find(options)[index].open()
            return SyclDevice(probe.devices[index], runtime, in_place=options.get("in_place", True))
        except (DeviceError, MemoryError, RuntimeUnavailable) as error:
            raise BackendUnavailable(self.name, f"{self.name}{index} cannot be opened: {error}") from error


def _find(options: Mapping[str, Any]) -> list[Found]:
    """Every device that works of the runtime that is asked for, in our order.

    Raises:
        RuntimeUnavailable: it has none.
    """
    runtime = options.get("runtime", "auto")
    with all_drivers():
        if runtime != "auto":
            found = _working(runtime, options)
        else:
            try:
                found = _working(_OPENCL, options)
            except RuntimeUnavailable as error:
                try:
                    found = _working(_SYCL, options)
                except RuntimeUnavailable:
                    raise error from None
    return sorted(found, key=lambda one: _ORDER.index(one.kind))


def _working(runtime: str, options: Mapping[str, Any]) -> list[Found]:
    """What `find` finds, but CPUs whose driver is broken: a warning, or the reason if nothing else is there."""
    working, broken = [], []
    for found in find(runtime, options.get("copy_thread", "auto")):
        reason = failure(runtime, found) if found.kind is DeviceKind.CPU else ""
        if reason:
            broken.append(f"{found.name} by {found.driver} cannot be used: {reason}")
        else:
            working.append(found)
    if not working:
        raise RuntimeUnavailable(runtime, "; ".join(broken))
    for text in broken:
        log.warning("%s", text)
    return working


def find(runtime: str, copy_thread: str = "auto") -> list[Found]:
    """Every device that a runtime, "opencl" or "sycl", lists; one at least.

    Raises:
        RuntimeUnavailable: it has none.
    """
    return _find_sycl() if runtime == _SYCL else _find_opencl(copy_thread)


def _find_opencl(copy_thread: str) -> list[Found]:
    try:
        from noria_sycl import opencl
    except (ImportError, OSError) as error:
        raise RuntimeUnavailable(_OPENCL, f"PyOpenCL cannot be imported: {error}") from error
    try:
        found = opencl.find(copy_thread)
    except opencl.OpenClRuntime.errors as error:
        raise RuntimeUnavailable(_OPENCL, f"OpenCL finds no driver: {error}") from error
    if not found:
        raise RuntimeUnavailable(_OPENCL, "OpenCL has drivers, but no CPU or GPU of OpenCL 1.2 with a compiler")
    return found


def _find_sycl() -> list[Found]:
    try:
        from noria_sycl import sycl
    except (ImportError, OSError) as error:
        raise RuntimeUnavailable(_SYCL, f"dpctl cannot be imported: {error}") from error
    found = sycl.find()
    if not found:
        raise RuntimeUnavailable(_SYCL, "SYCL finds no device with memory that host and device share")
    return found
