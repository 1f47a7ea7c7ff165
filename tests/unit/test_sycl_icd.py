"""Where OpenCL drivers are found, without loading one."""

import os
from pathlib import Path

import pytest

from noria_sycl import icd


@pytest.fixture
def prefix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment, and a system without drivers, that are looked at instead of the real ones."""
    monkeypatch.setattr(icd, "_SYSTEM", tmp_path / "system")
    monkeypatch.setattr(icd, "_prefixes", lambda: [tmp_path / "env"])
    monkeypatch.delenv(icd.VENDORS, raising=False)
    return tmp_path / "env"


def name(folder: Path, file: str, library: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / file).write_text(library, encoding="utf-8")


def library(prefix: Path, file: str) -> str:
    (prefix / "lib").mkdir(parents=True, exist_ok=True)
    (prefix / "lib" / file).touch()
    return str(prefix / "lib" / file)


def test_a_path_of_another_machine_is_looked_for_in_the_environment(prefix: Path) -> None:
    """As in Intel's wheel, which also names a library that it does not have."""
    vendors = prefix / "etc" / "OpenCL" / "vendors"
    name(vendors, "intel-cpu.icd", "/placeholder/lib/libintelocl.so\n")
    name(vendors, "intel-fpga_emu.icd", "/placeholder/lib/libintelocl_emu.so\n")
    path = library(prefix, "libintelocl.so")
    assert icd.libraries() == [path]


def test_the_system_comes_first_and_a_driver_once(prefix: Path) -> None:
    name(icd._SYSTEM, "pocl.icd", "libpocl.so.2\n")
    name(icd._SYSTEM, "nvidia.icd", "libnvidia-opencl.so.1\n")
    name(prefix / "etc" / "OpenCL" / "vendors", "pocl.icd", library(prefix, "libpocl.so"))
    assert icd.libraries() == ["libnvidia-opencl.so.1", "libpocl.so.2"]


@pytest.mark.parametrize("content", [b"", b"\n", b"\xff\xfe\x00", b"/gone/libx.so\n"])
def test_a_file_that_names_nothing_is_passed_over(prefix: Path, content: bytes) -> None:
    name(icd._SYSTEM, "bad.icd", "")
    (icd._SYSTEM / "bad.icd").write_bytes(content)
    assert icd.libraries() == []


def test_the_loader_sees_them_and_nobody_else_does(prefix: Path) -> None:
    name(icd._SYSTEM, "pocl.icd", "libpocl.so.2\n")
    with icd.all_drivers():
        folder = Path(os.environ[icd.VENDORS])
        assert [file.read_text(encoding="utf-8") for file in folder.iterdir()] == ["libpocl.so.2\n"]
    assert icd.VENDORS not in os.environ
    assert not folder.exists()


def test_what_the_user_has_set_stays(prefix: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(icd.VENDORS, "/chosen")
    with icd.all_drivers():
        assert os.environ[icd.VENDORS] == "/chosen"
    assert os.environ[icd.VENDORS] == "/chosen"
