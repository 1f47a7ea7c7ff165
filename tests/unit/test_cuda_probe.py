"""Finding CUDA devices, on machines that have none."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest

from noria.api.errors import BackendUnavailable
from noria_cuda import backend, nvrtc
from noria_cuda.backend import CudaBackend

MIB = 1 << 20


class CudaError(Exception):
    pass


def fake_cupy(monkeypatch: pytest.MonkeyPatch, capabilities: list[tuple[int, int]], error: str = "") -> None:
    """A CuPy that sees GPUs of these compute capabilities."""

    def count() -> int:
        if error:
            raise CudaError(error)
        return len(capabilities)

    def properties(i: int) -> dict[str, object]:
        major, minor = capabilities[i]
        name = f"GPU {i}".encode()
        return {"name": name, "major": major, "minor": minor, "integrated": i == 3, "totalGlobalMem": (i + 1) * MIB}

    runtime = SimpleNamespace(
        CUDARuntimeError=CudaError,
        getDeviceCount=count,
        getDeviceProperties=properties,
        driverGetVersion=lambda: 12080,
    )
    cuda = ModuleType("cupy.cuda")
    cuda.runtime = runtime  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cupy", ModuleType("cupy"))
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)
    monkeypatch.setattr(nvrtc, "version", lambda: (13, 0))
    monkeypatch.setattr(backend, "load_library", lambda name: None)


def test_importing_the_backend_imports_no_gpu_library() -> None:
    code = (
        "import sys, noria_cuda.plugin, noria_cuda.backend; noria_cuda.plugin.make_backend();"
        "print([m for m in ('cupy', 'torch', 'cuda') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"


def test_without_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setitem(sys.modules, "cupy.cuda", None)
    probe = CudaBackend().probe({})
    assert not probe.available
    assert "CuPy" in probe.reason
    assert "noria[cuda]" in probe.hint
    with pytest.raises(BackendUnavailable, match="CuPy"):
        CudaBackend().open(0, {})


def test_without_a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cupy(monkeypatch, [(9, 0)])

    def missing(name: str) -> None:
        raise OSError(f"CUDA's library {name} was not found")

    monkeypatch.setattr(backend, "load_library", missing)
    probe = CudaBackend().probe({})
    assert not probe.available
    assert "cublas was not found" in probe.reason
    assert "noria[cuda]" in probe.hint


def test_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cupy(monkeypatch, [], error="cudaErrorInsufficientDriver")
    probe = CudaBackend().probe({})
    assert "cudaErrorInsufficientDriver" in probe.reason
    assert "nvidia-smi" in probe.hint


def test_gpus_that_are_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cupy(monkeypatch, [(6, 1), (7, 0)])
    probe = CudaBackend().probe({})
    assert not probe.available
    assert "6.1, 7.0" in probe.reason


def test_devices_are_numbered_without_those_that_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cupy(monkeypatch, [(6, 1), (7, 5), (12, 0), (8, 7)])
    devices = CudaBackend().probe({}).devices
    assert [(d.id, d.name, d.arch, d.memory_nbytes) for d in devices] == [
        ("cuda0", "GPU 1", "sm_75", 2 * MIB),
        ("cuda1", "GPU 2", "sm_120", 3 * MIB),
        ("cuda2", "GPU 3", "sm_87", 4 * MIB),
    ]
    assert [d.kind for d in devices] == ["gpu", "gpu", "integrated"]
    assert devices[0].driver.endswith("CUDA 12.8")
    with pytest.raises(BackendUnavailable, match="no device cuda3"):
        CudaBackend().open(3, {})
