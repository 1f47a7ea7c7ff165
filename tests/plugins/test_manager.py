"""Loading plugins: whatever one of them does, the others load."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from noria.api.errors import ConfigError, PluginConflict
from noria.plugins import Config, PluginManager, PluginRecord, PluginStatus
from noria.plugins.config import parse_config

BackendModule = Callable[..., str]
MakeDist = Callable[..., None]

ARCHITECTURE = """
from noria.plugins import ArchitectureSpec, hookimpl

@hookimpl
def noria_architectures():
    yield ArchitectureSpec(name="{name}", build=lambda: None, summary="for tests")
"""


def config_of(**plugins: object) -> Config:
    return parse_config({"plugins": plugins}, path=Path("test.toml"))


def record_of(manager: PluginManager, name: str) -> PluginRecord:
    [record] = [record for record in manager.records if record.name == name]
    return record


def test_what_comes_with_the_core() -> None:
    manager = PluginManager(external=False)
    assert {"reference", "sim"} == set(manager.backends)
    assert {"qwen3moe", "llama"} <= set(manager.architectures)
    assert [record.name for record in manager.records if record.status is PluginStatus.LOADED] == ["builtin", "models"]


def test_an_installed_plugin_is_found(make_dist: MakeDist, backend_module: BackendModule) -> None:
    make_dist("fakedist", "3.2", fake=backend_module("fake", aliases=("phony",)))
    manager = PluginManager()
    record = record_of(manager, "fake")
    assert (record.dist, record.status, record.hooks) == ("fakedist 3.2", PluginStatus.LOADED, ("noria_backends",))
    assert manager.backends["phony"] is manager.backends["fake"]
    assert "phony" not in list(manager.backends)
    assert manager.backends.dist("phony") == "fakedist 3.2"


IMPL = "from noria.plugins import hookimpl\n@hookimpl\n"
BROKEN = {  # what is wrong: (source, what the reason says)
    "import error": ("import no_such_module_anywhere", "No module named 'no_such_module_anywhere'"),
    "exits": ("import sys; sys.exit(3)", "SystemExit: 3"),
    "hook raises": (IMPL + "def noria_policies():\n    raise RuntimeError('no luck')", "RuntimeError: no luck"),
    "hook raises late": (ARCHITECTURE.format(name="half-done") + "    raise OSError('too late')", "OSError: too late"),
    "misspelled hook": (IMPL + "def noria_backend():\n    return []", "unknown hook 'noria_backend'"),
    "unknown argument": (IMPL + "def noria_backends(devices):\n    return []", "'devices'"),
    "not a record": (
        IMPL + "def noria_backends():\n    yield 'x'",
        "noria_backends yielded 'x', which is no BackendSpec",
    ),
    "not iterable": (IMPL + "def noria_backends():\n    return 5", "'int' object is not iterable"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_plugin_is_left_out_as_a_whole(
    case: str,
    make_dist: MakeDist,
    backend_module: BackendModule,
    caplog: pytest.LogCaptureFixture,
) -> None:
    source, reason = BROKEN[case]
    make_dist("brokendist", broken=source)
    make_dist("zdist", zlast=backend_module("zlast"))  # looked at after it
    manager = PluginManager()
    record = record_of(manager, "broken")
    assert record.status is PluginStatus.FAILED
    assert reason in record.reason
    [warning] = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert "plugin 'broken' of brokendist 1.0 failed to load" in warning
    assert reason in warning
    assert "half-done" not in manager.architectures
    assert "zlast" in manager.backends
    assert record_of(manager, "zlast").status is PluginStatus.LOADED


def test_a_bad_backend_name_is_refused(make_dist: MakeDist, backend_module: BackendModule) -> None:
    make_dist("baddist", bad=backend_module("gfx9"))
    manager = PluginManager()
    assert "cannot be named 'gfx9'" in record_of(manager, "bad").reason
    assert "gfx9" not in manager.backends


@pytest.mark.parametrize(
    ("config", "external", "reason"),
    [
        (config_of(disabled=["fake"]), True, "plugins.disabled"),
        (config_of(autoload=False), True, "plugins.autoload is false"),
        (Config(), False, "--no-external-plugins"),
    ],
)
def test_a_disabled_plugin_is_not_imported(config: Config, external: bool, reason: str, make_dist: MakeDist) -> None:
    make_dist("fakedist", fake="raise AssertionError('imported')")
    record = record_of(PluginManager(config, external=external), "fake")
    assert record.status is PluginStatus.DISABLED
    assert reason in record.reason
    assert "fakedist_fake_plugin" not in sys.modules


def test_two_backends_of_one_name(make_dist: MakeDist, backend_module: BackendModule) -> None:
    make_dist("onedist", "1.1", one=backend_module("gizmo"))
    make_dist("twodist", "2.2", two=backend_module("gadget", aliases=("gizmo",)))
    with pytest.raises(PluginConflict, match=r"backend 'gizmo' .* both onedist 1\.1 and twodist 2\.2"):
        PluginManager()
    assert "gizmo" in PluginManager(config_of(disabled=["two"])).backends


def test_two_architectures_of_one_name(make_dist: MakeDist) -> None:
    make_dist("onedist", "1.1", one=ARCHITECTURE.format(name="llama"))
    with pytest.raises(PluginConflict, match=r"architecture 'llama' .* both noria \S+ and onedist 1\.1"):
        PluginManager()


def test_two_plugins_of_one_name(make_dist: MakeDist, backend_module: BackendModule) -> None:
    make_dist("onedist", "1.1", same=backend_module("gizmo"))
    make_dist("twodist", "2.2", same=backend_module("gadget"))
    with pytest.raises(PluginConflict, match="plugin 'same'") as caught:
        PluginManager()
    assert {caught.value.first, caught.value.second} == {"onedist 1.1", "twodist 2.2"}


@pytest.mark.parametrize(("value", "logged"), [("1", True), ("0", False), ("", False)])
def test_hook_calls_are_traced(
    value: str,
    logged: bool,
    make_dist: MakeDist,
    backend_module: BackendModule,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    make_dist("fakedist", fake=backend_module("fake"))
    caplog.set_level(logging.NOTSET, "noria.plugins.trace")
    monkeypatch.setenv("NORIA_TRACE_PLUGINS", value)
    PluginManager()
    assert any(r.getMessage().startswith("fake: noria_backends() -> [BackendSpec(") for r in caplog.records) is logged


# --- names in plugins.toml -------------------------------------------------------------------------------------------


def test_a_table_for_an_unknown_backend(make_dist: MakeDist, backend_module: BackendModule) -> None:
    make_dist("fakedist", fake=backend_module("fake", aliases=("phony",)))
    with pytest.raises(ConfigError, match=r"test\.toml: backends\.faek: .* Did you mean 'fake'\?"):
        PluginManager(parse_config({"backends": {"faek": {}}}, path=Path("test.toml")))
    with pytest.raises(ConfigError, match=r"backends\.phony: an alias; write backends\.fake"):
        PluginManager(parse_config({"backends": {"phony": {}}}, path=Path("test.toml")))


def test_a_table_for_a_backend_whose_plugin_failed(make_dist: MakeDist, caplog: pytest.LogCaptureFixture) -> None:
    make_dist("fakedist", fake="raise ImportError('no driver')")
    PluginManager(parse_config({"backends": {"fake": {}, "other": {}}}, path=Path("test.toml")))
    messages = [record.getMessage() for record in caplog.records]
    assert not any("backends.fake" in message for message in messages)
    assert any("backends.other: no installed plugin offers this backend" in message for message in messages)


@pytest.mark.parametrize(("key", "kind"), [("disabled", "plugin"), ("order", "backend")])
def test_an_unknown_name_in_a_list(
    key: str, kind: str, make_dist: MakeDist, backend_module: BackendModule, caplog: pytest.LogCaptureFixture
) -> None:
    make_dist("fakedist", fake=backend_module("fake", aliases=("phony",)))
    PluginManager(config_of(**{key: ["fkae", "fake"]}))
    [warning] = [record.getMessage() for record in caplog.records]
    assert f"plugins.{key}: no {kind} is named 'fkae'. Did you mean 'fake'?" in warning
    caplog.clear()
    PluginManager(config_of(order=["phony"]))
    assert not caplog.records


@pytest.mark.parametrize("key", ["disabled", "order"])
def test_an_unknown_name_without_a_near_one(
    key: str, make_dist: MakeDist, backend_module: BackendModule, caplog: pytest.LogCaptureFixture
) -> None:
    make_dist("fakedist", fake=backend_module("fake"))
    PluginManager(config_of(**{key: ["zzz"]}))
    [warning] = [record.getMessage() for record in caplog.records]
    assert "is named 'zzz'. There are: " in warning
    assert "fake" in warning


def test_the_nearest_name_may_be_one_that_is_not_loaded(make_dist: MakeDist, caplog: pytest.LogCaptureFixture) -> None:
    make_dist("fakedist", gizmo="raise AssertionError('imported')")
    PluginManager(config_of(order=["gizom"], disabled=["gizmo"]))
    [warning] = [record.getMessage() for record in caplog.records]
    assert "plugins.order: no backend is named 'gizom'. Did you mean 'gizmo'?" in warning


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("builtin", "Remove it"),
        ("models", "Remove it"),
        ("llama", "Remove it"),
        ("reference", r"enabled = false in \[backends\.reference\]"),
        ("cpu", r"enabled = false in \[backends\.reference\]"),
        ("sim", r"enabled = false in \[backends\.sim\]"),
    ],
)
def test_what_comes_with_the_core_cannot_be_disabled(name: str, hint: str) -> None:
    config = parse_config({"plugins": {"disabled": [name]}}, path=Path("test.toml"))
    with pytest.raises(ConfigError, match=rf"test\.toml: plugins\.disabled: '{name}' comes with noria .*{hint}"):
        PluginManager(config)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"levle": 1}, r"backends\.fake\.options\.levle: unknown key\. Did you mean 'level'\?"),
        ({"level": "1"}, r"backends\.fake\.options\.level: must be a whole number, not '1'"),
        ({"level": True}, r"backends\.fake\.options\.level: must be a whole number, not True"),
        ({"mode": "c"}, r"backends\.fake\.options\.mode: must be one of a, b, not 'c'"),
    ],
)
def test_options_are_those_of_the_spec(
    options: dict[str, object], text: str, make_dist: MakeDist, backend_module: BackendModule
) -> None:
    make_dist("fakedist", fake=backend_module("fake"))
    with pytest.raises(ConfigError, match=text):
        PluginManager(parse_config({"backends": {"fake": {"options": options}}}, path=Path("test.toml")))


# --- noria_configure -------------------------------------------------------------------------------------------------

CONFIGURE = """
from noria.plugins import ConfigDefault, hookimpl

@hookimpl
def noria_configure(config):
    assert config.policy.prefetch
    yield ConfigDefault(key="{key}", value={value!r}, why="for tests")
"""


def test_a_plugin_changes_a_default(make_dist: MakeDist, backend_module: BackendModule) -> None:
    make_dist("fakedist", fake=backend_module("fake"))
    make_dist("sitedist", site=CONFIGURE.format(key="backends.fake.options.level", value=7))
    assert PluginManager().config.backend("fake").options == {"level": 7}


def test_the_file_wins_over_a_plugin(make_dist: MakeDist) -> None:
    make_dist("sitedist", site=CONFIGURE.format(key="policy.prefetch_slots", value=9))
    assert PluginManager().config.policy.prefetch_slots == 9
    written = parse_config({"policy": {"prefetch_slots": 4}}, path=Path("test.toml"))
    assert PluginManager(written).config.policy.prefetch_slots == 4


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("policy.prefetch_slot", 9, "Did you mean 'prefetch_slots'?"),
        ("policy.prefetch_slots", "9", "must be a whole number"),
        ("policy.prefetch_slots", 1, "must be 2 to 64"),
        ("policy.prefetch", "bogus", "there is no policy 'bogus'"),
        ("plugins.disabled", "fake", "in 'backends' and 'policy' only"),
        ("backends.fake.options.mode", "c", "must be one of a, b"),
    ],
)
def test_an_impossible_default_is_a_warning(
    key: str,
    value: object,
    text: str,
    make_dist: MakeDist,
    backend_module: BackendModule,
    caplog: pytest.LogCaptureFixture,
) -> None:
    make_dist("fakedist", fake=backend_module("fake"))
    make_dist("sitedist", site=CONFIGURE.format(key=key, value=value))
    assert PluginManager().config == Config()
    [warning] = [record.getMessage() for record in caplog.records]
    assert "plugin 'site' (sitedist 1.0)" in warning
    assert text in warning


def test_an_order_that_auto_cannot_follow_is_said(caplog: pytest.LogCaptureFixture) -> None:
    PluginManager(config_of(order=["sim"]))
    [warning] = [record.getMessage() for record in caplog.records]
    assert "plugins.order: auto never takes 'sim'" in warning
