"""Distributions that are not installed but lie on sys.path as if they were: a module and its dist-info."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent

import pytest

MakeDist = Callable[..., None]

collect_ignore = ["acme"]  # a distribution of its own: test_acme installs it and runs its tests

BACKEND = """
from noria.api import Backend, DeviceInfo, DeviceKind, OptionSpec, ProbeResult
from noria.plugins import BackendSpec, hookimpl


def device(index=0, kind=DeviceKind.GPU):
    return DeviceInfo(backend="{name}", index=index, name="a device", kind=kind)


class FakeBackend(Backend):
    name = "{name}"
    api_version = {api_version}

    def probe(self, options):
        {probe}

    def open(self, index, options):
        return (self.name, index, options)


@hookimpl
def noria_backends():
    yield BackendSpec(
        name="{name}",
        factory=FakeBackend,
        summary="for tests",
        kind=DeviceKind.{kind},
        cpu_from_nbytes={cpu_from_nbytes},
        priority={priority},
        aliases={aliases},
        extra="{extra}",
        options={{"level": OptionSpec(default=3, help="a number"),
                  "mode": OptionSpec(default="a", help="a word", choices=("a", "b"))}},
    )
"""


@pytest.fixture
def backend_module() -> Callable[..., str]:
    """Source of a plugin module with one backend."""

    def source(
        name: str,
        *,
        probe: str = "return ProbeResult(devices=(device(),))",
        kind: str = "GPU",
        cpu_from_nbytes: int | None = None,
        priority: int = 0,
        aliases: tuple[str, ...] = (),
        extra: str = "",
        api_version: tuple[int, int] = (0, 1),
    ) -> str:
        values = {"name": name, "probe": probe, "kind": kind, "priority": priority, "aliases": aliases}
        return BACKEND.format(extra=extra, api_version=api_version, cpu_from_nbytes=cpu_from_nbytes, **values)

    return source


@pytest.fixture
def make_dist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeDist]:
    """Put a distribution on sys.path: `make_dist("acme", "1.0", plugin_name=source, ...)`.

    Each plugin becomes a module of its own with an entry point.
    """
    modules: list[str] = []

    def make(dist: str, version: str = "1.0", **plugins: str) -> None:
        root = tmp_path / dist
        info = root / f"{dist}-{version}.dist-info"
        info.mkdir(parents=True)
        entries = []
        for plugin, source in plugins.items():
            module = f"{dist}_{plugin}_plugin"
            (root / f"{module}.py").write_text(dedent(source), encoding="utf-8")
            entries.append(f"{plugin} = {module}")
            modules.append(module)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist}\nVersion: {version}\n", encoding="utf-8")
        (info / "entry_points.txt").write_text("\n".join(["[noria.plugins]", *entries]), encoding="utf-8")
        monkeypatch.syspath_prepend(root)

    yield make
    for module in modules:
        sys.modules.pop(module, None)
