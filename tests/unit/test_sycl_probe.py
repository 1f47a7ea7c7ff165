"""What the backend answers where something is missing, and which devices it takes."""

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from noria.api import DeviceKind
from noria.api.errors import BackendUnavailable
from noria_sycl.backend import SyclBackend


def without(monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
    """As if these were not installed."""
    for module in modules:
        monkeypatch.setitem(sys.modules, module, None)
    for module in ("noria_sycl.opencl", "noria_sycl.sycl"):
        monkeypatch.delitem(sys.modules, module, raising=False)
        monkeypatch.delattr(f"noria_sycl.{module.split('.')[1]}", raising=False)


@pytest.mark.parametrize(
    ("options", "missing", "hint"),
    [
        ({}, "PyOpenCL", "noria[sycl]"),
        ({"runtime": "opencl"}, "PyOpenCL", "noria[sycl]"),
        ({"runtime": "sycl"}, "dpctl", "pip install dpctl"),
    ],
)
def test_a_missing_library_is_a_reason(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, str], missing: str, hint: str
) -> None:
    without(monkeypatch, "pyopencl", "dpctl")
    probe = SyclBackend().probe(options)
    assert not probe.available
    assert missing in probe.reason
    assert hint in probe.hint
    with pytest.raises(BackendUnavailable, match=missing):
        SyclBackend().open(0, options)


def test_no_driver_is_a_reason() -> None:
    """In a process of its own: a loader looks for drivers once."""
    pytest.importorskip("pyopencl")
    code = "from noria_sycl.backend import SyclBackend; print(SyclBackend().probe({'runtime': 'opencl'}))"
    environment = {"OCL_ICD_VENDORS": "/nowhere", "PATH": ""}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60)
    assert "OpenCL finds no driver" in run.stdout, run.stderr
    assert "noria[sycl]" in run.stdout


def device(platform: str, driver: str, vendor_id: int, *, cpu: bool = False) -> Any:
    """What `_once` asks of a device."""
    opencl = pytest.importorskip("noria_sycl.opencl")
    kinds = opencl.cl.device_type
    return SimpleNamespace(
        platform=SimpleNamespace(name=platform),
        driver_version=driver,
        vendor_id=vendor_id,
        type=kinds.CPU if cpu else kinds.GPU,
    )


def test_every_device_once() -> None:
    opencl = pytest.importorskip("noria_sycl.opencl")
    arc, radeon = device("Intel(R) OpenCL Graphics", "24.1", 0x8086), device("rusticl", "24.0", 0x1002)
    pocl = device("Portable Computing Language", "3.1+debian", 6880, cpu=True)
    intel = device("Intel(R) OpenCL", "2026.2", 0x8086, cpu=True)
    others = [
        device("rusticl", "24.0", 0x8086),  # the Arc again
        device("Portable Computing Language", "3.0-rc2", 6880, cpu=True),
    ]
    assert opencl._once([others[1], pocl, arc, radeon, intel, others[0]]) == [arc, radeon, pocl, intel]


def test_gpus_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    opencl = pytest.importorskip("noria_sycl.opencl")
    kinds = [DeviceKind.CPU, DeviceKind.INTEGRATED, DeviceKind.CPU, DeviceKind.GPU]
    found = [
        opencl.Found(name=f"{i}", kind=kind, arch="", driver="", memory_nbytes=1, open=lambda: None)
        for i, kind in enumerate(kinds)
    ]
    monkeypatch.setattr(opencl, "find", lambda copy_thread: found)
    monkeypatch.setattr("noria_sycl.backend.failure", lambda runtime, found: "")
    devices = SyclBackend().probe({"runtime": "opencl"}).devices
    assert [(info.id, info.name) for info in devices] == [
        ("sycl0", "3"),
        ("sycl1", "1"),
        ("sycl2", "0"),
        ("sycl3", "2"),
    ]
