"""Which backend and device a user's words mean, and what is said of backends that cannot be used."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from noria.api.errors import BackendNotFound, BackendUnavailable, ConfigError, PluginApiMismatch, PluginLoadError
from noria.plugins import BackendRegistry, BackendStatus, PluginManager
from noria.plugins.config import parse_config

BackendModule = Callable[..., str]
MakeDist = Callable[..., None]

NOTHING = 'return ProbeResult(reason="there is no gizmo", hint="{hint}")'


def registry_of(timeout_s: float = 30.0, **tables: Any) -> BackendRegistry:
    return BackendRegistry(PluginManager(parse_config(tables, path=Path("test.toml"))), probe_timeout_s=timeout_s)


@pytest.fixture
def gpus(make_dist: MakeDist, backend_module: BackendModule) -> None:
    """Three backends that `auto` prefers to all installed ones: the first has no device, the second has two."""
    two = "return ProbeResult(devices=(device(0), device(1)))"
    make_dist("none", none=backend_module("none", priority=1003, probe=NOTHING.format(hint="Buy one.")))
    make_dist("twin", twin=backend_module("twin", priority=1002, probe=two, aliases=("double",)))
    make_dist("solo", solo=backend_module("solo", priority=1001))


def ids(registry: BackendRegistry, selection: str) -> list[str]:
    return [device.id for device in registry.resolve(selection)]


def test_names_follow_order_then_priority(gpus: None) -> None:
    assert registry_of().names()[:3] == ["none", "twin", "solo"]
    assert registry_of(plugins={"order": ["solo", "double"]}).names()[:3] == ["solo", "twin", "none"]


@pytest.mark.parametrize(
    ("selection", "expected"),
    [
        ("auto", ["twin0"]),
        ("twin", ["twin0"]),
        ("double", ["twin0"]),
        ("twin1", ["twin1"]),
        ("double1", ["twin1"]),
        ("twin1,solo0", ["twin1", "solo0"]),
        ("solo, twin0", ["solo0", "twin0"]),
        ("reference", ["reference0"]),
    ],
)
def test_selection(selection: str, expected: list[str], gpus: None) -> None:
    assert ids(registry_of(), selection) == expected


def test_selection_follows_plugins_toml(gpus: None) -> None:
    assert ids(registry_of(plugins={"order": ["solo"]}), "auto") == ["solo0"]
    assert ids(registry_of(backends={"twin": {"device": 1}}), "auto") == ["twin1"]
    assert ids(registry_of(backends={"twin": {"device": 1}}), "twin") == ["twin1"]
    assert ids(registry_of(backends={"twin": {"enabled": False}}), "auto") == ["solo0"]


CPU_AND_GPU = "return ProbeResult(devices=(device(0, DeviceKind.CPU), device(1)))"
CPU_ALONE = "return ProbeResult(devices=(device(0, DeviceKind.CPU),))"


@pytest.mark.parametrize(
    ("probe", "least", "model_nbytes", "expected"),
    [
        (CPU_AND_GPU, 100, 99, "many1"),
        (CPU_ALONE, 100, None, "many0"),
        (CPU_ALONE, 100, 100, "many0"),
        (CPU_ALONE, 100, 99, "slow0"),
        (CPU_ALONE, None, None, "slow0"),
    ],
)
def test_auto_on_a_cpu(
    make_dist: MakeDist,
    backend_module: BackendModule,
    probe: str,
    least: int | None,
    model_nbytes: int | None,
    expected: str,
) -> None:
    """A GPU first; then the CPU by a GPU backend that is fast there, unless the model is too small for it."""
    make_dist("many", many=backend_module("many", probe=probe, cpu_from_nbytes=least, priority=1002))
    make_dist("slow", slow=backend_module("slow", probe=CPU_ALONE, kind="CPU", priority=1001))
    (info,) = registry_of().resolve("auto", model_nbytes)
    assert info.id == expected


@pytest.mark.parametrize("selection", ["auto", "twin"])
def test_a_configured_device_that_is_not_there(gpus: None, selection: str) -> None:
    registry = registry_of(backends={"twin": {"device": 7}})
    message = r"test\.toml: backends\.twin\.device: there is no device 7\. There are: twin0, twin1\."
    with pytest.raises(ConfigError, match=message):
        registry.resolve(selection)
    assert ids(registry, "twin1") == ["twin1"]


def test_auto_prefers_a_discrete_gpu_and_never_takes_another_kind_of_device_for_one(
    make_dist: MakeDist, backend_module: BackendModule
) -> None:
    shared = "return ProbeResult(devices=(device(0, DeviceKind.CPU), device(1, DeviceKind.INTEGRATED)))"
    make_dist("igpu", igpu=backend_module("igpu", priority=1002, probe=shared))
    assert ids(registry_of(), "auto") == ["igpu1"]
    make_dist("card", card=backend_module("card", priority=1001))
    assert ids(registry_of(), "auto") == ["card0"]


def test_auto_without_a_gpu_is_the_reference() -> None:
    registry = BackendRegistry(PluginManager(external=False))
    assert ids(registry, "auto") == ["reference0"]


def test_auto_with_nothing_says_why() -> None:
    disabled = parse_config({"backends": {"reference": {"enabled": False}}}, path=Path("test.toml"))
    registry = BackendRegistry(PluginManager(disabled, external=False))
    with pytest.raises(BackendUnavailable, match=r"reference: backends\.reference\.enabled is false in test\.toml"):
        registry.resolve("auto")


@pytest.mark.parametrize(
    ("selection", "error", "text"),
    [
        ("twni", BackendNotFound, "no backend or device 'twni'; there are: .*twin.* Did you mean 'twin'?"),
        ("twni1", BackendNotFound, "Did you mean 'twin'?"),
        ("twin2", BackendNotFound, "no backend or device 'twin2'; there are: twin0, twin1"),
        ("none", BackendUnavailable, "backend 'none' cannot be used here: there is no gizmo. Buy one."),
        ("none0", BackendUnavailable, "there is no gizmo"),
        ("twin0,double0", ConfigError, "names twin0 twice"),
        ("twin0,", ConfigError, "has an empty entry"),
        ("", ConfigError, "has an empty entry"),
        ("auto,twin", BackendNotFound, "no backend or device 'auto'"),
    ],
)
def test_a_wrong_selection(selection: str, error: type[Exception], text: str, gpus: None) -> None:
    with pytest.raises(error, match=text):
        registry_of().resolve(selection)


def test_a_backend_whose_plugin_is_not_loaded(make_dist: MakeDist) -> None:
    make_dist("lostdist", lost="raise OSError('liblost.so is missing')")
    with pytest.raises(BackendUnavailable, match=r"its plugin is not loaded \(OSError: liblost\.so is missing\)"):
        registry_of().resolve("lost0")
    with pytest.raises(BackendUnavailable, match=r"its plugin is not loaded \(named in plugins\.disabled of"):
        registry_of(plugins={"disabled": ["lost"]}).resolve("lost")


def test_open_gets_complete_options(gpus: None) -> None:
    registry = registry_of(backends={"twin": {"device": 1, "options": {"level": 5}}})
    assert registry.open("double0") == ("twin", 0, {"level": 5, "mode": "a"})  # type: ignore[comparison-overlap]
    assert registry.open("twin") == ("twin", 1, {"level": 5, "mode": "a"})  # type: ignore[comparison-overlap]
    with pytest.raises(BackendUnavailable, match="there is no gizmo"):
        registry.open("none0")


# --- reports ---------------------------------------------------------------------------------------------------------


def test_reports(gpus: None) -> None:
    registry = registry_of(backends={"solo": {"enabled": False}})
    reports = {report.name: report for report in registry.probe_all()}
    assert list(reports) == registry.names()
    assert (reports["none"].status, reports["none"].dist) == (BackendStatus.UNUSABLE, "none 1.0")
    assert reports["twin"].status is BackendStatus.USABLE
    assert reports["solo"].status is BackendStatus.DISABLED
    assert "backends.solo.enabled is false" in reports["solo"].probe.reason
    assert registry.report("double") is reports["twin"]


def test_the_requirement_is_the_hint_where_probe_has_none(make_dist: MakeDist, backend_module: BackendModule) -> None:
    make_dist("bare", bare=backend_module("bare", probe=NOTHING.format(hint=""), extra="noria-bare[driver]"))
    assert registry_of().report("bare").probe.hint == "Try: pip install 'noria-bare[driver]'"


FAULTS = {
    "raises": ("raise RuntimeError('driver gone')", r"its probe raised RuntimeError: driver gone"),
    "exits": ("raise SystemExit(1)", r"its probe raised SystemExit: 1"),
    "wrong": ("return [device()]", r"its probe returned \[.*\], which is no ProbeResult"),
}


@pytest.mark.parametrize("case", FAULTS)
def test_a_faulty_probe_is_a_reason(case: str, make_dist: MakeDist, backend_module: BackendModule) -> None:
    probe, reason = FAULTS[case]
    make_dist("faultydist", "0.3", faulty=backend_module("faulty", priority=2000, probe=probe))
    make_dist("solo", solo=backend_module("solo", priority=1000))
    registry = registry_of()
    assert registry.report("faulty").status is BackendStatus.FAILED
    assert registry.report("faulty").probe.hint == "This is a fault of faultydist 0.3; tell its authors."
    with pytest.raises(BackendUnavailable, match=reason):
        registry.resolve("faulty")
    assert ids(registry, "auto") == ["solo0"]


def test_a_hanging_probe_is_left_behind(make_dist: MakeDist, backend_module: BackendModule) -> None:
    source = "import threading\nreleased = threading.Event()\n" + backend_module("stuck", probe="released.wait(60)")
    make_dist("stuckdist", stuck=source)
    registry = registry_of(timeout_s=0.05)
    start = time.monotonic()
    report = registry.report("stuck")
    assert time.monotonic() - start < 10
    assert (report.status, report.probe.reason) == (BackendStatus.FAILED, "its probe did not return within 0.05 s")
    sys.modules["stuckdist_stuck_plugin"].released.set()


def test_another_api_version_is_a_reason(make_dist: MakeDist, backend_module: BackendModule) -> None:
    make_dist("olddist", old=backend_module("old", api_version=(0, 0), priority=1000))
    registry = registry_of()
    report = registry.report("old")
    assert report.status is BackendStatus.FAILED
    assert "was written for noria API 0.0, this noria has 0.1" in report.probe.reason
    with pytest.raises(PluginApiMismatch):
        registry.backend("old")


def test_a_backend_that_cannot_be_made_is_a_reason(make_dist: MakeDist, backend_module: BackendModule) -> None:
    source = backend_module("unmade").replace("factory=FakeBackend", "factory=lambda: __import__('no_such_driver')")
    make_dist("unmadedist", unmade=source)
    registry = registry_of()
    assert registry.report("unmade").status is BackendStatus.FAILED
    assert "No module named 'no_such_driver'" in registry.report("unmade").probe.reason
    with pytest.raises(PluginLoadError, match=r"unmadedist 1\.0"):
        registry.backend("unmade")


def test_a_backend_is_made_and_probed_once(make_dist: MakeDist, backend_module: BackendModule) -> None:
    probe = "self.probes = getattr(self, 'probes', 0) + 1; return ProbeResult(devices=(device(),))"
    make_dist("oncedist", once=backend_module("once", probe=probe))
    registry = registry_of()
    for _ in range(3):
        registry.resolve("once")
        registry.probe_all()
    assert registry.backend("once") is registry.backend("once")
    assert registry.backend("once").probes == 1  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["vulkan"])
def test_backends_that_are_not_built_say_so(name: str) -> None:
    registry = registry_of()
    report = registry.report(name)
    assert report.status is BackendStatus.UNUSABLE
    assert "not built yet" in report.probe.reason
    assert f"noria[{report.name}]" in report.probe.hint
    with pytest.raises(BackendUnavailable, match="not built yet"):
        registry.backend(name).open(0, registry.options(name))
