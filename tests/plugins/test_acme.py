"""A backend by somebody else, installed with pip, found by its entry point, and run through the conformance kit."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from noria.api import BufferUsage
from noria.api.errors import OutOfDeviceMemory
from noria.plugins import BackendRegistry, PluginManager
from noria.plugins.config import parse_config

ACME = Path(__file__).parent / "acme"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the installed distribution, and its sources beside it as `src`."""
    for tool in ("pip", "hatchling"):
        if find_spec(tool) is None:
            pytest.skip(f"needs {tool}")
    root = tmp_path_factory.mktemp("acme")
    shutil.copytree(ACME, root / "src", ignore=shutil.ignore_patterns(".*", "__pycache__"))
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--target", str(root / "site"), str(root / "src")], check=True)
    yield root
    for name in [name for name in sys.modules if name.partition(".")[0] == "noria_acme"]:
        del sys.modules[name]


def test_it_is_found_and_opened(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(installed / "site")
    config = parse_config({"backends": {"acme": {"options": {"memory_mib": 3}}}})
    plugins = PluginManager(config)
    assert ("acme", "noria-acme 1.2.0") in [(record.name, record.dist) for record in plugins.records]
    registry = BackendRegistry(plugins)
    assert [device.id for device in registry.resolve("acme")] == ["acme0"]
    with registry.open("acme0") as device:
        device.alloc(2 << 20, usage=BufferUsage.WEIGHTS, label="fits")
        with pytest.raises(OutOfDeviceMemory, match=r"acme0: cannot allocate too much \(2\.0 MiB; 1\.0 of 3\.0 MiB"):
            device.alloc(2 << 20, usage=BufferUsage.WEIGHTS, label="too much")


def test_it_passes_the_conformance_kit(installed: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(installed / "site")}
    pytest_command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_conformance.py"]
    run = subprocess.run(pytest_command, cwd=installed / "src", env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-4000:]
    n_passed = re.search(r"(\d+) passed", run.stdout)
    assert n_passed is not None
    assert int(n_passed[1]) > 100, run.stdout[-4000:]


def test_it_needs_the_contract_and_the_plugin_records_only() -> None:
    imported = set()
    for path in (ACME / "noria_acme").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module:
                imported.add(".".join(node.module.split(".")[:2]))
            elif isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
    ours = {name for name in imported if name.partition(".")[0] == "noria"}
    assert ours == {"noria.api", "noria.plugins"}
