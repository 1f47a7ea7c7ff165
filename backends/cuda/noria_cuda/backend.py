"""Finding and opening CUDA devices. Importing this imports no GPU library; `probe` and `open` do."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from noria.api import API_VERSION, Backend, DeviceInfo, DeviceKind, ProbeResult
from noria.api.errors import BackendUnavailable, DeviceError
from noria_cuda import nvrtc
from noria_cuda.libraries import load_library

if TYPE_CHECKING:
    from noria_cuda.device import CudaDevice

OLDEST_SM = 75  # compute capability 7.5, Turing
_INSTALL = "Install what it needs with: pip install 'noria[cuda]'."
_DRIVER = "Check that `nvidia-smi` lists a GPU; install or update NVIDIA's driver otherwise."


class CudaBackend(Backend):
    """NVIDIA GPUs from compute capability 7.5 on."""

    name = "cuda"
    api_version = API_VERSION

    def probe(self, options: Mapping[str, Any]) -> ProbeResult:
        try:
            from cupy.cuda import runtime
        except ImportError as error:
            return ProbeResult(reason=f"CuPy cannot be imported: {error}", hint=_INSTALL)
        try:
            nvrtc.version()
            load_library("cublas")
        except (ImportError, OSError, nvrtc.NvrtcError) as error:
            return ProbeResult(reason=f"a library of CUDA cannot be used: {error}", hint=_INSTALL)
        try:
            gpus = _gpus()
        except runtime.CUDARuntimeError as error:
            return ProbeResult(reason=f"CUDA finds no device: {error}", hint=_DRIVER)
        if usable := [gpu for gpu in gpus if gpu.sm >= OLDEST_SM]:
            return ProbeResult(devices=tuple(_info(index, gpu) for index, gpu in enumerate(usable)))
        have = ", ".join(f"{gpu.sm / 10}" for gpu in gpus) or "none"
        return ProbeResult(
            reason=f"no GPU of compute capability {OLDEST_SM / 10} or more (there are: {have})",
            hint="GPUs before Turing are not supported; --backend vulkan may serve them.",
        )

    def open(self, index: int, options: Mapping[str, Any]) -> CudaDevice:
        probe = self.probe(options)
        if not probe.available:
            raise BackendUnavailable(self.name, probe.reason, probe.hint)
        if not 0 <= index < len(probe.devices):
            there_are = ", ".join(info.id for info in probe.devices)
            raise BackendUnavailable(self.name, f"there is no device {self.name}{index}", f"There are: {there_are}.")
        from noria_cuda.device import CudaDevice
        from noria_cuda.errors import CUDA_ERRORS

        usable = [gpu for gpu in _gpus() if gpu.sm >= OLDEST_SM]
        try:
            return CudaDevice(
                probe.devices[index], usable[index].ordinal, dependent_launch=options.get("dependent_launch", True)
            )
        except (DeviceError, *CUDA_ERRORS) as error:
            hint = "Another process may have all of its memory, or the right to be its only user (see nvidia-smi)."
            raise BackendUnavailable(self.name, f"{self.name}{index} cannot be opened: {error}", hint) from error


class _Gpu(NamedTuple):
    """A GPU as CUDA sees it.

    Attributes:
        ordinal: CUDA's number for it.
        sm: compute capability (75 = 7.5).
    """

    ordinal: int
    sm: int
    properties: Mapping[str, Any]


def _gpus() -> list[_Gpu]:
    from cupy.cuda import runtime

    every = ((i, runtime.getDeviceProperties(i)) for i in range(runtime.getDeviceCount()))
    return [_Gpu(i, 10 * properties["major"] + properties["minor"], properties) for i, properties in every]


def _info(index: int, gpu: _Gpu) -> DeviceInfo:
    from cupy.cuda import runtime

    return DeviceInfo(
        backend=CudaBackend.name,
        index=index,
        name=gpu.properties["name"].decode(),
        kind=DeviceKind.INTEGRATED if gpu.properties["integrated"] else DeviceKind.GPU,
        arch=f"sm_{gpu.sm}",
        driver=_driver(runtime.driverGetVersion()),
        memory_nbytes=gpu.properties["totalGlobalMem"],
    )


def _driver(cuda: int) -> str:
    """The driver's version where the system tells it, and the newest CUDA it runs."""
    text = f"CUDA {cuda // 1000}.{cuda % 1000 // 10}"
    try:
        return f"{Path('/sys/module/nvidia/version').read_text(encoding='utf-8').strip()}, {text}"
    except OSError:
        return text
