"""A CPU driver that is broken is left out, with a reason, and ends no process but its own."""

import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from noria.api import DeviceKind
from noria_sycl import backend, icd, trial
from noria_sycl.runtime import Found, RuntimeUnavailable


def found(name: str = "CPU", kind: DeviceKind = DeviceKind.CPU) -> Found:
    def open_it() -> Any:
        raise AssertionError("nothing opens it")

    return Found(name=name, kind=kind, arch="", driver="driver 1", memory_nbytes=1, open=open_it)


@pytest.fixture
def tries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How the processes to come end: a list to fill, and an empty cache."""
    codes: list[int] = []

    def run(argv: list[str], **options: Any) -> Any:
        return SimpleNamespace(returncode=codes.pop(0), stderr="line 1\n\nNo linker.\n")

    monkeypatch.setattr(trial, "user_cache_path", lambda name: tmp_path)
    monkeypatch.setattr(trial.subprocess, "run", run)
    return codes


def test_what_works_is_tried_once(tries: list[int]) -> None:
    tries += [-6, 0]
    assert trial.failure("opencl", found()).endswith("a kernel of a line: line 1; No linker")
    assert trial.failure("opencl", found()) == ""
    assert trial.failure("opencl", found()) == ""
    assert not tries


def test_another_linker_is_another_trial(tries: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    tries += [0, -6]
    monkeypatch.setattr(trial.shutil, "which", lambda name: "/usr/bin/ld")
    assert trial.failure("opencl", found()) == ""
    monkeypatch.setattr(trial.shutil, "which", lambda name: None)
    assert "No linker" in trial.failure("opencl", found())


def test_a_process_that_hangs_is_a_reason(tries: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(*args: Any, **options: Any) -> Any:
        raise subprocess.TimeoutExpired("", 60)

    monkeypatch.setattr(trial.subprocess, "run", hang)
    assert "within 60 s" in trial.failure("opencl", found())


def test_only_cpus_are_tried_and_the_broken_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    devices = [found("good"), found("bad"), found("bad GPU", DeviceKind.GPU)]
    monkeypatch.setattr(backend, "find", lambda *args: devices)
    monkeypatch.setattr(backend, "failure", lambda runtime, found: "no linker" if "bad" in found.name else "")
    with caplog.at_level(logging.WARNING):
        assert [one.name for one in backend._working("opencl", {})] == ["good", "bad GPU"]
    assert "bad by driver 1 cannot be used: no linker" in caplog.text
    del devices[0], devices[1]
    with pytest.raises(RuntimeUnavailable, match="bad by driver 1 cannot be used: no linker"):
        backend._working("opencl", {})


def test_pocl_without_a_linker(tmp_path: Path) -> None:
    """It aborts whoever compiles."""
    pytest.importorskip("pyopencl")
    if not Path("/etc/OpenCL/vendors/pocl.icd").exists():
        pytest.skip("PoCL is not here")
    code = "from noria_sycl.backend import SyclBackend as S; print(S().probe({'runtime': 'opencl'}))"
    variables = {"PATH": "/nowhere", "XDG_CACHE_HOME": str(tmp_path), "OCL_ICD_VENDORS": "/etc/OpenCL/vendors"}
    environment = {key: value for key, value in os.environ.items() if key.startswith("PYTHON")} | variables
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=120)
    assert run.returncode == 0, run.stderr
    assert "pthread" not in run.stdout.split("reason=")[0], "a device that cannot compile is listed"


def test_a_driver_that_cannot_be_loaded_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken = tmp_path / "libbroken.so"
    broken.write_text("no library", encoding="utf-8")
    monkeypatch.setattr(icd, "libraries", lambda: [str(broken), "libpocl.so.2"])
    monkeypatch.delenv(icd.VENDORS, raising=False)
    with icd.all_drivers():
        named = [file.read_text(encoding="utf-8") for file in Path(os.environ[icd.VENDORS]).iterdir()]
    assert named == ["libpocl.so.2\n"]
    assert f"the OpenCL driver {broken} cannot be loaded" in caplog.text
