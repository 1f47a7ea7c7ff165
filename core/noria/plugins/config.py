"""plugins.toml: which plugins load, which backend comes first, and their options.

The first file found counts alone; nothing is merged. It names installed plugins and never a module, so a file in the
current folder cannot run code. Only this module and the command line read the environment.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import logging
import math
import os
import tomllib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from noria.api.errors import ConfigError

if TYPE_CHECKING:
    from noria.plugins.types import BackendSpec

logger = logging.getLogger(__name__)

FILE_NAME = "plugins.toml"
SCHEMA = 1
MIN_SLOTS, MAX_SLOTS = 2, 64  # of the prefetch ring; below two there is nothing to run ahead with
TYPE_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}

OptionValue: TypeAlias = bool | int | float | str


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginsTable:
    """`[plugins]`.

    Attributes:
        autoload: whether installed plugins are looked for; without, only those that come with the core load.
        disabled: names of plugins that are not imported.
        order: names of backends `auto` asks first; the others follow by priority.
    """

    autoload: bool = True
    disabled: tuple[str, ...] = ()
    order: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendTable:
    """`[backends.NAME]`.

    Attributes:
        device: number of the device meant where only the backend is named.
        options: those of the backend's `BackendSpec`; what is not here has its default.
    """

    enabled: bool = True
    device: int = 0
    options: Mapping[str, OptionValue] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyTable:
    """`[policy]`: defaults of `--prefetch` and `--prefetch-slots`."""

    prefetch: str = "auto"
    prefetch_slots: int = 4


TableT = TypeVar("TableT", PluginsTable, BackendTable, PolicyTable)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The content of plugins.toml. Where it came from plays no part in comparison.

    Attributes:
        path: the file; None = the defaults.
        found_by: what led to it, as shown to users.
        raw: the tables as they were read.
    """

    plugins: PluginsTable = field(default_factory=PluginsTable)
    backends: Mapping[str, BackendTable] = field(default_factory=dict)
    policy: PolicyTable = field(default_factory=PolicyTable)
    path: Path | None = field(default=None, compare=False)
    found_by: str = field(default="defaults", compare=False)
    raw: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def where(self) -> str:
        """How errors name it."""
        return str(self.path or self.found_by)

    def backend(self, name: str) -> BackendTable:
        """The table of one backend, or its defaults."""
        return self.backends.get(name, BackendTable())

    def with_default(self, key: str, value: OptionValue, source: str) -> Config:
        """This configuration with `value` at the dotted `key`; this one itself if the key is set already.

        Raises:
            ConfigError: there is no such key or it takes other values; the text names `source`.
        """
        *tables, last = key.split(".")
        if tables[:1] not in (["backends"], ["policy"]):
            raise ConfigError(f"{source}: {key}: a plugin can set defaults in 'backends' and 'policy' only.")
        raw = copy.deepcopy(dict(self.raw))
        table: Any = raw
        for name in tables:
            table = table.setdefault(name, {})
            if not isinstance(table, dict):
                raise ConfigError(f"{source}: {key}: '{name}' is a value, not a table.")
        if last in table:
            return self
        table[last] = value
        parsed = parse_config(raw, found_by=source)
        return dataclasses.replace(parsed, path=self.path, found_by=self.found_by)


def load_config(explicit: Path | None = None) -> Config:
    """Read the first plugins.toml of: `explicit` (--plugins), $NORIA_PLUGINS, the current folder, the user's folder.

    Raises:
        ConfigError: it cannot be read or something in it is wrong; also if a file that was named does not exist.
    """
    for path, found_by, named in _places(explicit):
        if named or path.exists():
            return parse_config(_read(path, found_by), path=path, found_by=found_by)
    return Config()


def trace_plugins() -> bool:
    """Whether hook calls are logged ($NORIA_TRACE_PLUGINS)."""
    return os.environ.get("NORIA_TRACE_PLUGINS", "") not in ("", "0")


def _places(explicit: Path | None) -> Iterator[tuple[Path, str, bool]]:
    if explicit is not None:
        yield explicit, "--plugins", True
    if named := os.environ.get("NORIA_PLUGINS"):
        yield Path(named), "$NORIA_PLUGINS", True
    yield Path(FILE_NAME), "current folder", False

    from platformdirs import user_config_path  # here, so that importing plugins stays cheap

    yield user_config_path("noria", appauthor=False) / FILE_NAME, "user folder", False


def _read(path: Path, found_by: str) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"{path} (from {found_by}) cannot be read: {error.strerror or error}.") from error
    except ValueError as error:  # not TOML, or not UTF-8
        raise ConfigError(f"{path}: not valid TOML: {error}.") from error


def parse_config(raw: Mapping[str, Any], *, path: Path | None = None, found_by: str = "defaults") -> Config:
    """Check the tables of a plugins.toml. Error texts begin with `path`, or with `found_by` if there is no file.

    Raises:
        ConfigError: an unknown key, or a value of the wrong type or out of its range.
    """
    where = str(path or found_by)
    _check_keys(raw, ("schema", "plugins", "backends", "policy"), where, "")
    schema = check_value(raw.get("schema", SCHEMA), SCHEMA, f"{where}: schema")
    if schema != SCHEMA:
        raise ConfigError(f"{where}: schema is {schema}; this version of noria reads schema {SCHEMA}.")
    tables = check_value(raw.get("backends", {}), {}, f"{where}: backends")
    backends = {name: _table(BackendTable, table, where, f"backends.{name}") for name, table in tables.items()}
    for name, table in backends.items():
        if table.device < 0:
            raise ConfigError(f"{where}: backends.{name}.device: must be 0 or more, not {table.device}.")
    policy = _table(PolicyTable, raw.get("policy", {}), where, "policy")
    if not MIN_SLOTS <= policy.prefetch_slots <= MAX_SLOTS:
        raise ConfigError(
            f"{where}: policy.prefetch_slots: must be {MIN_SLOTS} to {MAX_SLOTS}, not {policy.prefetch_slots} "
            f'(policy.prefetch = "off" turns the ring off).'
        )
    return Config(
        plugins=_table(PluginsTable, raw.get("plugins", {}), where, "plugins"),
        backends=backends,
        policy=policy,
        path=path,
        found_by=found_by,
        raw=raw,
    )


def _table(cls: type[TableT], raw: object, where: str, path: str) -> TableT:
    """A table as the dataclass that declares its keys; the type of a value is that of the field's default."""
    default = cls()
    table = check_value(raw, {}, f"{where}: {path}")
    _check_keys(table, [f.name for f in dataclasses.fields(default)], where, path)
    return cls(
        **{key: check_value(value, getattr(default, key), f"{where}: {path}.{key}") for key, value in table.items()}
    )


def _check_keys(table: Mapping[str, Any], known: Collection[str], where: str, path: str) -> None:
    for key in table:
        if key not in known:
            dotted = f"{path}.{key}" if path else key
            hint = did_you_mean(key, known) or f"Known are: {', '.join(known) or 'none'}."
            raise ConfigError(f"{where}: {dotted}: unknown key. {hint}")


def check_value(value: Any, default: Any, where: str) -> Any:
    """`value` if it has the type of `default`; a whole number also stands for a float, a list of strings is a tuple.

    Raises:
        ConfigError: it has another type.
    """
    if isinstance(default, Mapping):
        if isinstance(value, Mapping):
            return value
        raise ConfigError(f"{where}: must be a table, not {value!r}.")
    if isinstance(default, tuple):
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            return tuple(value)
        raise ConfigError(f"{where}: must be a list of strings, not {value!r}.")
    if type(default) is float and type(value) is int:
        value = float(value)
    if type(value) is not type(default):  # not isinstance: true is no whole number here
        raise ConfigError(f"{where}: must be {TYPE_NAMES[type(default)]}, not {value!r}.")
    if type(value) is float and not math.isfinite(value):
        raise ConfigError(f"{where}: must be a finite number, not {value!r}.")
    return value


def backend_options(table: BackendTable, spec: BackendSpec, where: str) -> dict[str, OptionValue]:
    """The options of a backend, complete with defaults; `where` begins every error text.

    Raises:
        ConfigError: an unknown option, or a value it does not take.
    """
    path = f"backends.{spec.name}.options"
    _check_keys(table.options, spec.options, where, path)
    options: dict[str, OptionValue] = {name: option.default for name, option in spec.options.items()}
    for name, value in table.options.items():
        option = spec.options[name]
        options[name] = check_value(value, option.default, f"{where}: {path}.{name}")
        if option.choices and value not in option.choices:
            raise ConfigError(f"{where}: {path}.{name}: must be one of {', '.join(option.choices)}, not {value!r}.")
    if spec.check_options is not None:
        try:
            spec.check_options(options)
        except ConfigError as error:
            raise ConfigError(f"{where}: {path}.{error}") from error
    return options


def did_you_mean(name: str, known: Collection[str]) -> str:
    """A sentence with the nearest of the known names; empty if none is near."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"Did you mean '{near[0]}'?" if near else ""
