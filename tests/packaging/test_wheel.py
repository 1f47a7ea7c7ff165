"""The wheel holds what a user needs and nothing else, and importing it costs nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from configparser import ConfigParser
from email import message_from_string
from email.message import Message
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "noria": ROOT / "core/noria",
    "noria_cuda": ROOT / "backends/cuda/noria_cuda",
    "noria_vulkan": ROOT / "backends/vulkan/noria_vulkan",
    "noria_sycl": ROOT / "backends/sycl/noria_sycl",
}
GPU_LIBRARIES = ("torch", "cupy", "vulkan", "kp", "pyopencl", "dpctl")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, as `pip install .` would build it."""
    out = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)]
    run = subprocess.run(build, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    (path,) = out.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def names(wheel: Path) -> set[str]:
    with ZipFile(wheel) as archive:
        return set(archive.namelist())


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel's content, as it lies in site-packages."""
    folder = tmp_path_factory.mktemp("site")
    with ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def dist_info(wheel: Path, name: str) -> str:
    with ZipFile(wheel) as archive:
        (path,) = [n for n in archive.namelist() if n.endswith(f".dist-info/{name}")]
        return archive.read(path).decode()


def metadata(wheel: Path) -> Message:
    return message_from_string(dist_info(wheel, "METADATA"))


# --- content ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("package", list(PACKAGES))
def test_every_file_of_a_package_is_in_it(package: str, names: set[str]) -> None:
    """Code, types marker, and data: the demo model, profiles, kernels in cu/, shaders/ and cl/."""
    folder = PACKAGES[package]
    files = {
        f"{package}/{path.relative_to(folder).as_posix()}"
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert f"{package}/py.typed" in files
    assert files == {name for name in names if name.startswith(f"{package}/")}


def test_data_that_commands_need_is_in_it(names: set[str]) -> None:
    assert {"noria/data/demo-q4_k_m.gguf", "noria/builtin/sim/profiles.toml"} <= names


def test_nothing_else_is_in_it(names: set[str]) -> None:
    assert {name.partition("/")[0] for name in names} == {*PACKAGES, f"noria-{PROJECT['version']}.dist-info"}
    assert [name for name in names if "test_" in name or "__pycache__" in name] == []


# --- metadata ---------------------------------------------------------------------------------------------------------


def test_entry_points(wheel: Path) -> None:
    parser = ConfigParser()
    parser.read_string(dist_info(wheel, "entry_points.txt"))
    assert dict(parser["console_scripts"]) == {"noria": "noria.cli.main:main"}
    assert dict(parser["noria.plugins"]) == {name: f"noria_{name}.plugin" for name in ("cuda", "vulkan", "sycl")}


def test_requirements(wheel: Path) -> None:
    data = metadata(wheel)
    assert data["Requires-Python"] == ">=3.11"
    assert set(data.get_all("Provides-Extra", [])) == {"cuda", "vulkan", "sycl", "test", "docs"}
    always = [line for line in data.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert [line for line in always if line.startswith(GPU_LIBRARIES)] == []
    assert len(always) == len(PROJECT["dependencies"])


def test_licence(wheel: Path) -> None:
    assert metadata(wheel)["License-Expression"] == "MIT"
    assert dist_info(wheel, "licenses/LICENSE") == (ROOT / "LICENSE").read_text(encoding="utf-8")


def test_readme_is_its_description(wheel: Path) -> None:
    assert metadata(wheel).get_payload() == (ROOT / "README.md").read_text(encoding="utf-8")


# --- importing --------------------------------------------------------------------------------------------------------


def python(site: Path, code: str) -> str:
    """What code prints in a fresh interpreter that sees the wheel's content before anything installed."""
    run = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(site)!r})\n{code}"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(run, cwd=site, env=environment, check=True, capture_output=True, text=True).stdout


def test_importing_brings_no_gpu_library(site: Path) -> None:
    """Nor does loading every plugin: their libraries wait until a backend is asked for."""
    code = f"""
import noria, noria.cli.main, noria.plugins
noria.plugins.PluginManager()
print(noria.__file__)
print([name for name in {GPU_LIBRARIES} if name in sys.modules])
print(sorted(name for name in sys.modules if name in ("noria_cuda.plugin", "noria_vulkan.plugin", "noria_sycl.plugin")))
"""
    where, gpu_libraries, plugins = python(site, code).splitlines()
    assert Path(where).is_relative_to(site)
    assert gpu_libraries == "[]"
    assert plugins == "['noria_cuda.plugin', 'noria_sycl.plugin', 'noria_vulkan.plugin']"


def test_importing_noria_is_quick(site: Path) -> None:
    """It brings in nothing: modules are counted, because time depends on the machine."""
    code = """
import importlib.metadata
before = set(sys.modules)
import noria
print(sorted(name for name in set(sys.modules) - before if name.partition(".")[0] not in sys.stdlib_module_names))
"""
    assert python(site, code).strip() == "['noria']"


def test_the_contract_needs_numpy_alone(site: Path) -> None:
    code = """
before = set(sys.modules)
import noria.api
new = {name.partition(".")[0] for name in set(sys.modules) - before}
print(sorted(new - set(sys.stdlib_module_names)))
"""
    assert python(site, code).strip() == "['noria', 'numpy']"
