"""Finding and opening devices. Importing this imports no GPU library; `probe` and `open` do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from noria.api import API_VERSION, Backend, DeviceInfo, DeviceKind, ProbeResult
from noria.api.errors import BackendUnavailable, DeviceError
from noria_sycl.icd import all_drivers
from noria_sycl.runtime import Found, RuntimeUnavailable

if TYPE_CHECKING:
    from noria_sycl.device import SyclDevice

_ORDER = (DeviceKind.GPU, DeviceKind.INTEGRATED, DeviceKind.CPU)
_OPENCL, _SYCL = "opencl", "sycl"
_HINTS = {
    _OPENCL: "Install what it needs with: pip install 'noria[sycl]', and the OpenCL driver of your GPU.",
    _SYCL: "Install what it needs with: pip install dpctl; or set runtime to opencl.",
}


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
    """Every device of the runtime that is asked for, in our order.

    Raises:
        RuntimeUnavailable: it has none.
    """
    runtime = options.get("runtime", "auto")
    with all_drivers():
        if runtime == _SYCL:
            found = _find_sycl()
        elif runtime == _OPENCL:
            found = _find_opencl(options)
        else:
            try:
                found = _find_opencl(options)
            except RuntimeUnavailable as error:
                try:
                    found = _find_sycl()
                except RuntimeUnavailable:
                    raise error from None
    return sorted(found, key=lambda one: _ORDER.index(one.kind))


def _find_opencl(options: Mapping[str, Any]) -> list[Found]:
    try:
        from noria_sycl import opencl
    except ImportError as error:
        raise RuntimeUnavailable(_OPENCL, f"PyOpenCL cannot be imported: {error}") from error
    try:
        found = opencl.find(options.get("copy_thread", "auto"))
    except opencl.OpenClRuntime.errors as error:
        raise RuntimeUnavailable(_OPENCL, f"OpenCL finds no driver: {error}") from error
    if not found:
        raise RuntimeUnavailable(_OPENCL, "OpenCL has drivers, but no CPU or GPU of OpenCL 1.2 with a compiler")
    return found


def _find_sycl() -> list[Found]:
    try:
        from noria_sycl import sycl
    except ImportError as error:
        raise RuntimeUnavailable(_SYCL, f"dpctl cannot be imported: {error}") from error
    found = sycl.find()
    if not found:
        raise RuntimeUnavailable(_SYCL, "SYCL finds no device with memory that host and device share")
    return found
