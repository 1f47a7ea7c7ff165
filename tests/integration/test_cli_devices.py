"""`noria devices`: every backend with its devices, or why there are none."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from noria.api import API_VERSION, Backend, DeviceKind, ProbeResult
from noria.api.errors import DeviceError
from noria.builtin.sim import SimBackend
from noria.plugins import BackendSpec, hookimpl

Noria = Callable[..., Any]


class AbsentBackend(Backend):
    name = "absent"
    api_version = API_VERSION

    def probe(self, options: Any) -> ProbeResult:
        return ProbeResult(reason="no driver was found", hint="Install the driver, version 550 or newer.")

    def open(self, index: int, options: Any) -> Any:
        raise AssertionError("it has no devices")


@pytest.fixture
def plugins(noria: Noria, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two installed plugins: one whose backend finds no device, one that cannot be imported."""
    good, bad = ModuleType("absent_plugin"), "broken_plugin_that_is_not_there"

    @hookimpl
    def noria_backends() -> list[BackendSpec]:
        return [BackendSpec(name="absent", factory=AbsentBackend, summary="a GPU of old", kind=DeviceKind.GPU)]

    good.noria_backends = noria_backends  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, good.__name__, good)
    entries = [EntryPoint("absent", good.__name__, "noria.plugins"), EntryPoint("broken", bad, "noria.plugins")]
    monkeypatch.setattr("noria.plugins.manager.entry_points", lambda group: entries)


def rows(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]


def test_the_table(noria: Noria) -> None:
    result = noria("devices")
    assert result.code == 0
    head, _, *devices = rows(result.out)
    assert head == ["device", "name", "kind", "memory", "arch", "driver", "status"]
    by_id = {row[0]: row for row in devices}
    assert by_id["reference0"][2] == "cpu"
    assert by_id["sim0"][2:5] == ["simulated", "12.00 GiB", "rtx3060-gen4"]
    assert {row[-1] for row in devices} == {"usable"}
    assert max(map(len, result.out.splitlines())) <= 120
    assert "--backend auto: reference0" in result.out
    assert "plugins.toml: none; these are defaults" in result.out
    assert "KV types" not in result.out


def test_what_cannot_be_used_has_a_reason_and_a_remedy(noria: Noria, plugins: None) -> None:
    text = noria("devices").out
    assert ["absent", "", "gpu", "", "", "", "unusable"] in rows(text)
    flat = " ".join(text.split())
    assert "absent (a GPU of old), unusable: no driver was found. Install the driver, version 550 or newer." in flat
    assert "plugin 'broken' of an unknown distribution, failed: ModuleNotFoundError" in flat
    assert "--backend auto: reference0" in text


def test_plugins_toml_is_named_and_obeyed(noria: Noria, plugins: None, tmp_path: Path) -> None:
    toml = tmp_path / "mine.toml"
    toml.write_text('[plugins]\ndisabled = ["broken"]\n[backends.sim]\nenabled = false\n')
    text = noria("devices", "--plugins", toml).out
    flat = " ".join(text.split())
    assert f"plugins.toml: {toml} (--plugins)" in flat
    assert "plugin 'broken' of an unknown distribution, disabled: " in flat
    assert f"in plugins.disabled of {toml}" in flat
    assert f"disabled: backends.sim.enabled is false in {toml}. Set it to true." in flat
    assert "sim0" not in text


def test_capabilities(noria: Noria) -> None:
    text = noria("devices", "--caps").out
    head = ["device", "act", "KV types", "queues", "capabilities"]
    table = rows(text)
    caps = {row[0]: dict(zip(head, row, strict=True)) for row in table[table.index(head) + 2 :]}
    assert caps["sim0"]["act"] == "F16"
    assert caps["sim0"]["KV types"] == "F32 F16 Q8_0 Q4_0"
    assert {"gather", "device wait"} <= set(caps["sim0"]["capabilities"].split(", "))
    assert max(map(len, text.splitlines())) <= 120


def test_json(noria: Noria, plugins: None) -> None:
    described = noria("devices", "-o", "json").json()
    assert (described["plugins_toml"], described["found_by"], described["auto"]) == (None, "defaults", "reference0")
    backends = {backend["name"]: backend for backend in described["backends"]}
    assert backends["absent"]["status"] == "unusable"
    assert backends["absent"]["reason"] == "no driver was found"
    assert backends["absent"]["remedy"] == "Install the driver, version 550 or newer."
    sim0 = backends["sim"]["devices"][0]
    assert (sim0["id"], sim0["memory_nbytes"], sim0["caps"]["copy_queues"]) == ("sim0", 12 * 2**30, 2)
    status = {plugin["name"]: plugin["status"] for plugin in described["plugins"]}
    assert status == {"builtin": "loaded", "models": "loaded", "absent": "loaded", "broken": "failed"}


def test_a_device_that_does_not_open_is_still_listed(noria: Noria, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: SimBackend, index: int, options: Any) -> Any:
        raise DeviceError(f"sim{index}", "is busy")

    monkeypatch.setattr(SimBackend, "open", refuse)
    backends = {backend["name"]: backend for backend in noria("devices", "-o", "json").json()["backends"]}
    assert [(d["id"], d["caps"], d["error"]) for d in backends["sim"]["devices"]] == [
        ("sim0", None, "sim0: is busy"),
        ("sim1", None, "sim1: is busy"),
    ]
    assert backends["reference"]["devices"][0]["caps"] is not None
    text = noria("devices", "--caps").out
    assert "sim1: is busy" in text
