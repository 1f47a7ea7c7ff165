"""plugins.toml: where it is found, and what is said about mistakes in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from noria.api.errors import ConfigError
from noria.plugins import Config, PluginManager, load_config
from noria.plugins.config import BackendTable, PluginsTable, PolicyTable, backend_options, parse_config

ROOT_FILE = Path(__file__).parents[2] / "plugins.toml"


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """The four places to look in, all empty; by the words of `Config.found_by`."""
    (tmp_path / "cwd").mkdir()
    (tmp_path / "home" / "noria").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "cwd")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("NORIA_PLUGINS", raising=False)
    return {
        "--plugins": tmp_path / "flag.toml",
        "$NORIA_PLUGINS": tmp_path / "environment.toml",
        "current folder": Path("plugins.toml"),
        "user folder": tmp_path / "home" / "noria" / "plugins.toml",
    }


def test_the_root_file_equals_the_defaults() -> None:
    config = load_config(ROOT_FILE)
    assert config.plugins == PluginsTable()
    assert config.policy == PolicyTable()
    specs = PluginManager(config).backends
    assert config.backends
    for name, table in config.backends.items():
        assert (table.enabled, table.device) == (BackendTable().enabled, BackendTable().device), name
        defaults = {option: spec.default for option, spec in specs[name].options.items()}
        assert backend_options(table, specs[name], "") == defaults, name


def test_the_first_file_found_counts_alone(places: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    order = list(places)
    for number, (found_by, path) in enumerate(places.items()):
        path.write_text(f"[policy]\nprefetch_slots = {number + 10}\n[backends.b{number}]\n", encoding="utf-8")
        assert order[number] == found_by
    monkeypatch.setenv("NORIA_PLUGINS", str(places["$NORIA_PLUGINS"]))
    for number, found_by in enumerate(order):
        config = load_config(places["--plugins"] if found_by == "--plugins" else None)
        assert (config.found_by, config.path) == (found_by, places[found_by])
        assert config.policy.prefetch_slots == number + 10
        assert list(config.backends) == [f"b{number}"]
        if found_by == "$NORIA_PLUGINS":
            monkeypatch.delenv("NORIA_PLUGINS")
        elif found_by != "--plugins":
            places[found_by].unlink()
    assert load_config() == Config()
    assert (load_config().found_by, load_config().path) == ("defaults", None)


def test_a_named_file_must_exist(places: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"flag\.toml \(from --plugins\) cannot be read: No such file"):
        load_config(places["--plugins"])
    monkeypatch.setenv("NORIA_PLUGINS", str(places["$NORIA_PLUGINS"]))
    with pytest.raises(ConfigError, match=r"environment\.toml \(from \$NORIA_PLUGINS\) cannot be read"):
        load_config()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = = 1", r"not valid TOML: .*line 1"),
        ("schema = 2", "schema is 2; this version of noria reads schema 1"),
        ("[plugin]", r"plugin: unknown key\. Did you mean 'plugins'\?"),
        ("[plugins]\nautolaod = true", r"plugins\.autolaod: unknown key\. Did you mean 'autoload'\?"),
        ("[plugins]\nzzz = true", r"plugins\.zzz: unknown key\. Known are: autoload, disabled, order\."),
        ("[plugins]\nautoload = 1", r"plugins\.autoload: must be true or false, not 1"),
        ("[plugins]\norder = 'cuda'", r"plugins\.order: must be a list of strings, not 'cuda'"),
        ("[plugins]\ndisabled = ['cuda', 1]", r"plugins\.disabled: must be a list of strings"),
        ("plugins = 3", r"plugins: must be a table, not 3"),
        ("[backends]\ncuda = true", r"backends\.cuda: must be a table, not True"),
        ("[backends.cuda]\ndevise = 1", r"backends\.cuda\.devise: unknown key\. Did you mean 'device'\?"),
        ("[backends.cuda]\ndevice = true", r"backends\.cuda\.device: must be a whole number, not True"),
        ("[backends.cuda]\ndevice = 1.0", r"backends\.cuda\.device: must be a whole number, not 1\.0"),
        ("[backends.reference]\ndevice = -1", r"backends\.reference\.device: must be 0 or more, not -1"),
        ("[policy]\nprefetch = 4", r"policy\.prefetch: must be a string, not 4"),
        ("[policy]\nprefetch_slots = 1", r"policy\.prefetch_slots: must be 2 to 64, not 1"),
        ("[policy]\nprefetch_slots = 65", r"policy\.prefetch_slots: must be 2 to 64, not 65"),
    ],
)
def test_mistakes_name_the_file_and_the_key(text: str, message: str, places: dict[str, Path]) -> None:
    path = places["current folder"]
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=rf"^plugins\.toml: {message}"):
        load_config()


def test_a_file_that_is_not_text(places: dict[str, Path]) -> None:
    places["current folder"].write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"plugins\.toml: not valid TOML"):
        load_config()


def test_a_folder_of_that_name_is_not_passed_over(places: dict[str, Path]) -> None:
    places["current folder"].mkdir()
    with pytest.raises(ConfigError, match=r"^plugins\.toml \(from current folder\) cannot be read: Is a directory"):
        load_config()


def test_a_whole_number_is_a_float_where_one_is_wanted() -> None:
    config = parse_config({"backends": {"sim": {"options": {"jitter": 1}}}})
    specs = PluginManager(config, external=False).backends
    jitter = backend_options(config.backend("sim"), specs["sim"], "")["jitter"]
    assert (jitter, type(jitter)) == (1.0, float)


def test_a_default_of_a_plugin_leaves_what_is_written() -> None:
    config = parse_config({"policy": {"prefetch": "off"}}, path=Path("some.toml"), found_by="--plugins")
    assert config.with_default("policy.prefetch", "whole", "a plugin") is config
    changed = config.with_default("policy.prefetch_slots", 6, "a plugin")
    assert changed.policy == PolicyTable(prefetch="off", prefetch_slots=6)
    assert (changed.path, changed.found_by) == (config.path, config.found_by)
    assert config.policy.prefetch_slots == 4
    assert config.raw == {"policy": {"prefetch": "off"}}
    with pytest.raises(ConfigError, match=r"a plugin: policy\.prefetch\.x: 'prefetch' is a value, not a table"):
        config.with_default("policy.prefetch.x", 1, "a plugin")


@pytest.mark.parametrize(
    ("backend", "text", "message"),
    [
        ("sim", "jitter = -1", r"jitter: must be 0 or more, not -1\.0\."),
        ("sim", "link_gbps = nan", r"link_gbps: must be a finite number, not nan\."),
        ("sim", "tflops = inf", r"tflops: must be a finite number, not inf\."),
        ("sim", "memory_nbytes = -5", r"memory_nbytes: must be 0 or more, not -5\."),
        ("sim", "copy_queues = -2", r"copy_queues: must be -1 or more, not -2\."),
        ("reference", "memory_mib = -1", r"memory_mib: must be 0 or more, not -1\."),
        ("reference", "copy_queues = -1", r"copy_queues: must be 0 or more, not -1\."),
    ],
)
def test_senseless_options_name_the_file_and_the_key(
    backend: str, text: str, message: str, places: dict[str, Path]
) -> None:
    places["current folder"].write_text(f"[backends.{backend}.options]\n{text}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=rf"^plugins\.toml: backends\.{backend}\.options\.{message}"):
        PluginManager(load_config(), external=False)


def test_a_policy_that_nobody_offers(places: dict[str, Path]) -> None:
    for name, hint in (
        ("selectiv", r"Did you mean 'selective'\?"),
        ("bogus", "There are: off, whole, selective, auto"),
    ):
        places["current folder"].write_text(f"[policy]\nprefetch = '{name}'\n", encoding="utf-8")
        with pytest.raises(ConfigError, match=rf"^plugins\.toml: policy\.prefetch: .*'{name}'\. {hint}"):
            PluginManager(load_config(), external=False)
