"""Finding and opening devices. Importing this imports no GPU library; `probe` and `open` do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from noria.api import API_VERSION, Backend, DeviceInfo, DeviceKind, ProbeResult
from noria.api.errors import BackendUnavailable, DeviceError
from noria_sycl.icd import all_drivers

if TYPE_CHECKING:
    from noria_sycl.device import SyclDevice

_INSTALL = "Install what it needs with: pip install 'noria[sycl]'."
_ORDER = (DeviceKind.GPU, DeviceKind.INTEGRATED, DeviceKind.CPU)


class SyclBackend(Backend):
    """Devices of any vendor: GPUs first, then the CPU."""

    name = "sycl"
    api_version = API_VERSION

    def probe(self, options: Mapping[str, Any]) -> ProbeResult:
        try:
            with all_drivers():
                import pyopencl as cl

                devices = _devices()
        except ImportError as error:
            return ProbeResult(reason=f"PyOpenCL cannot be imported: {error}", hint=_INSTALL)
        except cl.Error as error:
            return ProbeResult(reason=f"OpenCL finds no driver: {error}", hint=_INSTALL)
        if not devices:
            return ProbeResult(reason="OpenCL has drivers, but none has a device", hint="Look at `clinfo -l`.")
        return ProbeResult(devices=tuple(_info(index, device) for index, device in enumerate(devices)))

    def open(self, index: int, options: Mapping[str, Any]) -> SyclDevice:
        probe = self.probe(options)
        if not probe.available:
            raise BackendUnavailable(self.name, probe.reason, probe.hint)
        if not 0 <= index < len(probe.devices):
            there_are = ", ".join(info.id for info in probe.devices)
            raise BackendUnavailable(self.name, f"there is no device {self.name}{index}", f"There are: {there_are}.")
        from noria_sycl.device import SyclDevice
        from noria_sycl.opencl import OpenClRuntime

        try:
            return SyclDevice(probe.devices[index], OpenClRuntime(_devices()[index]))
        except (DeviceError, *OpenClRuntime.errors) as error:
            raise BackendUnavailable(self.name, f"{self.name}{index} cannot be opened: {error}") from error


def _devices() -> list[Any]:
    """OpenCL's devices, in our order."""
    import pyopencl as cl

    from noria_sycl.opencl import device_kind

    found = []
    for platform in cl.get_platforms():
        try:
            found += platform.get_devices()
        except cl.Error:
            continue  # a driver without a device of its own
    usable = [device for device in found if device.available and device.compiler_available]
    return sorted(usable, key=lambda device: _ORDER.index(device_kind(device)))


def _info(index: int, device: Any) -> DeviceInfo:
    from noria_sycl.opencl import device_kind

    return DeviceInfo(
        backend=SyclBackend.name,
        index=index,
        name=device.name.strip(),
        kind=device_kind(device),
        arch=device.version.strip(),
        driver=f"{device.platform.name} {device.driver_version}",
        memory_nbytes=device.global_mem_size,
    )
